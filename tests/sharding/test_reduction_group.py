"""Reductions over a process group of their own, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import PeerLostError, RanksDivergedError, checkpoint, fully_shard
from tests.corpus.gathering import wholes
from tests.corpus.instruments import run
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    batches,
    check_backward,
    group_of,
    hybrid_mesh,
    loss_of,
    run_backward,
    seeded,
    sharded_modules,
    sharded_net,
    step_all,
)
from tests.sharding.test_communication import Gather, Scatter
from tests.worlds import Ranks, on_processes


def _train(rank: int, world_size: int, way: str, folder: Path) -> None:
    kwargs: dict[str, Any] = {"mesh": hybrid_mesh(world_size)} if way == "hybrid" else {}
    if way == "fewer ranks":
        kwargs["reshard_after_forward"] = 2
    net, whole = sharded_net(**kwargs), seeded(Net)
    net.set_separate_reduce_scatter_group()
    if way == "in flight":
        net.set_reduce_scatter_max_input_buffers(3)
    if way == "custom":
        for module in sharded_modules(net):
            module.set_custom_all_gather(Gather(returns_work=True))
            module.set_custom_reduce_scatter(Scatter(returns_work=False))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, whole)]
    for step in range(2):
        for sync in (False, True):
            net.set_requires_gradient_sync(sync)
            x = batches(world_size, 2 * step + sync)
            run_backward(net, whole, x, rank)
        assert_same_gradients(net, whole)
        step_all(optimizers)
    mesh = group_of(net).mesh
    assert mesh.scatter_group is not None
    assert mesh.scatter_group.size() == mesh.shard_group.size()
    assert mesh.scatter is not mesh.shard

    # A checkpoint knows nothing of it.
    checkpoint.save(folder / "step", model=net, optimizer=optimizers[0])
    again = sharded_net(**({"mesh": hybrid_mesh(world_size)} if way == "hybrid" else {}))
    checkpoint.load(folder / "step", model=again)
    torch.testing.assert_close(wholes(again.parameters()), wholes(net.parameters()))


@pytest.mark.parametrize(
    ("instrument", "way", "world_size"),
    [
        ("c10d", "plain", 2),
        ("shm", "plain", 2),
        ("shm", "in flight", 4),
        ("collectives", "in flight", 2),
        ("threads", "custom", 2),
        ("threads", "hybrid", 4),
        ("threads", "fewer ranks", 4),
    ],
)
def test_training(instrument: str, way: str, world_size: int, tmp_path: Path) -> None:
    run(instrument, _train, world_size, way, tmp_path)


def _order(rank: int, world_size: int) -> list[tuple[str, bool]]:
    """Return the collectives of a step: their kinds, and whether they are over the world."""
    net = sharded_net(transport="collectives")
    net.set_separate_reduce_scatter_group()
    calls: list[tuple[str, bool]] = []

    def noting(kind: str, function: Any) -> Any:
        def call(*args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            calls.append((kind, group is dist.group.WORLD))
            return function(*args, group=group, **kwargs)

        return call

    dist.all_gather_single = noting("gather", dist.all_gather_single)
    dist.reduce_scatter_single = noting("reduce", dist.reduce_scatter_single)
    loss_of(net, batches(world_size)[rank]).backward()
    return calls


def test_gathers_of_backward_are_launched_beside_reductions(ranks: Ranks) -> None:
    first, *others = ranks(_order, 4)
    assert all(calls == first for calls in others), "in one order on every rank"
    assert {world for kind, world in first if kind == "gather"} == {True}
    assert {world for kind, world in first if kind == "reduce"} == {False}
    kinds = "".join(kind[0] for kind, _ in first)
    assert kinds.startswith("ggggg"), "four groups in forward, and the first of backward"
    assert "grg" in kinds, "backward gathers the next group beside the reduction of the last"


def _raises(rank: int, world_size: int, transport: str) -> str:
    """One rank raises in backward and ends; the others must hear of it."""
    net = sharded_net(transport=transport)
    net.set_separate_reduce_scatter_group()
    x = batches(world_size)
    loss_of(net, x[rank]).backward()
    net.zero_grad()

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("on one rank")

    if rank == 1:

        def failing(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            out.register_hook(fail)

        net.blocks[0].register_forward_hook(failing)
        loss_of(net, x[rank]).backward()
    try:
        for _ in range(2):
            loss_of(net, x[rank]).backward()
    except (PeerLostError, RanksDivergedError) as error:
        return type(error).__name__
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_raises_ends_the_others_with_an_error(
    ranks: Ranks, world_size: int, transport: str
) -> None:
    # Nobody waits for the timeout: that would be too late for the test.
    outcomes = ranks(_raises, world_size, transport, pg_timeout=600, expect_failures=True)
    assert "ArithmeticError: on one rank" in outcomes[1].error
    for rank, outcome in enumerate(outcomes):
        if rank != 1:
            assert outcome.ok, outcome.error
            assert outcome.result in ("PeerLostError", "RanksDivergedError")


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@on_processes(4)
def test_all_ranks_train_on_after_a_backward_that_raised(
    rank: int, world_size: int, transport: str
) -> None:
    """All ranks raise in backward, and train on."""
    net, whole = sharded_net(transport=transport), seeded(Net)
    net.set_separate_reduce_scatter_group()
    net.set_reduce_scatter_max_input_buffers(2)
    x = batches(world_size)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("on all ranks")

    def failing(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(fail)

    for block in (0, 1):
        hook = net.blocks[block].register_forward_hook(failing)
        with pytest.raises(ArithmeticError):
            loss_of(net, x[rank]).backward()
        hook.remove()
        net.zero_grad()
        whole.zero_grad()
        check_backward(net, whole, x, rank)
        net.zero_grad()


def _not_called_by_all(rank: int, world_size: int) -> str:
    net = fully_shard(nn.Linear(6, 6))
    if rank == 0:
        try:
            net.set_separate_reduce_scatter_group()
        except (PeerLostError, RanksDivergedError) as error:
            return str(error)
        raise AssertionError("the group has only one rank")
    return ""


def test_a_rank_that_does_not_make_the_group_is_named(ranks: Ranks) -> None:
    message, _ = ranks(_not_called_by_all, 2, pg_timeout=3)
    assert "a process group of ranks [0, 1]" in message
