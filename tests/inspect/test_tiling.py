"""The blocks of all ranks are the parameter, each copy of it exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardwise._torch import dtensor
from shardwise.insight.inspect.grid import Block
from shardwise.sharding.part import cut, full_part, placed, shape_of, take
from tests.inspect.plans import planned_report

SIZE = st.integers(min_value=1, max_value=4)
WIDTH = st.integers(min_value=1, max_value=11)


class Pair(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.up = nn.Linear(outer, inner)
        self.down = nn.Linear(inner, outer, bias=False)
        self.norm = nn.LayerNorm(outer)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@settings(max_examples=40, deadline=None)
@given(replicas=SIZE, shards=SIZE, tensor=SIZE, inner=WIDTH, outer=WIDTH)
def test_blocks_tile_every_parameter(
    replicas: int, shards: int, tensor: int, inner: int, outer: int
) -> None:
    mesh = f"dp_replicate={replicas},dp_shard={shards},tp={tensor}"
    report = planned_report(mesh, lambda: Pair(inner, outer))
    for each in report.parameters:
        copies = replicas * (1 if each.name.startswith(("up", "down")) else tensor)
        # Nothing more is cut of a scalar, nor of what tensor parallelism cut so unevenly that no
        # placement could tell.
        copies *= shards if each.cut_dim is None else 1
        for place in range(tensor):
            blocks = [each.tiling.by_rank[rank] for rank in report.grid.ranks[place::tensor]]
            lengths = {block.numel + block.padding for block in blocks}
            assert len(lengths) == 1, f"{each.name}: chunks that are gathered together"
        found = torch.zeros(each.shape, dtype=torch.int64)
        positions = torch.arange(found.numel()).view(each.shape)
        for rank in range(report.grid.size):
            block = each.tiling.by_rank[rank]
            own = take(positions, block.part)
            assert tuple(own.shape) == block.shape
            found.view(-1)[own.flatten()] += 1
        assert found.eq(copies).all(), f"{each.name} {each.shape} on {mesh}: {found}"


def test_seven_rows_over_three_ranks() -> None:
    """The picture that ``Layout`` opens with."""
    rows = [cut(full_part((7, 2)), 0, 3, rank)[0] for rank in range(3)]
    assert rows == [((0, 3),), ((3, 3),), ((6, 1),)]


def test_a_part_that_lies_in_several_places() -> None:
    """Two fused projections of five rows, each cut over two ranks."""
    fused = [dtensor.strided_shard(0, 2), Replicate()]
    parts = [placed((10, 3), fused, (2, 1), (rank, 0)) for rank in range(2)]
    assert parts == [(((0, 3), (5, 3)), ((0, 3),)), (((3, 2), (8, 2)), ((0, 3),))]
    taken = take(torch.arange(30).view(10, 3), parts[1])
    assert taken[:, 0].tolist() == [9, 12, 24, 27]
    assert shape_of(parts[0]) == (6, 3)


def test_spans_that_meet_are_one() -> None:
    """Cut by rows twice, outer dimension first: what is left is one run of rows."""
    part = placed((12,), [Shard(0), Shard(0)], (2, 3), (1, 2))
    assert part == (((10, 2),),)


@pytest.mark.parametrize("shape", [(), (0, 4)])
def test_what_has_no_rows_to_give(shape: tuple[int, ...]) -> None:
    part = full_part(shape) if not shape else cut(full_part(shape), 0, 3, 1)
    assert Block(part, (0,)).shape == shape
