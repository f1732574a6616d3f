"""The blocks of a tensor: which elements share a scale, and where a rank has them.

A block is up to 256 consecutive elements of a row. A row is what the last dimensions of the tensor
hold together: the last one, or as many as it takes to have 256 elements, but never the first. So
blocks follow from the shape alone, and a cut of a tensor along dimensions before those of its
rows leaves all blocks whole. ``fully_shard`` cuts along the first.

    shape             a row         blocks of a row
    (768, 2048)       2048          8 of 256
    (768, 700)        700           2 of 256, 1 of 188
    (64, 32, 3, 3)    32 x 3 x 3    1 of 256, 1 of 32
    (8, 768, 2048)    2048          8 of 256

A tensor may also be cut inside its rows: by tensor parallelism, or because ``shard_placement_fn``
says so. If every cut is between two blocks, nothing changes. Otherwise ranks share blocks, and have
to agree on their scales: each has all scales of its rows then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise._torch import dtensor
from shardwise.base.boxes import Box

#: Elements of a block, but for the last one of a row.
BLOCK = 256


@dataclass(frozen=True)
class Tile:
    """Some blocks of equal width in some rows of a rank's part, seen as a matrix of rows.

    Attributes:
        rows: of the part, and of its scales.
        columns: of the part.
        blocks: columns of the scales.
        width: elements of each block that the rank has.
    """

    rows: slice
    columns: slice
    blocks: slice
    width: int


@dataclass(frozen=True)
class BlockRun:
    """Blocks next to each other of which a rank has the same number of elements in each row.

    Attributes:
        column: of the first element, in the rank's part of a row.
        block: the first block, counted in the row of the whole tensor.
        count: number of blocks.
        width: elements of each.
    """

    column: int
    block: int
    count: int
    width: int


@dataclass(frozen=True)
class MomentBlocks:
    """The blocks of a tensor, and a rank's part of them.

    Attributes:
        scales_shape: shape of the whole tensor's scales: the dimensions before those of its rows,
            and the number of blocks in a row.
        scales_placements: placements of the scales, for a ``DTensor``.
        shared_over: dimensions of the mesh whose ranks share blocks.
        rows: rows of this rank's part.
        columns: elements of each.
        scales_local: shape of this rank's part of the scales.
        runs: the blocks of one row of the part.
        first: the block that the scales of the part begin with.
    """

    scales_shape: tuple[int, ...]
    scales_placements: tuple[Placement, ...]
    shared_over: tuple[int, ...]
    rows: int
    columns: int
    scales_local: tuple[int, ...]
    runs: tuple[BlockRun, ...]
    first: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> MomentBlocks:
        """The blocks of a tensor of two dimensions or more, and of this rank's part of it."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls.part(shape, (0,) * len(shape), shape, (), ())
        mesh = tuple(tensor.device_mesh.shape)
        return cls.part(shape, *dtensor.chunk_of(tensor), tensor.placements, mesh)

    @classmethod
    def part(
        cls,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        placements: Sequence[Placement],
        mesh: Sequence[int],
    ) -> MomentBlocks:
        """The blocks of a tensor and of a part of it.

        Args:
            shape: of the whole tensor, of two dimensions or more.
            offsets: where the part begins, in each dimension.
            sizes: the shape of the part.
            placements: of the tensor; none if it is not a ``DTensor``.
            mesh: ranks along each dimension of the mesh.
        """
        first = row_dim(shape)
        count = -(-math.prod(shape[first:]) // BLOCK)
        dims = [dtensor.sharded_dim(placement) for placement in placements]
        cuts = [i for i, dim in enumerate(dims) if dim is not None and dim >= first and mesh[i] > 1]
        aligned = not cuts or (
            len(cuts) == 1
            and placements[cuts[0]] == Shard(first)
            and _cuts_between_blocks(shape[first:], count, mesh[cuts[0]])
        )
        within: Placement = Shard(first) if aligned and cuts else Replicate()
        runs = tuple(_runs(shape[first:], offsets[first:], sizes[first:]))
        start, held = 0, count
        if aligned and cuts:
            start = -(-offsets[first] * math.prod(shape[first + 1 :]) // BLOCK)
            held = sum(run.count for run in runs)
        return cls(
            scales_shape=(*shape[:first], count),
            scales_placements=tuple(
                placements[i]
                if dim is not None and dim < first
                else within
                if i in cuts
                else Replicate()
                for i, dim in enumerate(dims)
            ),
            shared_over=() if aligned else tuple(cuts),
            rows=math.prod(sizes[:first]),
            columns=math.prod(sizes[first:]),
            scales_local=(*sizes[:first], held),
            runs=runs,
            first=start,
        )

    def tiles(self, most: int) -> Iterator[Tile]:
        """Divide the part into tiles of at most ``most`` elements, or of one block."""
        for run in self.runs:
            blocks_at_once = max(1, min(run.count, most // run.width))
            rows_at_once = max(1, most // (blocks_at_once * run.width))
            for row, block in itertools.product(
                range(0, self.rows, rows_at_once), range(0, run.count, blocks_at_once)
            ):
                end = min(block + blocks_at_once, run.count)
                base = run.block - self.first
                yield Tile(
                    rows=slice(row, min(row + rows_at_once, self.rows)),
                    columns=slice(run.column + block * run.width, run.column + end * run.width),
                    blocks=slice(base + block, base + end),
                    width=run.width,
                )


def row_dim(shape: Sequence[int]) -> int:
    """The first of the dimensions that make up a row."""
    dim = len(shape) - 1
    while dim > 1 and math.prod(shape[dim:]) < BLOCK:
        dim -= 1
    return dim


def _cuts_between_blocks(row: Sequence[int], count: int, ranks: int) -> bool:
    """Whether ``Shard`` cuts rows between blocks, and their scales at the same places."""
    piece = -(-row[0] // ranks) * math.prod(row[1:])
    return piece % BLOCK == 0 and -(-count // ranks) * BLOCK == piece


def _runs(row: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[BlockRun]:
    """The blocks of a part of a row."""
    found: list[BlockRun] = []
    column = 0
    for start, length in Box(tuple(offsets), tuple(sizes)).runs(row):
        end = start + length
        while start < end:
            block, into = divmod(start, BLOCK)
            full = (end - start) // BLOCK if into == 0 else 0
            taken = full * BLOCK or min(BLOCK - into, end - start)
            last = found[-1] if found else None
            if last is not None and last.block + last.count > block:  # more of the same block
                found[-1] = BlockRun(last.column, block, 1, last.width + taken)
            else:
                found.append(BlockRun(column, block, full or 1, BLOCK if full else taken))
            column, start = column + taken, start + taken
    return found
