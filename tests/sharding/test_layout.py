"""Who holds which rows: the cut is a value that answers without running anything."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sharding.layout import Layout


def test_seven_rows_over_three_ranks() -> None:
    """The picture at the top of layout.py."""
    layout = Layout(torch.Size([7]), 0, 3)

    rows = [layout.cut(torch.arange(7), rank).tolist() for rank in range(3)]

    assert rows == [[0, 1, 2], [3, 4, 5], [6]]
    assert layout.chunk_rows == 3
    assert layout.padded_numel - layout.numel == 2


shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1))
    return Layout(torch.Size(shape), dim, draw(st.integers(1, 9)))


@given(layouts())
def test_shards_are_what_torch_chunk_cuts(layout: Layout) -> None:
    assert layout.dim is not None
    whole = torch.arange(layout.numel).reshape(layout.shape)
    chunks = list(whole.chunk(layout.world_size, dim=layout.dim))

    for rank in range(layout.world_size):
        shard = layout.cut(whole, rank)
        assert shard.shape == layout.shard_shape(rank)
        expected = chunks[rank] if rank < len(chunks) else whole.narrow(layout.dim, 0, 0)
        assert torch.equal(shard, expected)


@given(layouts())
def test_chunks_lead_back_to_the_whole(layout: Layout) -> None:
    """What reduce-scatter is given and what all-gather leaves have one order of elements."""
    whole = torch.arange(layout.numel).reshape(layout.shape)
    chunks = layout.to_chunks(whole)

    for rank in range(layout.world_size):
        shard = layout.cut(whole, rank)
        start = rank * layout.chunk_numel
        assert torch.equal(chunks[start : start + shard.numel()], shard.reshape(-1))
    padded = torch.zeros(layout.padded_numel, dtype=whole.dtype)
    padded[: chunks.numel()] = chunks
    again = torch.full(layout.shape, -1)
    layout.from_chunks(padded, again)
    assert torch.equal(again, whole)


@given(layouts())
def test_a_cut_along_dimension_0_needs_no_copy(layout: Layout) -> None:
    whole = torch.arange(layout.numel).reshape(layout.shape)

    assert layout.is_rank_major == (layout.dim == 0)
    if layout.dim == 0 and layout.numel:
        assert layout.to_chunks(whole).data_ptr() == whole.data_ptr()


@given(layouts())
def test_padding_is_less_than_one_row_per_rank(layout: Layout) -> None:
    assert layout.dim is not None
    per_row = math.prod(layout.shape[: layout.dim] + layout.shape[layout.dim + 1 :])
    padding = layout.padded_numel - layout.numel
    assert 0 <= padding <= (layout.world_size - 1) * per_row * max(layout.chunk_rows, 1)
    assert (
        sum(layout.rows(rank)[1] for rank in range(layout.world_size)) == layout.shape[layout.dim]
    )


def test_a_scalar_is_whole_on_every_rank() -> None:
    layout = Layout(torch.Size([]), None, 4)

    assert layout.shard_shape(3) == torch.Size([])
    assert layout.padded_numel == 1
    assert layout.cut(torch.tensor(5.0), 2).item() == 5.0
    with pytest.raises(ValueError, match="no rows per rank"):
        layout.rows(0)
    with pytest.raises(ValueError, match="no chunks"):
        _ = layout.chunk_rows


def test_a_missing_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 4\) has no dimension 2.*expected 0 to 1"):
        Layout(torch.Size([3, 4]), 2, 2)
