"""Blocks follow from the shape of a tensor; ranks share one only if rows are cut inside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise.optim.blocks import BLOCK, MomentBlocks, row_dim
from shardwise.sharding.layout import Layout

SHAPES = st.lists(st.sampled_from([1, 2, 3, 7, 16, 64, 300]), min_size=2, max_size=4).filter(
    lambda shape: math.prod(shape) < 100_000
)


def cut(shape: Sequence[int], dim: int, ranks: int, rank: int) -> tuple[list[int], list[int]]:
    """Where the part of a rank begins, and its sizes."""
    offsets, sizes = [0] * len(shape), list(shape)
    piece = -(-shape[dim] // ranks)
    offsets[dim] = min(rank * piece, shape[dim])
    sizes[dim] = min(piece, shape[dim] - offsets[dim])
    return offsets, sizes


def whole(shape: Sequence[int]) -> MomentBlocks:
    return MomentBlocks.part(shape, [0] * len(shape), shape, (), ())


@pytest.mark.parametrize(
    ("shape", "row", "blocks"),
    [
        ((768, 2048), 2048, 8),
        ((768, 700), 700, 3),
        ((768, 64), 64, 1),
        ((64, 32, 3, 3), 288, 2),
        ((8, 768, 2048), 2048, 8),
        ((8, 100, 20), 2000, 8),
    ],
)
def test_a_row_is_as_many_dimensions_as_a_block_takes(
    shape: tuple[int, ...], row: int, blocks: int
) -> None:
    first = row_dim(shape)
    assert math.prod(shape[first:]) == row
    assert whole(shape).scales_shape == (*shape[:first], blocks)


@given(SHAPES, st.data())
def test_every_element_is_in_one_tile_and_in_the_block_of_its_column(
    shape: list[int], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    ranks = data.draw(st.integers(1, 5))
    most = data.draw(st.sampled_from([1, 500, 10**6]))
    first = row_dim(shape)
    row = math.prod(shape[first:])
    columns = torch.arange(math.prod(shape)).view(shape) % row
    for rank in range(ranks):
        offsets, sizes = cut(shape, dim, ranks, rank)
        blocks = MomentBlocks.part(shape, offsets, sizes, [Shard(dim)], [ranks])
        assert math.prod(sizes) == blocks.rows * blocks.columns
        slices = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        mine = columns[slices].reshape(blocks.rows, blocks.columns)
        seen = torch.zeros_like(mine)
        for tile in blocks.tiles(most):
            seen[tile.rows, tile.columns] += 1
            found = mine[tile.rows, tile.columns] // BLOCK
            wanted = torch.arange(tile.blocks.start, tile.blocks.stop) + blocks.first
            wanted = wanted.repeat_interleave(tile.width).expand_as(found)
            assert torch.equal(found, wanted)
            assert found.numel() <= max(most, BLOCK)
            assert 0 <= tile.blocks.start < tile.blocks.stop <= blocks.scales_local[-1]
        assert bool((seen == 1).all())


@given(SHAPES, st.data())
def test_scales_are_cut_where_their_placements_say(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    ranks = data.draw(st.integers(2, 5))
    for rank in range(ranks):
        offsets, sizes = cut(shape, dim, ranks, rank)
        blocks = MomentBlocks.part(shape, offsets, sizes, [Shard(dim)], [ranks])
        [placement] = blocks.scales_placements
        cut_dim = placement.dim if isinstance(placement, Shard) else None
        local = Layout(torch.Size(blocks.scales_shape), cut_dim, ranks).shard_shape(rank)
        assert tuple(local) == blocks.scales_local
        assert bool(blocks.shared_over) == (dim >= row_dim(shape) and cut_dim is None)


@pytest.mark.parametrize(
    ("shape", "placements", "mesh", "shared", "scales"),
    [
        # fully_shard, hybrid, and with tensor parallelism by columns
        ((768, 700), [Shard(0)], [3], (), [Shard(0)]),
        ((768, 700), [Replicate(), Shard(0)], [2, 2], (), [Replicate(), Shard(0)]),
        # tensor parallelism by rows, between blocks and inside them
        ((768, 2048), [Shard(0), Shard(1)], [2, 4], (), [Shard(0), Shard(1)]),
        ((768, 2048), [Shard(0), Shard(1)], [2, 3], (1,), [Shard(0), Replicate()]),
        ((768, 700), [Shard(0), Shard(1)], [2, 2], (1,), [Shard(0), Replicate()]),
        # twice inside rows, and over one rank
        ((768, 2048), [Shard(1), Shard(1)], [2, 2], (0, 1), [Replicate(), Replicate()]),
        ((768, 700), [Shard(0), Shard(1)], [2, 1], (), [Shard(0), Replicate()]),
        # experts, and channels of a convolution
        ((8, 768, 2048), [Shard(1)], [3], (), [Shard(1)]),
        ((64, 32, 3, 3), [Shard(1)], [2], (0,), [Replicate()]),
    ],
)
def test_ranks_share_blocks_only_where_rows_are_cut_inside_them(
    shape: tuple[int, ...],
    placements: list[Placement],
    mesh: list[int],
    shared: tuple[int, ...],
    scales: list[Placement],
) -> None:
    blocks = MomentBlocks.part(shape, [0] * len(shape), shape, placements, mesh)
    assert blocks.shared_over == shared
    assert list(blocks.scales_placements) == scales


def test_blocks_are_those_of_a_flat_tensor_where_rows_are_multiples_of_a_block() -> None:
    blocks = whole((6, 1024))
    starts = [
        row * 1024 + tile.columns.start + block * tile.width
        for tile in blocks.tiles(10**6)
        for row, block in itertools.product(
            range(tile.rows.start, tile.rows.stop), range(tile.blocks.stop - tile.blocks.start)
        )
    ]
    assert starts == list(range(0, 6 * 1024, BLOCK))
