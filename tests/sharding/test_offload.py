"""Backward returns when gradients have arrived on the host, told without a device.

A stand-in for a device: copies to pinned memory are put off until an event that was recorded behind
them is waited for, which is as late as a device may be with them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardwise import fully_shard
from shardwise.base.offload import Offload
from shardwise.sharding.state import state_of
from tests.corpus.models import Tied
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    loss_of,
    seeded,
    shard_blocks,
    sharded_modules,
)
from tests.worlds import on_processes


class _Stream:
    """Copies that were asked for, in order, and how many of them are done."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0

    def record_event(self) -> _Event:
        return _Event(self, len(self.copies))

    @property
    def left(self) -> int:
        return len(self.copies) - self.done


class _Event:
    def __init__(self, stream: _Stream, position: int) -> None:
        self.stream, self.position = stream, position

    def synchronize(self) -> None:
        while self.stream.done < self.position:
            host, values = self.stream.copies[self.stream.done]
            host.copy_(values)
            self.stream.done += 1


@contextmanager
def _device() -> Iterator[list[_Stream]]:
    """Offload from a device with these streams, of which the last one is the current one."""
    streams = [_Stream()]
    pinned: set[int] = set()
    empty_like, copy_ = torch.empty_like, torch.Tensor.copy_

    def allocate(tensor: torch.Tensor, *, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        made = torch.full_like(tensor, torch.nan)
        assert pin_memory
        pinned.add(made.data_ptr())
        return made

    def copy_later(into: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> Any:
        if not (non_blocking and into.data_ptr() in pinned):
            return copy_(into, values)
        streams[-1].copies.append((into, values.clone()))
        return into

    def empty(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return (
            allocate(tensor, **kwargs) if "pin_memory" in kwargs else empty_like(tensor, **kwargs)
        )

    with (
        patch.object(Offload, "of", lambda *_: Offload(True, True, torch.device("cpu"))),
        patch.object(torch.accelerator, "current_stream", lambda _: streams[-1]),
        patch.object(torch.Tensor, "is_pinned", lambda _: True),
        patch.object(torch, "empty_like", empty),
        patch.object(torch.Tensor, "copy_", copy_later),
    ):
        yield streams


def _pair() -> nn.Module:
    net = seeded(Tied)
    for layer in net.children():
        fully_shard(layer)
    return fully_shard(net)


def _nested() -> nn.Module:
    return shard_blocks(seeded(Net))


def _copied() -> nn.Module:
    return copy.deepcopy(_nested())


def _copied_pair() -> nn.Module:
    return copy.deepcopy(_pair())


MODELS = {make.__name__: make for make in (_nested, _copied, _pair, _copied_pair)}


@pytest.mark.parametrize("name", MODELS)
@on_processes(2)
def test_gradients_are_on_the_host_when_backward_returns(
    rank: int, world_size: int, name: str
) -> None:
    with _device() as [stream]:
        net, whole = MODELS[name](), seeded(Tied if "pair" in name else Net)
        x = batches(world_size)
        for _ in range(2):
            before = len(stream.copies)
            loss_of(net, x[rank]).backward()
            assert len(stream.copies) > before, "gradients go to the host"
            assert stream.left == 0, "and are there when backward returns"
            average_backward(whole, x)
            assert_same_gradients(net, whole)
            net.zero_grad()
            whole.zero_grad()


@on_processes(2)
def test_of_a_tied_parameter_whose_modules_run_apart(rank: int, world_size: int) -> None:
    """Modules of a tied parameter that run as roots of their own, whole and in copies."""
    with _device() as [stream]:
        net = seeded(Tied)
        fully_shard(net.first)
        fully_shard(net.last)
        for layer in (net.last, copy.deepcopy(net.last)):
            loss_of(layer, batches(world_size)[rank]).backward()
            assert stream.copies, "gradients go to the host"
            assert stream.left == 0, "and are there when backward returns"
            stream.copies.clear()
            stream.done = 0


@on_processes(1)
def test_a_call_has_one_offload_and_so_has_its_copy(rank: int, world_size: int) -> None:
    with _device():
        for net in (_nested(), _copied()):
            states = [state_of(module) for module in sharded_modules(net)]
            offloads = [
                {
                    *(id(group._offload) for group in state.groups),
                    *(id(param.form.offload) for group in state.groups for param in group.params),
                }
                for state in states
                if state is not None
            ]
            assert len(offloads) == 4
            assert all(len(each) == 1 for each in offloads), "one for each call"
            assert len(set.union(*offloads)) == 4, "which is its own"


def test_what_was_copied_on_several_streams_has_arrived() -> None:
    with _device() as streams:
        offload = Offload.of(None, torch.device("cpu"))  # type: ignore[arg-type]
        sharded = nn.Parameter(torch.zeros(3))
        hosts = []
        for i in range(4):
            hosts.append(offload.grad_to_host(torch.full((3,), float(i)), sharded))
            if i == 1:
                streams.append(_Stream())
        assert all(host.isnan().all() for host in hosts)
        offload.wait()
        assert [host[0].item() for host in hosts] == [0, 1, 2, 3]


def test_a_hook_that_reads_the_gradient_finds_it_there() -> None:
    with _device() as [stream]:
        offload = Offload.of(None, torch.device("cpu"))  # type: ignore[arg-type]
        sharded = nn.Parameter(torch.zeros(3))
        sharded.register_post_accumulate_grad_hook(lambda _: None)
        assert torch.equal(offload.grad_to_host(torch.ones(3), sharded), torch.ones(3))
        assert not stream.copies
