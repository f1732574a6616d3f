"""Tensors put together from boxes of others, of which only the wanted part is read or written.

Operations of ``transformers`` run on a :class:`Pieced` as on a tensor. Nothing is read by that: the
result says which elements of the files each of its own elements is.

    experts.0.up (3, 4), experts.1.up (3, 4)   --torch.stack-->   (2, 3, 4), of which rank 1 of 2
                                                                  reads experts.1.up
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.base.boxes import Box, full_box, narrow
from shardwise.checkpoint.disk.entries import StatePath
from shardwise.checkpoint.formats.source import ReadWindow, Source


@dataclass(frozen=True)
class _Piece:
    """A box of the result, and the box of a tensor in the files that it is.

    Attributes:
        box: the box of the result.
        path: path of the tensor in the files.
        origin: offsets of the box in that tensor.
        dims: for each dimension of the result, the dimension of that tensor; ``None`` for one of
            size 1 that the tensor does not have.
    """

    box: Box
    path: StatePath
    origin: tuple[int, ...]
    dims: tuple[int | None, ...]

    def moved(self, dim: int, by: int) -> _Piece:
        """The same piece of a result in which it lies further back."""
        offsets = (
            *self.box.offsets[:dim],
            self.box.offsets[dim] + by,
            *self.box.offsets[dim + 1 :],
        )
        return replace(self, box=Box(offsets, self.box.sizes))

    def within(self, box: Box) -> _Piece | None:
        """The part of the piece inside a box of the result."""
        common = self.box.intersection(box)
        if common is None:
            return None
        origin = list(self.origin)
        for dim, own in enumerate(self.dims):
            if own is not None:
                origin[own] += common.offsets[dim] - self.box.offsets[dim]
        return replace(self, box=common, origin=tuple(origin))

    def source_box(self) -> Box:
        """The box in the files."""
        sizes = [1] * len(self.origin)  # a dimension that was squeezed
        for dim, own in enumerate(self.dims):
            if own is not None:
                sizes[own] = self.box.sizes[dim]
        return Box(self.origin, tuple(sizes))

    def placed(self, part: Box) -> Box:
        """Where a part of the box in the files is in the result."""
        offsets, sizes = [], []
        for dim, own in enumerate(self.dims):
            first = self.box.offsets[dim]
            offsets.append(first if own is None else first + part.offsets[own] - self.origin[own])
            sizes.append(1 if own is None else part.sizes[own])
        return Box(tuple(offsets), tuple(sizes))


class Pieced:
    """A tensor that is not read yet.

    Args:
        shape: its shape.
        pieces: boxes that cover it without overlap.
    """

    def __init__(self, shape: Sequence[int], pieces: Sequence[_Piece]) -> None:
        self.shape = torch.Size(shape)
        self._pieces = pieces

    @classmethod
    def of(cls, source: Source, path: StatePath) -> Pieced:
        """A tensor of the files as it is."""
        shape = source.tensors[path].shape
        dims = tuple(range(len(shape)))
        return cls(shape, [_Piece(full_box(shape), path, (0,) * len(shape), dims)])

    def read(self, source: Source, window: ReadWindow, box: Box, into: torch.Tensor) -> None:
        """Read a box of the result.

        Args:
            source: the files.
            window: the buffer that the elements pass through.
            box: the box to read.
            into: a tensor with the sizes of the box, to whose dtype the elements are converted.
        """
        for each in self._pieces:
            piece = each.within(box)
            if piece is None or not piece.box.numel:
                continue
            order = [own for own in piece.dims if own is not None]
            squeezed = [own for own in range(len(piece.origin)) if own not in order]
            for part, elements in window.parts(source, piece.path, piece.source_box()):
                place = piece.placed(part)
                target = narrow(into, place.relative_to(box.offsets))
                target.copy_(elements.permute(*squeezed, *order).reshape(place.sizes))

    def write(self, values: torch.Tensor, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Do the reverse of :meth:`read`: put values of the result where the files have them.

        Args:
            values: the result in full.
            path: path of a tensor in the files.
            box: a box of that tensor.
            into: a tensor with the sizes of the box. What the result has no part in stays.
        """
        for piece in self._pieces:
            part = piece.source_box().intersection(box) if piece.path == path else None
            if part is None or not part.numel:
                continue
            kept = [own for own in piece.dims if own is not None]
            found = narrow(values, piece.placed(part)).reshape([part.sizes[own] for own in kept])
            order = [kept.index(own) for own in sorted(kept)]
            target = narrow(into, part.relative_to(box.offsets))
            target.copy_(found.permute(order).reshape(part.sizes))

    @property
    def paths(self) -> frozenset[StatePath]:
        """The tensors of the files that it is made of."""
        return frozenset(piece.path for piece in self._pieces)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = _FUNCTIONS.get(func)
        return NotImplemented if made is None else made(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of a dimension."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Pieced:
        """The same; memory is laid out when it is read."""
        return self

    def transpose(self, dim0: int, dim1: int) -> Pieced:
        """As ``torch.transpose``."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]

        return self._arranged(lambda values, _: tuple(values[dim] for dim in order))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Pieced, ...]:
        """As ``torch.split``."""
        dim %= self.ndim
        length = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, length - first) for first in range(0, length, sizes)]
        if sum(sizes) != length:
            raise ValueError(f"sizes: found {list(sizes)}, expected a sum of {length}")
        made, first = [], 0
        for size in sizes:
            made.append(self._narrowed(dim, first, size))
            first += size
        return tuple(made)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Pieced, ...]:
        """As ``torch.chunk``."""
        return self.split(max(1, -(-self.shape[dim] // chunks)), dim)

    def unbind(self, dim: int = 0) -> tuple[Pieced, ...]:
        """As ``torch.unbind``."""
        return tuple(each.squeeze(dim) for each in self.split(1, dim))

    def squeeze(self, dim: int) -> Pieced:
        """As ``torch.squeeze``."""
        dim %= self.ndim
        if self.shape[dim] != 1:
            return self
        return self._arranged(lambda values, _: (*values[:dim], *values[dim + 1 :]))

    def unsqueeze(self, dim: int) -> Pieced:
        """As ``torch.unsqueeze``."""
        dim %= self.ndim + 1
        return self._arranged(lambda values, new: (*values[:dim], new, *values[dim:]))

    def _arranged(self, arrange: Callable[[Sequence[Any], Any], tuple[Any, ...]]) -> Pieced:
        """The tensor with its dimensions arranged anew.

        Args:
            arrange: called with what there is of each dimension, and with what a new one has.
        """
        pieces = [
            replace(
                piece,
                box=Box(arrange(piece.box.offsets, 0), arrange(piece.box.sizes, 1)),
                dims=arrange(piece.dims, None),
            )
            for piece in self._pieces
        ]
        return Pieced(arrange(self.shape, 1), pieces)

    def _narrowed(self, dim: int, first: int, size: int) -> Pieced:
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        offsets = tuple(first if each == dim else 0 for each in range(self.ndim))
        inside = [piece.within(Box(offsets, shape)) for piece in self._pieces]
        return Pieced(shape, [piece.moved(dim, -first) for piece in inside if piece is not None])


def _cat(tensors: Sequence[Pieced], dim: int = 0) -> Pieced:
    first = tensors[0]
    dim %= first.ndim
    made: list[_Piece] = []
    length = 0
    for each in tensors:
        rest = [(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (first, each)]
        if rest[0] != rest[1]:
            raise ValueError(f"cannot join shapes {list(first.shape)} and {list(each.shape)}")
        made += [piece.moved(dim, length) for piece in each._pieces]
        length += each.shape[dim]
    return Pieced((*first.shape[:dim], length, *first.shape[dim + 1 :]), made)


def _stack(tensors: Sequence[Pieced], dim: int = 0) -> Pieced:
    return _cat([each.unsqueeze(dim) for each in tensors], dim)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: _cat,
    torch.chunk: Pieced.chunk,
    torch.split: Pieced.split,
    torch.squeeze: Pieced.squeeze,
    torch.stack: _stack,
    torch.transpose: Pieced.transpose,
    torch.unbind: Pieced.unbind,
    torch.unsqueeze: Pieced.unsqueeze,
}
