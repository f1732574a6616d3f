"""How the parts that ranks hold tile a tensor.

A *part* is what one rank holds (see :mod:`shardwise.optim.part`). A *block* is a part together
with all ranks that hold it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.optim.part import Part, shape_of


@dataclass(frozen=True)
class Block:
    """A part of a tensor and the ranks that hold it.

    Attributes:
        part: for each dimension, the spans ``(first, length)`` in elements; no span along a
            dimension that left nothing for these ranks.
        ranks: the ranks that hold it, ascending.
        padding: number of padding elements in the chunk that each of these ranks contributes to an
            all-gather.
    """

    part: Part
    ranks: tuple[int, ...]
    padding: int = 0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return shape_of(self.part)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the part; 0 if it is empty."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Tiling:
    """All blocks of a tensor.

    Attributes:
        shape: shape of the full tensor.
        blocks: the blocks by position in the tensor, empty ones last. Each rank that has the tensor
            is in one of them.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, shape: Sequence[int], held: Mapping[int, tuple[Part, int]]) -> Tiling:
        """Build the tiling from the part and the number of padding elements of each rank."""
        ranks: dict[tuple[Part, int], list[int]] = {}
        for rank, what in sorted(held.items()):
            ranks.setdefault(what, []).append(rank)
        blocks = [Block(part, tuple(own), padding) for (part, padding), own in ranks.items()]
        return cls(tuple(shape), tuple(sorted(blocks, key=lambda b: (not b.numel, b.part))))

    @cached_property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @cached_property
    def by_rank(self) -> Mapping[int, Block]:
        """The block of each rank."""
        return {rank: block for block in self.blocks for rank in block.ranks}

    @property
    def empty_ranks(self) -> tuple[int, ...]:
        """The ranks that have a shard of the tensor without elements."""
        found = (block.ranks for block in self.blocks if not block.numel)
        return tuple(sorted(rank for ranks in found for rank in ranks)) if self.numel else ()

    @property
    def padding(self) -> int:
        """Number of padding elements on all ranks together."""
        return sum(block.padding * len(block.ranks) for block in self.blocks)
