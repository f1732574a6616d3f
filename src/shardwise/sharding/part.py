"""The part of a tensor that one rank holds, computed from placements.

A *part* has for each dimension of the tensor a tuple of *spans* ``(first, length)``, usually one.
:class:`~shardwise.sharding.layout.Layout` computes every cut, as in the runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import Placement

from shardwise._torch import dtensor
from shardwise.sharding.layout import Layout

Span = tuple[int, int]
Part = tuple[tuple[Span, ...], ...]


def full_part(shape: Sequence[int]) -> Part:
    """The part that covers a full tensor."""
    return tuple(((0, size),) for size in shape)


def shape_of(part: Part) -> tuple[int, ...]:
    """Shape of a part: the total length of the spans of each dimension."""
    return tuple(sum(length for _, length in spans) for spans in part)


def placed(
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> Part:
    """The part of a ``DTensor`` on the rank at ``coordinate`` of a mesh of shape ``sizes``.

    Mesh dimensions shard one after the other. ``_StridedShard`` shards each of the pieces that a
    later mesh dimension will shard the tensor into.
    """
    part = full_part(shape)
    for placement, size, index in zip(placements, sizes, coordinate, strict=True):
        dim = dtensor.sharded_dim(placement)
        if dim is not None:
            part = cut(part, dim, size, index, dtensor.split_factor(placement))
    return part


def cut(part: Part, dim: int, ranks: int, index: int, pieces: int = 1) -> Part:
    """Shard a part along ``dim`` over ``ranks`` ranks, and return what rank ``index`` gets.

    Args:
        part: the part to shard.
        dim: the tensor dimension.
        ranks: number of ranks.
        index: which of these ranks.
        pieces: number of pieces to split the part into first; the rank gets a chunk of each.
    """
    spans: list[Span] = []
    outer = _rows(shape_of(part)[dim], pieces)
    for piece in range(pieces):
        start, length = outer.rows(piece)
        first, kept = _rows(length, ranks).rows(index)
        spans += _select(part[dim], start + first, kept)
    return (*part[:dim], tuple(_joined(spans)), *part[dim + 1 :])


def take(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The elements of ``tensor`` in ``part``, with the shape of the part."""
    for dim, spans in enumerate(part):
        rows = [torch.arange(first, first + length) for first, length in spans]
        tensor = tensor.index_select(dim, torch.cat(rows) if rows else torch.arange(0))
    return tensor


def _rows(size: int, ranks: int) -> Layout:
    return Layout(torch.Size((size,)), 0, ranks)


def _select(spans: Iterable[Span], start: int, length: int) -> Iterable[Span]:
    """The spans of elements ``start`` to ``start + length`` of the concatenation of ``spans``."""
    at = 0
    for first, size in spans:
        begin, end = max(start, at), min(start + length, at + size)
        if begin < end:
            yield first + begin - at, end - begin
        at += size


def _joined(spans: Iterable[Span]) -> Iterable[Span]:
    """Merge adjacent spans."""
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
