"""``torchao``'s tensor subclasses, which gather what they like: int8 and float8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import shardwise
from tests.ecosystem.llama import full
from tests.sharding.nets import seeded
from tests.worlds import on_processes

pytest.importorskip("torchao", reason="needs torchao: install .[ecosystem]")

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs


WIDTH = 32


def _make() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH, bias=False),
        nn.GELU(),
        nn.Linear(2 * WIDTH, WIDTH, bias=False),
    )


def _int8(model: nn.Module) -> nn.Module:
    """Weights are int8 with a scale a row, and so do they travel."""
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(model, int8_weight_only_quantized_training())
    return model


def _float8(model: nn.Module) -> nn.Module:
    """Weights are float32, and are cast to float8 before they travel."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(model, config=config)


KINDS = {"int8": _int8, "float8": _float8}


# Torch's FSDP2 cannot send float8 over gloo, which does not know the dtype.
ALSO_WITH_TORCHS = ("int8",)
TRANSPORTS = ("shm", "c10d", "collectives")


def _sharded(kind: str, shard: Callable[..., Any], **how: Any) -> nn.Module:
    model = KINDS[kind](seeded(_make))
    policy = shardwise.MixedPrecisionPolicy(param_dtype=torch.float32)
    for module in (model[0], model[2], model):
        shard(module, mp_policy=policy, **how)
    return model


def _step(model: nn.Module, batches: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for x in batches:
        (model(x).square().mean() / len(batches)).backward()
    return {name: full(param.grad) for name, param in model.named_parameters()}


def _gradients(rank: int, world_size: int) -> None:
    for kind, convert in KINDS.items():
        models = {how: _sharded(kind, shardwise.fully_shard, transport=how) for how in TRANSPORTS}
        assert all(isinstance(model, shardwise.FSDPModule) for model in models.values())
        if kind in ALSO_WITH_TORCHS:
            models["torch's FSDP2"] = _sharded(kind, torch.distributed.fsdp.fully_shard)
        twin = convert(seeded(_make))
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            batches = torch.randn(world_size, 16, WIDTH, generator=generator)
            wanted = _step(twin, batches)
            for how, model in models.items():
                found = _step(model, batches[rank : rank + 1])
                torch.testing.assert_close(
                    found, wanted, msg=lambda text, of=(kind, how): f"{of}: {text}"
                )


def _learns(rank: int, world_size: int) -> None:
    """Steps of the optimizer round at random, so that what they make is not compared."""
    for kind in KINDS:
        model = _sharded(kind, shardwise.fully_shard)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(5):
            loss = model(torch.ones(4, WIDTH) * (rank + 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2, f"{kind}: {losses}"


@on_processes(2)
def test_weights_of_eight_bits_travel_as_such_and_train(rank: int, world_size: int) -> None:
    _gradients(rank, world_size)
    _learns(rank, world_size)
