"""Forward-mode differentiation of sharded modules gives what it gives in torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.autograd import forward_ad

import shardwise
from tests.corpus.models import Stack
from tests.sharding.nets import (
    assert_same_gradients,
    average_backward,
    batches,
    loss_of,
    seeded,
)
from tests.worlds import Ranks


def _sharded(fully_shard: Callable[..., object], reshards: bool | int) -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), seeded(Stack))
    net[0].load_state_dict(seeded(lambda: nn.Linear(6, 6)).state_dict())
    for block in net[1]:
        fully_shard(block, reshard_after_forward=reshards)
    fully_shard(net, reshard_after_forward=bool(reshards))
    return net


def _leave(*_: object, **__: object) -> None:
    """Shard nothing."""


def _dual(net: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), forward_ad.dual_level():
        out = forward_ad.unpack_dual(net(forward_ad.make_dual(x, tangent))).tangent
        assert out is not None
        return out.clone()


def _functional(net: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, {}, (x,))

    return torch.func.jvp(call, (x,), (tangent,))[1]


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "forward_ad": _dual,
    "jvp": lambda net, x, tangent: torch.func.jvp(net, (x,), (tangent,))[1],
    "functional_call in jvp": _functional,
    "jacfwd": lambda net, x, _: torch.func.jacfwd(net)(x[0]),
    "vmap": lambda net, x, _: torch.func.vmap(net)(x),
}


def _as_in_torch(rank: int, world_size: int, strategies: list[bool | int]) -> None:
    # Torch compiles what it needs for tangents with torch.jit.
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script")
    x = batches(world_size)[rank]
    tangent = torch.ones_like(x)
    for reshards in strategies:
        for name, way in WAYS.items():
            # An integer torch does not support here.
            shard = torch.distributed.fsdp.fully_shard if isinstance(reshards, bool) else _leave
            expected = way(_sharded(shard, reshards), x, tangent)
            net = _sharded(shardwise.fully_shard, reshards)
            for _ in range(2):  # with a gather inside, and with what that left
                found = way(net, x, tangent)
                torch.testing.assert_close(found, expected, msg=lambda t, n=name: f"{n}: {t}")
            # It goes on to train.
            whole = _sharded(_leave, reshards)
            loss_of(net, x).backward()
            average_backward(whole, batches(world_size))
            assert_same_gradients(net, whole)


@pytest.mark.parametrize(
    ("transport", "strategies"),
    [("shm", [True, False]), ("c10d", [True]), ("collectives", [False])],
)
def test_forward_mode_gives_what_torch_gives(
    ranks: Ranks, transport: str, strategies: list[bool | int]
) -> None:
    ranks(_as_in_torch, 2, strategies, env={"SHARDWISE_TRANSPORT": transport})


def test_forward_mode_of_parameters_that_are_kept_on_fewer_ranks(ranks: Ranks) -> None:
    ranks(_as_in_torch, 4, [2])
