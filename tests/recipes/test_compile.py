"""``--compile``: blocks are compiled, and train as they do when they are not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.app.recipes.core import build
from shardwise.app.recipes.text.config import LmConfig
from shardwise.frontends.strategies import Checkpointing
from shardwise.insight.schema.training import Existing
from tests.recipes.digits import small_mnist
from tests.recipes.running import train
from tests.recipes.small import losses, small_config, validation, write_model
from tests.worlds import Ranks

# Dynamo and the compiler behind it warn of what they do themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


def train_compiled(rank: int, world_size: int, *configs: Any) -> list[tuple[str, int, int]]:
    """Train each; say how it ended, how many graphs were compiled for it, and what broke them."""
    # It makes graphs of forward and backward, and then no kernels of them.
    build.BACKEND = "aot_eager"
    counters = torch._dynamo.utils.counters
    ended = []
    for config in configs:
        counters.clear()
        [how] = train(rank, world_size, config)
        ended.append((how, counters["stats"]["unique_graphs"], len(counters["graph_break"])))
    return ended


def _modes(always: Checkpointing) -> pytest.MarkDecorator:
    """Run a test in every mode: compiling takes seconds, so `make test` takes one."""
    modes = [
        pytest.param(mode, marks=() if mode is always else pytest.mark.long)
        for mode in Checkpointing
    ]
    return pytest.mark.parametrize("mode", modes)


@_modes(Checkpointing.SELECTIVE)
def test_compiled_blocks_train_as_others_and_go_on_exactly(
    ranks: Ranks, tmp_path: Path, mode: Checkpointing
) -> None:
    model = str(write_model(tmp_path, attention_dropout=0.0))

    def config(name: str, **settings: Any) -> LmConfig:
        steps = {"model": model, "steps": 2, "accumulate": 2}
        return small_config(tmp_path, name, **steps, checkpoint_every=1, **settings)

    def compiled(name: str, **settings: Any) -> LmConfig:
        return config(name, compile=True, activation_checkpointing=mode, **settings)

    plain = config("plain")
    ranks(train, 2, plain)
    first = compiled("compiled", sample_tokens=5)
    # For training and for evaluation: blocks are alike, and a sample compiles nothing.
    assert ranks(train_compiled, 2, first) == [[("finished", 2, 0)]] * 2
    for found, expected in zip(losses(first), losses(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    for found, expected in zip(validation(first), validation(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    shutil.rmtree(first.files.checkpoints / "step-00000002")
    whole = losses(first)
    again = compiled("compiled", existing=Existing.RESUME)
    assert ranks(train_compiled, 2, again) == [[("finished", 0, 0)]] * 2
    assert losses(again) == whole


@pytest.mark.long
@_modes(Checkpointing.FULL)
def test_compiled_batch_norms_count_a_batch_once(
    ranks: Ranks, tmp_path: Path, mode: Checkpointing
) -> None:
    settings: dict[str, Any] = {"steps": 3, "nested": True}
    plain = small_mnist(tmp_path, "plain", **settings)
    ranks(train, 2, plain)
    compiled = small_mnist(
        tmp_path, "compiled", compile=True, activation_checkpointing=mode, **settings
    )
    ranks(train_compiled, 2, compiled)
    for found, expected in zip(losses(compiled), losses(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    # Of running statistics, which no loss of training shows.
    [found], [expected] = validation(compiled), validation(plain)
    assert found == pytest.approx(expected, rel=1e-5)
