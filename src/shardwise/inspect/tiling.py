"""How the parts that ranks hold tile a tensor.

A *part* is what one rank holds: for every dimension of the tensor the *spans* ``(first, length)``
of what it has along it, usually one. A *block* is a part and all the ranks that hold it. Where
each cut falls is asked of :class:`~shardwise.sharding.layout.Layout`, as the runtime does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import Placement

from shardwise._torch import dtensor
from shardwise.sharding.layout import Layout

Span = tuple[int, int]
Part = tuple[tuple[Span, ...], ...]


@dataclass(frozen=True)
class Block:
    """A part of a tensor and the ranks that hold it.

    Attributes:
        part: along each dimension, the spans ``(first, length)`` in elements; none along a
            dimension where the cut left nothing.
        ranks: who holds it, ascending.
        padding: elements by which the chunk that each of these ranks sends into an all-gather is
            longer than the part.
    """

    part: Part
    ranks: tuple[int, ...]
    padding: int = 0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of what a rank holds."""
        return shape_of(self.part)

    @cached_property
    def numel(self) -> int:
        """Elements that a rank holds; 0 where nothing was left for it."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Tiling:
    """The blocks that a tensor of ``shape`` lies in, by their place in the tensor, empty ones last.

    Attributes:
        shape: of the whole tensor.
        blocks: the blocks; every rank that has the tensor is in one.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, shape: Sequence[int], held: Mapping[int, tuple[Part, int]]) -> Tiling:
        """From what each rank holds, and how many elements of padding go with it."""
        ranks: dict[tuple[Part, int], list[int]] = {}
        for rank, what in sorted(held.items()):
            ranks.setdefault(what, []).append(rank)
        blocks = [Block(part, tuple(own), padding) for (part, padding), own in ranks.items()]
        return cls(tuple(shape), tuple(sorted(blocks, key=lambda b: (not b.numel, b.part))))

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def by_rank(self) -> Mapping[int, Block]:
        """The block of each rank."""
        return {rank: block for block in self.blocks for rank in block.ranks}

    @property
    def empty_ranks(self) -> tuple[int, ...]:
        """The ranks that hold nothing of it, though they have it."""
        found = (block.ranks for block in self.blocks if not block.numel)
        return tuple(sorted(rank for ranks in found for rank in ranks)) if self.numel else ()

    @property
    def padding(self) -> int:
        """Elements of padding over all ranks, each copy of the tensor with its own."""
        return sum(block.padding * len(block.ranks) for block in self.blocks)


def whole(shape: Sequence[int]) -> Part:
    """The part that is all of a tensor."""
    return tuple(((0, size),) for size in shape)


def shape_of(part: Part) -> tuple[int, ...]:
    """Shape of a part: along each dimension its spans together."""
    return tuple(sum(length for _, length in spans) for spans in part)


def placed(
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> Part:
    """What the rank at ``coordinate`` of a mesh of ``sizes`` holds of a ``DTensor``.

    Mesh dimensions cut one after the other. ``_StridedShard`` cuts each of the pieces that a later
    dimension will cut the tensor into.
    """
    part = whole(shape)
    for placement, size, index in zip(placements, sizes, coordinate, strict=True):
        dim = dtensor.sharded_dim(placement)
        if dim is not None:
            part = cut(part, dim, size, index, dtensor.split_factor(placement))
    return part


def cut(part: Part, dim: int, ranks: int, index: int, pieces: int = 1) -> Part:
    """What rank ``index`` of ``ranks`` keeps of a part that is cut along ``dim``.

    Args:
        part: what there is to cut.
        dim: the dimension.
        ranks: how many ranks share it.
        index: which of them is asked for.
        pieces: cut it into so many pieces first, and keep a chunk of each.
    """
    spans: list[Span] = []
    outer = _rows(shape_of(part)[dim], pieces)
    for piece in range(pieces):
        start, length = outer.rows(piece)
        first, kept = _rows(length, ranks).rows(index)
        spans += _select(part[dim], start + first, kept)
    return (*part[:dim], tuple(_joined(spans)), *part[dim + 1 :])


def take(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The elements of a part of ``tensor``, in the shape of the part."""
    for dim, spans in enumerate(part):
        rows = [torch.arange(first, first + length) for first, length in spans]
        tensor = tensor.index_select(dim, torch.cat(rows) if rows else torch.arange(0))
    return tensor


def _rows(size: int, ranks: int) -> Layout:
    return Layout(torch.Size((size,)), 0, ranks)


def _select(spans: Iterable[Span], start: int, length: int) -> Iterable[Span]:
    """Elements ``start`` .. ``start + length`` of what ``spans`` hold one after the other."""
    at = 0
    for first, size in spans:
        begin, end = max(start, at), min(start + length, at + size)
        if begin < end:
            yield first + begin - at, end - begin
        at += size


def _joined(spans: Iterable[Span]) -> Iterable[Span]:
    """The same spans, those that follow each other as one."""
    last: Span | None = None
    for first, length in spans:
        if last is not None and sum(last) == first:
            last = (last[0], last[1] + length)
            continue
        if last is not None:
            yield last
        last = (first, length)
    if last is not None:
        yield last
