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
from tests.sharding.nets import (
    WIDTH,
    Block,
    assert_same_gradients,
    average_backward,
    batches,
    group_of,
    loss_of,
    seeded,
    shard_blocks,
    twins,
)
from tests.worlds import Ranks, on_threads


class Around(nn.Module):
    """A block of the kind under test, between two that give it and take from it."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), kind(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, middle, last = self.blocks
        x = first(x)
        return last(middle(x, x * 0.5))  # type: ignore[no-any-return]


class Writes(Block):
    """Writes to its inputs in place, before and after their use."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x.mul_(2)
        out = self.up(x.clone())
        other.add_(self.down(out.relu()))
        x[:, 0] += 1
        return x * other


class Returns(Block):
    """Returns an input itself, a view of one, and something new. Its caller writes to the first."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x, other.view(-1), self.down(self.up(x + other))  # type: ignore[return-value]

    def __call__(self, *args: Any) -> torch.Tensor:
        out, view, new = super().__call__(*args)
        out += 1
        view *= 2
        return out * new + view.view_as(new)


class TwoEnds(Block):
    """The gradients of its two inputs are known at different times."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        late = self.up(x).relu()
        for _ in range(5):
            other = other.sin()
        return self.down(late) + self.down(self.up(other))


KINDS = (Writes, Returns, TwoEnds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_modules_use_their_inputs_as_they_would_unsharded(
    rank: int, world_size: int, kind: type[nn.Module]
) -> None:
    net, whole = twins(lambda: Around(kind))
    for step in range(2):
        loss_of(net, batches(world_size, step)[rank]).backward()
        average_backward(whole, batches(world_size, step))
        assert_same_gradients(net, whole)


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


class _OnlyWrites(nn.Module):
    """Returns nothing: it writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH) * 3)

    def forward(self, x: torch.Tensor) -> None:
        x.add_(self.shift)
        x[0] *= self.scale


class _Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), _OnlyWrites(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, middle, last = self.blocks
        x = first(x)
        middle(x)
        return last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_a_write_to_an_input_is_an_output(rank: int, world_size: int) -> None:
    net, whole = twins(_Calls)
    loss_of(net, batches(world_size)[rank]).backward()
    average_backward(whole, batches(world_size))
    assert_same_gradients(net, whole)
    # Nothing else begins the backward of the outermost module.
    module = fully_shard(_OnlyWrites(), reshard_after_forward=True)
    whole = _OnlyWrites()
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
def test_a_graph_without_backward_is_freed_with_its_outputs(
    threads: Ranks, kind: type[nn.Module]
) -> None:
    threads(_is_freed, 1, kind)


def _is_freed(rank: int, world_size: int, kind: type[nn.Module]) -> None:
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
