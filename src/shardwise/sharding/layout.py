"""How a tensor is cut over the ranks of one mesh dimension.

A ``Layout`` is a value: whoever wants to know which rank holds which rows, or how long a padded
buffer is, asks it, without running anything. Seven rows over three ranks:

    rows      0  1  2 | 3  4  5 | 6  .  .
    rank          0   |    1    |    2        3, 3 and 1 rows; a chunk is 3 rows, 2 are padding

Chunks are cut as ``torch.chunk`` cuts them, which is what ``Shard`` placements of torch mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Layout:
    """The cut of a tensor of ``shape`` along ``dim`` over ``world_size`` ranks.

    Attributes:
        shape: shape of the whole tensor.
        dim: the dimension that is cut; ``None`` where every rank holds the whole (scalars).
        world_size: number of ranks of the mesh dimension.
    """

    shape: torch.Size
    dim: int | None
    world_size: int

    def __post_init__(self) -> None:
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise ValueError(
                f"a tensor of shape {tuple(self.shape)} has no dimension {self.dim} to shard on; "
                f"expected 0 to {len(self.shape) - 1}"
            )

    @classmethod
    def of(cls, shape: torch.Size, world_size: int, dim: int = 0) -> Layout:
        """The cut along ``dim``, which may count from the end; a scalar is not cut."""
        return cls(shape, (dim + len(shape) if dim < 0 else dim) if shape else None, world_size)

    @cached_property
    def chunk_rows(self) -> int:
        """Length of every rank's chunk along ``dim``, padding included."""
        if self.dim is None:
            raise ValueError("a tensor that is not cut has no chunks")
        return -(-self.shape[self.dim] // self.world_size)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements of one chunk, padding included; all of them where nothing is cut."""
        return self._numel_of_rows(self.chunk_rows) if self.dim is not None else self.numel

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.shape.numel()

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the whole tensor, contiguous, in elements."""
        return torch.empty(self.shape, device="meta").stride()

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the buffer that all chunks are gathered into."""
        return self.chunk_numel * self.world_size if self.dim is not None else self.numel

    @property
    def is_rank_major(self) -> bool:
        """Whether the gathered chunks lie in memory exactly as the whole tensor does.

        True for a cut along dimension 0, where padding can only follow the last row: then the
        gathered buffer *is* the tensor.
        """
        return self.dim == 0 or self.dim is None

    def rows(self, rank: int) -> tuple[int, int]:
        """First row and number of rows along ``dim`` that ``rank`` holds."""
        if self.dim is None:
            raise ValueError("a tensor that is not cut has no rows per rank")
        total = self.shape[self.dim]
        start = min(rank * self.chunk_rows, total)
        return start, min(self.chunk_rows, total - start)

    def shard_shape(self, rank: int) -> torch.Size:
        """Shape of what ``rank`` holds; zero rows where none are left for it."""
        if self.dim is None:
            return self.shape
        return torch.Size(
            (*self.shape[: self.dim], self.rows(rank)[1], *self.shape[self.dim + 1 :])
        )

    def cut(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The view of ``whole`` (shape ``shape``) that belongs to ``rank``."""
        if self.dim is None:
            return whole
        start, length = self.rows(rank)
        return whole.narrow(self.dim, start, length)

    def to_chunks(self, whole: torch.Tensor) -> torch.Tensor:
        """``whole`` as one-dimensional chunks, rank after rank.

        A view where memory already lies so, in which case the padding at the end is missing;
        otherwise a copy of ``padded_numel`` elements with undefined padding.
        """
        if self.is_rank_major:
            return whole.reshape(-1)
        flat = whole.new_empty(self.padded_numel)
        for rank in range(self.world_size):
            self._chunk_view(flat, rank).copy_(self.cut(whole, rank))
        return flat

    def from_chunks(self, flat: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy gathered chunks (1-D, ``padded_numel``) into ``whole`` (shape ``shape``)."""
        for rank in range(self.world_size):
            self.cut(whole, rank).copy_(self._chunk_view(flat, rank))

    def _chunk_view(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """The data of ``rank``'s chunk in ``flat``, in the shape of its shard."""
        shape = self.shard_shape(rank)
        return flat.narrow(0, rank * self.chunk_numel, shape.numel()).view(shape)

    def _numel_of_rows(self, rows: int) -> int:
        assert self.dim is not None
        per_row = torch.Size((*self.shape[: self.dim], *self.shape[self.dim + 1 :])).numel()
        return rows * per_row
