"""What a sharded module may do with its inputs, and when its backward ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import fully_shard
from shardwise.sharding.group import ParamGroup
from tests.corpus.models import Around, OnlyWrites, TwoEnds, Writes
from tests.sharding.nets import (
    WIDTH,
    Block,
    assert_same_gradients,
    batches,
    group_of,
    loss_of,
    seeded,
    shard_blocks,
)
from tests.worlds import Ranks, on_threads


def _ends(rank: int, world_size: int, kind: type[nn.Module], before_the_end: bool) -> None:
    net = shard_blocks(seeded(lambda: Around(kind)))
    group = group_of(net.blocks[1])  # type: ignore[union-attr, index]
    reduced: list[bool] = []
    reduce = ParamGroup.reduce_grads

    def note(self: ParamGroup, *args: Any) -> Any:
        if self is group:
            first = net.blocks[0].up.weight  # type: ignore[union-attr, index]
            reduced.append(first.grad is None)
            assert all(p.full is not None and p.full.grad is not None for p in self.params)
        return reduce(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParamGroup, "reduce_grads", note)
        loss_of(net, batches(world_size)[rank]).backward()
    assert reduced == [before_the_end]


def test_a_group_is_reduced_once_when_the_last_gradient_of_its_inputs_is_known(
    threads: Ranks,
) -> None:
    threads(_ends, 1, TwoEnds, True)


def test_a_group_that_wrote_to_its_inputs_is_reduced_at_the_end_of_backward(
    threads: Ranks,
) -> None:
    threads(_ends, 1, Writes, False)


class _Ignores(Block):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


@on_threads(1)
def test_an_input_that_is_not_used_gets_no_gradient(rank: int, world_size: int) -> None:
    module = fully_shard(seeded(_Ignores))
    x, other = (batches(2, step)[rank].requires_grad_() for step in range(2))
    module(x, other).sum().backward()
    assert x.grad is not None
    assert other.grad is None


@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_a_write_to_an_input_is_an_output(rank: int, world_size: int) -> None:
    """Nothing else begins the backward of the outermost module."""
    module = fully_shard(OnlyWrites(), reshard_after_forward=True)
    whole = OnlyWrites()
    x = batches(world_size)[rank].requires_grad_() * 1
    module(x)
    loss_of(nn.Identity(), x).backward()
    for batch in batches(world_size):
        x = batch.requires_grad_() * 1
        whole(x)
        (loss_of(nn.Identity(), x) / world_size).backward()
    assert_same_gradients(module, whole)


class _Tagged(torch.Tensor):
    """A tensor of a user's class."""


class _Remembers(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kind = type(x)
        return super().forward(x)


@on_threads(1)
def test_an_input_of_a_users_class_stays_one(rank: int, world_size: int) -> None:
    module = fully_shard(seeded(_Remembers))
    out = module(batches(1)[0].as_subclass(_Tagged).requires_grad_())
    assert module.kind is _Tagged
    assert type(out) is _Tagged


class _Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


@on_threads(1)
def test_an_input_may_be_a_tensor_of_inference_mode(rank: int, world_size: int) -> None:
    module = fully_shard(_Adds())
    with torch.inference_mode():
        x = torch.ones(2, WIDTH, requires_grad=True)
    module(x).sum().backward()
    assert module.shift.grad is not None


# -- what a pass keeps in memory ---------------------------------------------------------------


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Only reference counts free objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class _Cache:
    """An object of a user's class that tensors travel in."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []


class _Caches(Block):
    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        cache.held.append(x * 2)
        return super().forward(x), cache


class _Raises(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")


class _Passes(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x, super().forward(x), x.view(-1)


@pytest.mark.usefixtures("without_collection")
@pytest.mark.parametrize("kind", [Block, _Caches, _Raises, _Passes])
@on_threads(1)
def test_a_graph_without_backward_is_freed_with_its_outputs(
    rank: int, world_size: int, kind: type[nn.Module]
) -> None:
    blocks = [fully_shard(seeded(kind)) for _ in range(3)]
    x = torch.ones(2, WIDTH, requires_grad=True) * 1
    inputs = weakref.ref(x)
    extra = [_Cache()] if kind is _Caches else []
    for block in blocks:
        try:
            out = block(x, *extra)
        except RuntimeError:
            out = x
        x = out[0] if isinstance(out, tuple) else out
    assert inputs() is not None
    del out, x, extra
    assert inputs() is None
