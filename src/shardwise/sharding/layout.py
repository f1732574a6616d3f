"""How a tensor is cut over the ranks of one mesh dimension.

A ``Layout`` is a value. It says which rank holds which rows, and how long a padded buffer is,
without running anything. Seven rows over three ranks:

    rows      0  1  2 | 3  4  5 | 6  .  .
    rank          0   |    1    |    2        3, 3 and 1 rows; a chunk is 3 rows, 2 are padding

Chunks are cut the way ``torch.chunk`` cuts them, which is what torch's ``Shard`` placements mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from shardwise.base import observe

observe.ALLOCATES[__file__] = observe.Memory.GRADIENTS  # in the order of chunks


@dataclass(frozen=True)
class Layout:
    """The cut of a tensor of ``shape`` along ``dim`` over ``world_size`` ranks.

    Attributes:
        shape: shape of the full tensor.
        dim: the dimension that is cut, or ``None`` if every rank holds all of it (scalars).
        world_size: number of ranks along the mesh dimension.
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
        """Make the layout for a cut along ``dim``, which may be negative. Scalars are not cut."""
        return cls(shape, (dim + len(shape) if dim < 0 else dim) if shape else None, world_size)

    @cached_property
    def chunk_rows(self) -> int:
        """Length of every rank's chunk along ``dim``, padding included."""
        if self.dim is None:
            raise ValueError("this tensor is not cut, so it has no chunks")
        return -(-self.shape[self.dim] // self.world_size)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements of one chunk, padding included; of the full tensor if it is not cut."""
        return self._numel_of_rows(self.chunk_rows) if self.dim is not None else self.numel

    @cached_property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return self.shape.numel()

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the full, contiguous tensor, in elements."""
        return torch.empty(self.shape, device="meta").stride()

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the buffer that the chunks are gathered into, padding included."""
        return self.chunk_numel * self.world_size if self.dim is not None else self.numel

    @property
    def is_rank_major(self) -> bool:
        """Whether the gathered chunks lie in memory exactly as the full tensor does.

        They do for a cut along dimension 0: padding can only follow the last row, so the gathered
        buffer *is* the full tensor.
        """
        return self.dim == 0 or self.dim is None

    def rows(self, rank: int) -> tuple[int, int]:
        """The first row and the number of rows along ``dim`` that ``rank`` holds."""
        if self.dim is None:
            raise ValueError("this tensor is not cut, so it has no rows per rank")
        total = self.shape[self.dim]
        start = min(rank * self.chunk_rows, total)
        return start, min(self.chunk_rows, total - start)

    def shard_shape(self, rank: int) -> torch.Size:
        """Shape of the shard of ``rank``. It may have zero rows."""
        if self.dim is None:
            return self.shape
        return torch.Size(
            (*self.shape[: self.dim], self.rows(rank)[1], *self.shape[self.dim + 1 :])
        )

    def cut(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The view of ``full`` (of shape ``shape``) that is the shard of ``rank``."""
        if self.dim is None:
            return full
        start, length = self.rows(rank)
        return full.narrow(self.dim, start, length)

    def to_chunks(self, full: torch.Tensor) -> torch.Tensor:
        """Lay ``full`` out as one-dimensional chunks, rank after rank.

        Returns:
            A view without padding if the memory already has this order. Otherwise a copy of
            ``padded_numel`` elements, whose padding is zero.
        """
        if self.is_rank_major:
            return full.reshape(-1)
        flat = full.new_empty(self.padded_numel)
        for rank in range(self.world_size):
            chunk = self._chunk_view(flat, rank)
            chunk.copy_(self.cut(full, rank))
            # A wire encodes it with values beside it, which must not suffer from what it holds.
            end = rank * self.chunk_numel + chunk.numel()
            flat[end : (rank + 1) * self.chunk_numel].zero_()
        return flat

    def from_chunks(self, flat: torch.Tensor, full: torch.Tensor) -> None:
        """Copy gathered chunks (1-D, ``padded_numel``) into ``full`` (of shape ``shape``)."""
        for rank in range(self.world_size):
            self.cut(full, rank).copy_(self._chunk_view(flat, rank))

    def _chunk_view(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        shape = self.shard_shape(rank)
        return flat.narrow(0, rank * self.chunk_numel, shape.numel()).view(shape)

    def _numel_of_rows(self, rows: int) -> int:
        assert self.dim is not None
        per_row = torch.Size((*self.shape[: self.dim], *self.shape[self.dim + 1 :])).numel()
        return rows * per_row
