"""Optimizers, norms, conversions and state dicts treat shards as they treat parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from shardwise import clip_grad_norm_
from tests.sharding.nets import (
    Net,
    Stack,
    assert_same_gradients,
    assert_same_values,
    average_backward,
    batches,
    loss_of,
    seeded,
    shard_blocks,
    sharded_net,
    train_alike,
    twins,
)

Ranks = Callable[..., list[Any]]


# -- optimizers and norms ----------------------------------------------------------------------


def _norms(rank: int, world_size: int) -> None:
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        ours, theirs, whole = sharded_net(), sharded_net(), seeded(Net)
        x = batches(world_size)
        loss_of(ours, x[rank]).backward()
        loss_of(theirs, x[rank]).backward()
        average_backward(whole, x)
        norms = [
            clip_grad_norm_(ours.parameters(), 0.1, norm_type),
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1, norm_type).full_tensor(),
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type),
        ]
        assert norms[2] > 0.1, "there is something to clip"
        for norm in norms[:2]:
            torch.testing.assert_close(norm, norms[2])
        assert_same_gradients(ours, whole)
        assert_same_gradients(theirs, whole)


def test_torchs_clipping_and_ours_agree(threads: Ranks) -> None:
    threads(_norms, 2)


def _optimizers(rank: int, world_size: int) -> None:
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        net, whole = twins(Net)
        train_alike(net, whole, rank, world_size, make=torch.optim.AdamW, **options)


def test_foreach_and_fused_optimizers(threads: Ranks) -> None:
    threads(_optimizers, 2)


def _recreated(rank: int, world_size: int) -> None:
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
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(net, whole)


def test_an_optimizer_made_anew_from_its_state_dict_trains_on(threads: Ranks) -> None:
    threads(_recreated, 2)


# -- conversions and state dicts ---------------------------------------------------------------


@contextmanager
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _swapped(rank: int, world_size: int, after_a_step: bool) -> None:
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
            loss_of(net, x[rank]).backward()
            average_backward(whole, x)
            assert_same_gradients(net, whole)
        for model in (net, whole):
            model.load_state_dict({name: v.clone() for name, v in model.state_dict().items()})
            model.zero_grad()
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        assert_same_gradients(net, whole)


@pytest.mark.parametrize("after_a_step", [False, True], ids=["before a step", "after a step"])
def test_conversions_that_swap_parameters(ranks: Ranks, after_a_step: bool) -> None:
    ranks(_swapped, 2, after_a_step)


def _assigned(rank: int, world_size: int) -> None:
    net, whole = twins(Net)
    other, other_whole = shard_blocks(seeded(Net, seed=1)), seeded(Net, seed=1)
    train_alike(net, whole, rank, world_size, steps=1)
    net.load_state_dict(other.state_dict(), assign=True)
    whole.load_state_dict(other_whole.state_dict())
    train_alike(net, whole, rank, world_size)


def test_assigned_state_dicts_train_on(threads: Ranks) -> None:
    threads(_assigned, 2)


def _broadcast(rank: int, world_size: int) -> None:
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


def test_full_state_dicts_of_one_rank_load_on_all(ranks: Ranks) -> None:
    ranks(_broadcast, 2)
