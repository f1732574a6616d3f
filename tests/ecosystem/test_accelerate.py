"""Accelerate's FSDP2: ``prepare``, which calls its ``fsdp2_prepare_model``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from tests.ecosystem.llama import assert_equal, loss_of, tiny_llama, tokens, train
from tests.worlds import on_processes

pytest.importorskip("accelerate", reason="needs accelerate: install .[ecosystem]")

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs


STEPS = 2
LARGEST = 0.5


def _accelerator(policy: str = "transformer_based_wrap", **plugin: Any) -> Any:
    """As on GPUs: Accelerate goes the way of FSDP2 only where it has found several of them."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    return Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy=policy,
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            **plugin,
        )
    )


def _prepared(accelerator: Any, model: nn.Module) -> tuple[Any, Any]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with shardwise.patch_torch():
        model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, shardwise.FSDPModule)
    layers = [m for m in model.modules() if isinstance(m, LlamaDecoderLayer)]
    assert layers
    assert all(isinstance(layer, shardwise.FSDPModule) for layer in layers)
    return model, optimizer


def _step(accelerator: Any, model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    accelerator.backward(loss_of(model, batch))
    accelerator.clip_grad_norm_(model.parameters(), LARGEST)
    optimizer.step()
    optimizer.zero_grad()


def _twin(world_size: int, steps: int, tied: bool) -> nn.Module:
    twin = tiny_llama(tied)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train(
        twin,
        optimizer,
        lambda step: tokens(world_size, step),
        steps,
        lambda: torch.nn.utils.clip_grad_norm_(twin.parameters(), LARGEST),
    )
    return twin


def _trained(rank: int, world_size: int, folder: Path, tied: bool, plugin: dict[str, Any]) -> None:
    accelerator = _accelerator(**plugin)
    model, optimizer = _prepared(accelerator, tiny_llama(tied))
    for step in range(STEPS):
        _step(accelerator, model, optimizer, tokens(world_size, step)[rank])
    assert_equal(model, _twin(world_size, STEPS, tied))
    accelerator.save_state(folder)
    _step(accelerator, model, optimizer, tokens(world_size, STEPS)[rank])
    accelerator.load_state(folder)
    assert_equal(model, _twin(world_size, STEPS, tied))
    _step(accelerator, model, optimizer, tokens(world_size, STEPS)[rank])
    assert_equal(model, _twin(world_size, STEPS + 1, tied))
    whole = accelerator.get_state_dict(model)
    assert rank or whole.keys() == tiny_llama(tied).state_dict().keys()


@pytest.mark.long
@on_processes(2)
def test_a_model_that_accelerate_prepared_trains_and_is_saved(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    kinds = {
        "freed": {"reshard_after_forward": True},
        "kept": {"reshard_after_forward": False},
        "from rank 0": {"cpu_ram_efficient_loading": True},
        "whole": {"state_dict_type": "FULL_STATE_DICT", "activation_checkpointing": True},
    }
    for name, plugin in kinds.items():
        _trained(rank, world_size, tmp_path / name, name == "freed", plugin)


class _Own(nn.Module):
    """A model with tied weights that Accelerate does not know how to tie again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


class _Tying(_Own):
    """Such a model that does."""

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight


@on_processes(2)
def test_a_tie_that_accelerate_loses_is_reported(rank: int, world_size: int) -> None:
    accelerator = _accelerator("no_wrap", cpu_ram_efficient_loading=True)
    for cls in (_Own, _Tying):
        model: Any = cls()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as seen, shardwise.patch_torch():
            warnings.simplefilter("always")
            model, optimizer = accelerator.prepare(model, optimizer)
        said = [each for each in seen if "tie them again" in str(each.message)]
        assert bool(said) is (cls is _Own)
        assert (model.head.weight is model.embed.weight) is (cls is _Tying)
