"""Packing: every tensor travels once, small ones of a kind together, large ones alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.transport.buckets import assign_buckets, pack, unpack

SMALL = 100
SIZES = st.lists(st.tuples(st.integers(0, 200), st.sampled_from("ab")), max_size=30)


@given(SIZES)
def test_every_tensor_with_bytes_is_in_exactly_one_bucket(sizes: list[tuple[int, str]]) -> None:
    cut = assign_buckets([size for size, _ in sizes], [kind for _, kind in sizes], SMALL)
    found = sorted(i for bucket in cut for i in bucket.indices)
    assert found == [i for i, (size, _) in enumerate(sizes) if size]


@given(SIZES)
def test_only_small_tensors_of_one_kind_are_packed(sizes: list[tuple[int, str]]) -> None:
    cut = assign_buckets([size for size, _ in sizes], [kind for _, kind in sizes], SMALL)
    for bucket in cut:
        assert bucket.packed == (len(bucket.indices) > 1)
        if bucket.packed:
            assert all(sizes[i][0] < SMALL for i in bucket.indices)
            assert len({sizes[i][1] for i in bucket.indices}) == 1
    packs = [sizes[p.indices[0]][1] for p in cut if sizes[p.indices[0]][0] < SMALL]
    assert len(packs) == len(set(packs)), "one bucket holds all small tensors of a kind"


@given(SIZES)
def test_buckets_are_in_the_order_of_their_first_tensor(sizes: list[tuple[int, str]]) -> None:
    cut = assign_buckets([size for size, _ in sizes], [kind for _, kind in sizes], SMALL)
    firsts = [bucket.indices[0] for bucket in cut]
    assert firsts == sorted(firsts)
    assert all(list(bucket.indices) == sorted(bucket.indices) for bucket in cut)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=10))
def test_unpack_undoes_pack(numels: list[int]) -> None:
    pieces = [torch.randn(numel) for numel in numels]
    copies = [torch.empty(numel) for numel in numels]
    unpack(pack(pieces), copies)
    for piece, copy in zip(pieces, copies, strict=True):
        assert torch.equal(piece, copy)


def test_a_piece_alone_is_not_copied() -> None:
    piece = torch.randn(5)
    assert pack([piece]) is piece
