"""Which rows torch's placements say that a rank holds, against those that it does hold."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise.sharding.placement import is_describable


def _chunks(rows: torch.Tensor, ranks: int) -> list[list[int]]:
    chunks = [chunk.tolist() for chunk in torch.chunk(rows, ranks)] if len(rows) else []
    return chunks + [[]] * (ranks - len(chunks))


def _held(rows: int, pieces: int, ranks: int) -> list[list[list[int]]]:
    """Cut in pieces, and each over the ranks: by rank and piece."""
    cut = [_chunks(torch.tensor(left), ranks) for left in _chunks(torch.arange(rows), pieces)]
    return [[piece[rank] for piece in cut] for rank in range(ranks)]


def _told(rows: int, pieces: int, ranks: int) -> list[list[list[int]]]:
    """What ``(_StridedShard(0, pieces), Shard(0))`` means: rows of ranks, cut in pieces."""
    together = ([row for part in held for row in part] for held in _held(rows, pieces, ranks))
    return [_chunks(torch.tensor(held), pieces) for held in together]


@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_rows_are_cut_where_placements_tell_who_holds_them(pieces: int) -> None:
    for ranks, rows in itertools.product((2, 3, 4, 8), range(1, 40)):
        same = _held(rows, pieces, ranks) == _told(rows, pieces, ranks)
        assert is_describable(rows, pieces, ranks) == same, f"{rows} rows over {ranks} ranks"


def test_even_pieces_can_always_be_told() -> None:
    assert all(is_describable(2 * rows, 2, 3) for rows in range(1, 40))
    assert not is_describable(50257, 2, 8)
