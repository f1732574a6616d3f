"""Optimizers, norms, conversions and state dicts treat shards as they treat parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from shardwise import FullyShardedDataParallel, StateDictType, fully_shard
from shardwise.base.errors import MisuseError
from shardwise.optim import in_backward, offload
from tests.corpus.models import Stack, Tied
from tests.sharding.nets import (
    Net,
    assert_same_values,
    batches,
    check_backward,
    hybrid_mesh,
    loss_of,
    run_backward,
    seeded,
    shard_blocks,
    sharded_net,
    step_all,
    train_alike,
    twins,
)
from tests.worlds import Ranks, on_processes, on_threads

# -- optimizers and norms ----------------------------------------------------------------------


@on_threads(2)
def test_an_optimizer_made_anew_from_its_state_dict_trains_on(rank: int, world_size: int) -> None:
    net, whole = twins(Net)
    models = (net, whole)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in models]
    for step in range(4):
        if step == 2:
            states = [optimizer.state_dict() for optimizer in optimizers]
            assert isinstance(states[0]["state"][0]["exp_avg"], DTensor)
            optimizers = [torch.optim.Adam(m.parameters(), lr=0.0) for m in models]
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        x = batches(world_size, step)
        run_backward(net, whole, x, rank)
        step_all(optimizers)
    assert_same_values(net, whole)


# -- conversions and state dicts ---------------------------------------------------------------


@on_threads(2)
def test_what_a_closure_gathers_is_of_the_values_before_the_step(
    rank: int, world_size: int
) -> None:
    x = batches(world_size)[rank]
    net = sharded_net()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)  # whose writes autograd ignores

    def closure() -> torch.Tensor:
        loss = loss_of(net, x)
        loss.backward()
        net.unshard()
        return loss

    optimizer.step(closure)
    with pytest.raises(MisuseError, match="it was written to while group"):
        net(x)


@contextmanager
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("after_a_step", [False, True], ids=["before a step", "after a step"])
@on_processes(2)
def test_conversions_that_swap_parameters(rank: int, world_size: int, after_a_step: bool) -> None:
    net, whole = twins(Net)
    if after_a_step:
        train_alike(net, whole, rank, world_size, steps=1)
    params = list(net.parameters())
    with _swapping():
        net.double()
        whole.double()
        assert all(a is b for a, b in zip(params, net.parameters(), strict=True))
        assert all(param.dtype == torch.float64 for param in params)
        x = batches(world_size).double()
        for _ in range(2):
            check_backward(net, whole, x, rank)
        for model in (net, whole):
            model.load_state_dict({name: v.clone() for name, v in model.state_dict().items()})
            model.zero_grad()
        check_backward(net, whole, x, rank)


@on_threads(2)
def test_assigned_state_dicts_train_on(rank: int, world_size: int) -> None:
    for make, blocks in ((Net, lambda net: net.blocks), (Tied, lambda net: net.children())):
        net, whole, other, other_whole = (seeded(make, seed=seed) for seed in (0, 0, 1, 1))
        for sharded in (net, other):
            for block in blocks(sharded):
                fully_shard(block)
            fully_shard(sharded)
        train_alike(net, whole, rank, world_size, steps=1)
        net.load_state_dict(other.state_dict(), assign=True)
        whole.load_state_dict(other_whole.state_dict())
        train_alike(net, whole, rank, world_size)
    assert net.first.weight is net.last.weight, "one replacement is seen by all groups"


@on_processes(2)
def test_full_state_dicts_of_one_rank_load_on_all(rank: int, world_size: int) -> None:
    net, whole = twins(Stack)
    train_alike(net, whole, rank, world_size, make=torch.optim.Adam, steps=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    loss_of(net, batches(world_size)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    to_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    values = get_model_state_dict(net, options=to_rank_0)
    # On CPUs torch gives out the steps that the optimizer counts on.
    state = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=to_rank_0))
    assert bool(values) == (rank == 0)

    other = shard_blocks(seeded(Stack, seed=1))
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.05)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, values, options=from_rank_0)
    set_optimizer_state_dict(other, other_optimizer, state, options=from_rank_0)
    x = batches(world_size, 1)[rank]
    for model, its in ((net, optimizer), (other, other_optimizer)):
        loss_of(model, x).backward()
        its.step()
    for (name, param), twin in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), twin.full_tensor()), name


# -- files of other ranks ----------------------------------------------------------------------


def _wrapped_net() -> nn.Module:
    net = FullyShardedDataParallel(seeded(Net))
    FullyShardedDataParallel.set_state_dict_type(net, StateDictType.SHARDED_STATE_DICT)
    return net


def _trained(make: Callable[[], nn.Module], step: int = 0) -> tuple[nn.Module, torch.optim.Adam]:
    net = make()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    loss_of(net, batches(1, step)[0]).backward()
    optimizer.step()
    return net, optimizer


def _save(rank: int, world_size: int, make: Callable[[], nn.Module], folder: Path) -> None:
    net, optimizer = _trained(make)
    saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, folder / f"{rank}.pt")


def _model(net: nn.Module, state: dict[str, Any], folder: Path) -> None:
    net.load_state_dict(state["model"])


def _assigned_model(net: nn.Module, state: dict[str, Any], folder: Path) -> None:
    net.load_state_dict(state["model"], assign=True)


def _new_optimizer(net: nn.Module, state: dict[str, Any], folder: Path) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    optimizer.load_state_dict(state["optimizer"])
    optimizer.step()


def _used_optimizer(net: nn.Module, state: dict[str, Any], folder: Path) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    optimizer.step()
    optimizer.load_state_dict(state["optimizer"])
    optimizer.step()


def _offloaded_optimizer(net: nn.Module, state: dict[str, Any], folder: Path) -> None:
    optimizer = offload(torch.optim.Adam(net.parameters(), lr=0.1), f"disk:{folder}")
    optimizer.load_state_dict(state["optimizer"])


def _optimizer_in_backward(net: nn.Module, state: dict[str, Any], folder: Path) -> None:
    optimizer = in_backward(net, lambda params: torch.optim.Adam(params, lr=0.1))
    optimizer.load_state_dict(state["optimizer"])
    loss_of(net, batches(1)[0]).backward()


LOADS = (
    _model,
    _assigned_model,
    _new_optimizer,
    _used_optimizer,
    _offloaded_optimizer,
    _optimizer_in_backward,
)


@pytest.mark.parametrize("make", [sharded_net, _wrapped_net])
@on_processes(2)
def test_shards_that_another_rank_saved_are_refused(
    rank: int, world_size: int, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Load rank 0's file, this rank's own, and copies in memory."""
    _save(rank, world_size, make, tmp_path)
    torch.distributed.barrier()
    first, own = (torch.load(tmp_path / f"{each}.pt", weights_only=True) for each in (0, rank))
    net, optimizer = _trained(make, step=1)
    for load in LOADS:
        if load is _optimizer_in_backward:
            continue  # the other rank would wait in its backward
        before = {name: value.clone() for name, value in net.state_dict().items()}
        if rank:
            where = (
                rf"(weight|bias|exp_avg' of .*) on rank {rank}: .* expected the one of \({rank},"
            )
            with pytest.raises((ValueError, RuntimeError), match=where):
                load(net, first, tmp_path)
            for name, value in net.state_dict().items():
                if value.placements[0].is_shard() and load in (_model, _assigned_model):
                    torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    for load in LOADS:
        load(make(), own, tmp_path)
        kept = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        load(make(), copy.deepcopy(kept), tmp_path)


def _load_of_three(rank: int, world_size: int, folder: Path) -> None:
    own = torch.load(folder / f"{rank}.pt", weights_only=True)
    for load in LOADS:
        with pytest.raises((ValueError, RuntimeError), match=r"of shape \(3,\), expected the one"):
            load(sharded_net(), own, folder)


def test_shards_that_a_job_of_another_size_saved_are_refused(
    threads: Ranks, tmp_path: Path
) -> None:
    threads(_save, 3, sharded_net, tmp_path)
    threads(_load_of_three, 2, tmp_path)


@on_processes(4)
def test_shards_that_another_replica_saved_are_loaded(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return sharded_net(mesh=hybrid_mesh(world_size))

    _save(rank, world_size, make, tmp_path)
    torch.distributed.barrier()
    saved = torch.load(tmp_path / f"{(rank + 2) % world_size}.pt", weights_only=True)
    for load in LOADS:
        load(make(), saved, tmp_path)
