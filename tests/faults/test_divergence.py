"""Ranks that do not run the same are told so, by name, within seconds; nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import PeerLostError, RanksDivergedError, fully_shard
from shardwise.transport import peers
from tests.harness import run_ranks
from tests.sharding.nets import batches, loss_of, seeded
from tests.worlds import on_processes

pytestmark = pytest.mark.usefixtures("new_ranks")

SECONDS = 20  # of which torch takes some to start


class Branches(nn.Module):
    """Two branches, of which a step runs those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, branches: str = "left right") -> torch.Tensor:
        for name in branches.split():
            x = getattr(self, name)(x)
        return self.last(x)


def _sharded(**kwargs: Any) -> Branches:
    model = seeded(Branches)
    for layer in (model.left, model.right, model.last):
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def _says(call: Callable[[], object]) -> str:
    start = time.monotonic()
    with pytest.raises(RanksDivergedError) as caught:
        call()
    assert time.monotonic() - start < SECONDS
    return str(caught.value)


def _other_order(rank: int, world_size: int) -> str:
    model = _sharded()
    x = batches(world_size)[rank]
    model(x).sum().backward()
    order = "left right" if rank == 0 else "right left"

    def step() -> None:
        model(x, order).sum().backward()

    return _says(step)


@pytest.mark.parametrize("world_size", [2, 3])
def test_another_order_of_modules(world_size: int) -> None:
    for message in run_ranks(_other_order, world_size):
        assert "ranks have diverged" in message
        assert "all-gather of left" in message
        assert "all-gather of right" in message


def _other_dtype(rank: int, world_size: int) -> str:
    model = seeded(Branches)
    if rank == 1:
        model.right.bfloat16()
    for layer in (model.left, model.right, model.last):
        fully_shard(layer)
    fully_shard(model)
    return _says(lambda: model(batches(world_size)[rank], "right"))


def test_another_dtype_of_a_parameter_is_named() -> None:
    for message in run_ranks(_other_dtype, 2):
        assert "the first parameter in which they differ: right.weight: (6, 6)" in message
        assert "bfloat16" in message


def _unused(rank: int, world_size: int, reduces_unused: bool) -> Any:
    model = _sharded()
    # Frozen on one rank only: its gradient is missing there.
    model.right.bias.requires_grad_(rank == 0)
    if reduces_unused:
        model.set_reduce_scatter_unused_params(True)

    def step() -> None:
        loss_of(model, batches(world_size)[rank]).backward()

    return _says(step)


def test_a_gradient_that_only_one_rank_has() -> None:
    for message in run_ranks(_unused, 2, False):
        assert "reduce-scatter of right" in message
        assert "freeze the same ones" in message


def _branches(rank: int, world_size: int) -> list[torch.Tensor]:
    model = fully_shard(seeded(Branches))
    model.set_reduce_scatter_unused_params(True)
    model(batches(world_size)[rank], "left" if rank == 0 else "right").sum().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def test_unused_parameters_count_as_zeros_where_asked_for() -> None:
    whole = seeded(Branches)
    x = batches(2)
    for rank, branch in enumerate(("left", "right")):
        (whole(x[rank], branch).sum() / 2).backward()
    for grads in run_ranks(_branches, 2):
        for grad, param in zip(grads, whole.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad)


@on_processes(2)
def test_a_rank_that_is_only_late_is_waited_for(rank: int, world_size: int) -> None:
    peers._COMPARE_SECONDS = 0.1
    model = _sharded()
    x = batches(world_size)[rank]
    if rank == 1:
        time.sleep(1.0)
    model(x).sum().backward()


def _reset_after_a_peer_failed(rank: int, world_size: int) -> list[str]:
    model = _sharded()
    x = batches(world_size)[rank]
    model(x).sum().backward()

    def fail(*_: object) -> None:
        raise ArithmeticError("on one rank only")

    if rank == 0:
        model.right.register_full_backward_hook(fail)

    def steps() -> None:
        for _ in range(2):  # the other rank may notice one step later
            model(x).sum().backward()

    with pytest.raises((ArithmeticError, RanksDivergedError, PeerLostError)):
        steps()
    model.reset_iter_state()
    return [
        group.state.value
        for state in fully_shard.state(model).root.states
        for group in state.groups
    ]


def test_resetting_after_a_peer_failed_waits_for_nobody() -> None:
    outcomes = run_ranks(_reset_after_a_peer_failed, 2, pg_timeout=5, expect_failures=True)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe(2)
        assert set(outcome.result) == {"sharded"}
