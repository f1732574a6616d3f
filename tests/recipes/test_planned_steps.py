"""What a plan says that a step sends is what the loop of the same training sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch

from shardwise.app.recipes.core.journal import Journal, StepMetrics
from shardwise.app.recipes.core.loop import Loop
from shardwise.app.recipes.core.plan import plan_training
from shardwise.app.recipes.core.position import Position
from shardwise.app.recipes.core.recipe import RecipeConfig
from shardwise.app.recipes.core.training import build_run, place_for
from shardwise.app.recipes.text.published import Frozen
from shardwise.base import observe
from shardwise.elastic.rank import StopSignals
from shardwise.elastic.world import World
from shardwise.frontends.strategies import Checkpointing, Strategy
from shardwise.insight.planning.api import Rehearsed
from shardwise.insight.schema.sharding import (
    PrecisionName,
    Stepping,
    TransportName,
    parse_wires,
)
from shardwise.insight.schema.training import DilocoConfig, OptimizerName
from shardwise.runs.metrics import RankStep
from tests.planning.counted import Counts
from tests.recipes.digits import small_mnist
from tests.recipes.small import small_config, write_model
from tests.recipes.snapshots import small_imagenet, small_vit
from tests.recipes.text.plain import tuned
from tests.recipes.text.published import chats, publish, write_lines
from tests.worlds import Ranks

# What peft and transformers warn of in this process is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

#: Calls, launches and bytes of each kind of collective.
Traffic = Counter[tuple[str, str]]

_COUNTED = 3  # the step in which optimizers have their states, and norms of a step before


class _CountedError(Exception):
    """The step has been counted."""


class _CountingJournal(Journal):
    """Counts what is sent in a step, and ends the training after it."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def step(self, metrics: StepMetrics, ranks: Sequence[RankStep]) -> None:
        """Begin to count before the step, and end the training after it."""
        if metrics.step == _COUNTED:
            raise _CountedError
        self._counts.start()


def _sent(rank: int, world_size: int, configs: Mapping[str, RecipeConfig]) -> dict[str, Traffic]:
    """What the loop of each training sends in a step."""
    return {name: _sent_in_step(rank, world_size, config) for name, config in configs.items()}


def _sent_in_step(rank: int, world_size: int, config: RecipeConfig) -> Traffic:
    world = World(rank, world_size, rank, world_size)
    counts = Counts()
    inputs = config.check(world)
    with observe.observing(counts):
        place = place_for(inputs.train, world, torch.device("cpu"))
        run = build_run(inputs, config.assemble(), place, "")
        loop = Loop(
            task=run.task,
            config=inputs.train,
            span=run.span,
            place=place,
            checkpoints=run.checkpoints,
            journal=_CountingJournal(counts),
            signals=StopSignals(),
        )
        with pytest.raises(_CountedError):
            loop.run(Position())
    sent = Traffic()
    for (activity, _, _, _, nbytes, launches, _), calls in counts.sent.items():
        sent[activity, "calls"] += calls
        sent[activity, "launches"] += calls * launches
        sent[activity, "bytes"] += calls * nbytes
    return sent


def _planned(config: RecipeConfig, world_size: int) -> Traffic:
    """What the plan of a training says that a step sends."""
    world = World(0, world_size, 0, world_size)
    inputs = config.check(world)
    plan = plan_training(inputs.blueprint(), inputs.train, config.example(), world, Rehearsed.FIRST)
    planned = Traffic()
    for each in plan.traffic:
        planned[each.collective, "calls"] += each.calls
        planned[each.collective, "launches"] += each.launches
        planned[each.collective, "bytes"] += each.nbytes
    return planned


def _check(ranks: Ranks, configs: Mapping[str, RecipeConfig]) -> None:
    sent = ranks(_sent, 2, configs)[0]
    differ = {}
    for name, config in configs.items():
        if (planned := _planned(config, 2)) != sent[name]:
            differ[name] = {"planned": planned - sent[name], "sent": sent[name] - planned}
    assert not differ


#: Options of a language model that change what is computed or sent. That a step sends what is
#: planned with each of them, tests/recipes/test_program.py shows without the loop.
OPTIONS: dict[str, dict[str, Any]] = {
    "no clipping": {"clip_grad": 0.0},
    "in backward, no clipping": {"stepping": Stepping.IN_BACKWARD, "clip_grad": 0.0},
    **{name.value: {"algorithm": name} for name in OptimizerName},
    **{
        f"{name.value}, groups": {"algorithm": name, "param_groups": ("*q_proj*:lr=1e-4",)}
        for name in (OptimizerName.MUON, OptimizerName.ADAMW8BIT)
    },
    **{
        f"in backward, {name.value}": {"stepping": Stepping.IN_BACKWARD, "algorithm": name}
        for name in OptimizerName
    },
    "in backward, accumulated": {"stepping": Stepping.IN_BACKWARD, "accumulate": 2},
    **{
        f"{strategy.value}, accumulated": {"strategy": strategy, "accumulate": 2}
        for strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD)
    },
    **{
        f"{strategy.value}, accumulated": {"strategy": strategy, "replicas": 2, "accumulate": 2}
        for strategy in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)
    },
    "diloco": {"strategy": Strategy.DILOCO, "replicas": 2, "diloco": DilocoConfig()},
    "bf16": {"param_dtype": PrecisionName.BF16, "reduce_dtype": PrecisionName.FP32},
    "c10d": {"transport": TransportName.C10D},
    "int8": {"transport": TransportName.C10D, "collective_wire": parse_wires("int8")},
    "recomputed": {"activation_checkpointing": Checkpointing.FULL},
    "offloaded inputs": {
        "activation_checkpointing": Checkpointing.OFFLOAD,
        "offload_activations": f"disk:{gettempdir()}",
    },
    "offloaded states": {"offload": "host"},
    "offloaded parameters": {"offload_parameters": "host"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model of one layer, and chats beside it."""
    folder = tmp_path_factory.mktemp("base")
    publish(folder / "model", num_hidden_layers=1)
    write_lines(folder / "chats.jsonl", chats(20))
    return folder


def _adapters(
    folder: Path, base: Path, frozen: Frozen, strategy: Strategy, accumulate: int
) -> RecipeConfig:
    return tuned(
        folder,
        base / "model",
        f"{frozen.value}-{strategy.value}-{accumulate}",
        chat=(str(base / "chats.jsonl"),),
        seq_length=32,
        lora="r=4",
        frozen=frozen,
        strategy=strategy,
        accumulate=accumulate,
    )


def test_a_step_sends_what_its_plan_says(ranks: Ranks, tmp_path: Path, base: Path) -> None:
    write_model(tmp_path, num_hidden_layers=1)
    in_backward = {"stepping": Stepping.IN_BACKWARD, "algorithm": OptimizerName.MUON}
    configs: dict[str, RecipeConfig] = {
        "zero1": small_config(tmp_path, "zero1", strategy=Strategy.ZERO1, accumulate=2),
        "in backward": small_config(tmp_path, "in backward", **in_backward),
    }
    configs["adapters, kept"] = _adapters(tmp_path, base, Frozen.KEEP, Strategy.FULL_SHARD, 2)
    configs["adapters, gathered"] = _adapters(tmp_path, base, Frozen.GATHER, Strategy.ZERO1, 2)
    configs["running statistics"] = small_mnist(tmp_path, "statistics", nested=True)
    configs["classes of a folder"] = small_imagenet(tmp_path, "classes")
    _check(ranks, configs)


@pytest.mark.long
def test_a_step_sends_what_its_plan_says_with_every_option(
    ranks: Ranks, tmp_path: Path, base: Path
) -> None:
    (images := tmp_path / "images").mkdir()
    configs: dict[str, RecipeConfig] = {"vit": small_vit(images, "vit")}
    for name, options in OPTIONS.items():
        configs[name] = small_config(tmp_path, name, **options)
    for strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD):
        for frozen in Frozen:
            for accumulate in (1, 2):
                name = f"adapters, {frozen.value}, {strategy.value}, {accumulate}"
                configs[name] = _adapters(tmp_path, base, frozen, strategy, accumulate)
    _check(ranks, configs)
