"""torchtitan's ``apply_fsdp_to_decoder`` on its Llama debug model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from tests.sharding.nets import assert_same_values
from tests.worlds import on_processes

pytest.importorskip("torchtitan", reason="needs torchtitan: install .[ecosystem]")

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs


# Its models import kernels for experts over several GPUs, in a language that torch for CPUs lacks.
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
STEPS = 2


def _debug_model(tied: bool) -> nn.Module:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.enable_weight_tying = tied
    for layer in config.layers:  # flex attention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model: nn.Module = config.build()
    model.init_states()
    return model


def _batch(world_size: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 2048, (world_size, 1, 8), generator=generator)


def _train(model: nn.Module, batches: Callable[[int], torch.Tensor]) -> None:
    """Loss is a sum here: torchtitan divides by the number of tokens of all ranks itself."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for batch in batches(step):
            logits = model(batch[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").div(
                14
            ).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_processes(2)
def test_torchtitans_llama_trains_as_on_one_process(rank: int, world_size: int) -> None:
    sys.modules.setdefault(KERNELS, MagicMock())
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, disable_fsdp_gradient_division

    for tied, policy in ((False, "default"), (True, "always")):
        model, twin = _debug_model(tied), _debug_model(tied)
        with shardwise.patch_torch():
            apply_fsdp_to_decoder(
                model,
                init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)),
                param_dtype=torch.float32,
                reduce_dtype=torch.float32,
                pp_enabled=False,
                reshard_after_forward_policy=policy,
            )
        assert isinstance(model, shardwise.FSDPModule)
        assert all(isinstance(layer, shardwise.FSDPModule) for layer in model.layers.values())
        disable_fsdp_gradient_division(model)
        _train(model, lambda step: _batch(world_size, step)[rank : rank + 1])
        _train(twin, lambda step: _batch(world_size, step))
        assert_same_values(model, twin)
