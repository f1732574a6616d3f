"""What ranks tell the first one of what they have to save, and what it answers."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.base.boxes import Box
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk.entries import Origin, StoredPiece, Value
from shardwise.checkpoint.ranks import outline
from shardwise.checkpoint.ranks.outline import Outline, Outlines, chosen, outline_of, summary


def _item(
    name: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype = torch.float32
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _has(rank: int, ranks: int, replicas: int = 1, extra: str = "") -> list[WriteItem]:
    """A matrix whose rows are cut, with replicas, and a vector that all ranks have."""
    rows = 2 * (rank % (ranks // replicas))
    found = [
        _item("model.w", (2 * ranks // replicas, 3), Box((rows, 0), (2, 3))),
        _item("model.b", (5,), Box((0,), (5,))),
    ]
    return found + ([_item(extra, (1,), Box((0,), (1,)))] if extra else [])


def _outline(items: list[WriteItem], *values: Value, placements: str = "") -> Outline:
    paths = {item.index.fqn: tuple(item.index.fqn.split(".")) for item in items}
    origins = {name: Origin(path, placements) for name, path in paths.items()}
    return outline_of(items, origins, values)


def _names(items: list[WriteItem], bits: bytes) -> list[str]:
    return [item.index.fqn for item in chosen(items, bits)]


def test_of_what_all_have_one_writes_each_part() -> None:
    has = [_has(rank, 4) for rank in range(4)]
    found = Outlines([_outline(each) for each in has])
    assert [_names(*each) for each in zip(has, found.shared(), strict=True)] == [["model.b"]] * 4
    writers = found.writers(lowest=True)
    written = [_names(*each) for each in zip(has, writers, strict=True)]
    assert written == [["model.w", "model.b"], *([["model.w"]] * 3)]


def test_replicas_share_the_writing() -> None:
    has = [_has(rank, 8, replicas=2) for rank in range(8)]
    found = Outlines([_outline(each) for each in has])
    assert all(len(_names(*each)) == 2 for each in zip(has, found.shared(), strict=True))
    written = [_names(*each) for each in zip(has, found.writers(lowest=False), strict=True)]
    assert sorted(name for each in written for name in each) == ["model.b"] + ["model.w"] * 4
    assert written[0] == ["model.w"], "and what is written next is of a rank that has less"
    assert "model.b" in written[4]


def test_what_differs_is_found_and_all_else_is_left_out() -> None:
    outlines = [_outline(_has(rank, 3), Value(("extra", "step"), 1)) for rank in range(3)]
    found = Outlines(outlines)
    found.shared()
    same, other = bytes(8), b"otherone"
    assert [state.digests for state in found.states([same, same, same])] == [{}] * 3
    states = found.states([same, other, same])
    assert len({*states[0].digests.values(), *states[1].digests.values()}) == 2
    assert [len(state.tensors) for state in states] == [2, 0, 0]
    assert [value.value for value in found.values] == [1]


def test_ranks_may_have_other_tensors_and_their_own() -> None:
    has = [_has(rank, 2, extra=f"extra.r.$ranks.{rank}") for rank in range(2)]
    has.append([_item("model.late", (4,), Box((0,), (4,)))])
    found = Outlines([_outline(each) for each in has])
    found.shared()
    assert [_names(*each) for each in zip(has, found.writers(lowest=True), strict=True)] == [
        ["model.w", "model.b", "extra.r.$ranks.0"],
        ["model.w", "extra.r.$ranks.1"],
        ["model.late"],
    ]
    assert list(found.infos)[:2] == ["model.w", "model.b"]


def test_what_was_written_comes_back_piece_by_piece() -> None:
    has = [_has(rank, 2) for rank in range(2)]
    found = Outlines([_outline(each) for each in has])
    found.shared()
    found.writers(lowest=True)
    w, b = (Box((0, 0), (2, 3)), Box((0,), (5,)))
    first = [
        StoredPiece("0", 64, w, ("00112233445566ff",)),
        StoredPiece("0", 88, b, ("0" * 16,)),
    ]
    second = [StoredPiece("1", 72, Box((2, 0), (2, 3)), ("f" * 16,))]
    pieces = found.pieces([summary(first), summary(second)], ["0", "1"])
    assert pieces == {"model.w": [first[0], *second], "model.b": [first[1]]}


def test_parts_of_several_blocks_keep_their_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "BLOCK", 16)
    has = [_has(rank, 4, replicas=2, extra="extra.x" if rank == 3 else "") for rank in range(4)]
    found = Outlines([_outline(each) for each in has])
    found.shared()
    written, numbers = [], itertools.count()
    expected: dict[str, list[StoredPiece]] = {}
    names = [f"file {rank}" for rank in range(4)]
    for items, bits, file in zip(has, found.writers(lowest=False), names, strict=True):
        mine = []
        for item in chosen(items, bits):
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            blocks = -(-4 * box.numel // 16)
            sums = tuple(f"{next(numbers):016x}" for _ in range(blocks))
            mine.append(StoredPiece(file, 64 * next(numbers), box, sums))
            expected.setdefault(item.index.fqn, []).append(mine[-1])
        written.append(summary(mine))
    assert {len(piece.checksums) for each in expected.values() for piece in each} == {1, 2}
    assert found.pieces(written, names) == expected


def test_a_part_that_no_rank_has_is_named_before_anything_is_written() -> None:
    found = Outlines([_outline(_has(rank, 4)) for rank in range(3)])
    with pytest.raises(CheckpointError, match=r"model\.w: found parts of 18 elements .* the 24 of"):
        found.shared()


@pytest.mark.parametrize(
    ("shape", "box", "dtype"),
    [
        ((4, 4), Box((0, 2), (4, 2)), torch.float32),  # other columns: a gap and an overlap
        ((4, 4), Box((2, 0), (2, 4)), torch.int32),
        ((8, 2), Box((4, 0), (4, 2)), torch.float32),
    ],
)
def test_parts_that_make_up_no_tensor_are_named_with_their_ranks(
    shape: tuple[int, ...], box: Box, dtype: torch.dtype
) -> None:
    one = _outline([_item("model.w", (4, 4), Box((0, 0), (2, 4)))], placements="Shard(0)")
    other = _outline([_item("model.w", shape, box, dtype)], placements=f"of {shape}")
    found = Outlines([one, other], names=[4, 6])
    with pytest.raises(CheckpointError, match=r"model\.w: found .* on rank 4 and .* on rank 6"):
        found.shared()


def test_parts_of_other_meshes_may_make_up_one_tensor() -> None:
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]
    ranks = [_outline([_item("model.w", (4, 4), box)], placements=str(box)) for box in boxes]
    found = Outlines(ranks)
    found.shared()
    assert all(map(any, found.writers(lowest=False)))


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_empty_tensors_are_compared_and_not_written(sizes: tuple[int, int]) -> None:
    has = [[_item("model.b", (size,), Box((0,), (size,)))] for size in sizes]
    found = Outlines([_outline(each) for each in has])
    assert [_names(*each) for each in zip(has, found.shared(), strict=True)] == [["model.b"]] * 2
    assert all(state.digests for state in found.states([b"this one", b"that one"]))
    written = [_names(*each) for each in zip(has, found.writers(lowest=True), strict=True)]
    assert written == [["model.b"] if sizes[0] else [], []]


def test_empty_parts_of_empty_tensors_are_not_taken_for_each_other() -> None:
    has = [[_item("model.w", (3, 0), Box((2 * rank, 0), (2 - rank, 0)))] for rank in range(2)]
    found = Outlines([_outline(each) for each in has])
    assert [_names(*each) for each in zip(has, found.shared(), strict=True)] == [[], []]


def test_a_rank_that_has_much_of_its_own_writes_less_of_what_all_have() -> None:
    own = _item("model.large", (100,), Box((0,), (100,)))
    has = [[*([own] if rank == 0 else []), *_has(rank, 2)] for rank in range(2)]
    found = Outlines([_outline(each) for each in has])
    found.shared()
    written = [_names(*each) for each in zip(has, found.writers(lowest=False), strict=True)]
    assert written == [["model.large", "model.w"], ["model.w", "model.b"]]


def test_more_parts_than_a_manifest_can_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "MAX_BYTES", 400)
    Outlines([_outline(_has(rank, 2)) for rank in range(2)]).shared()
    with pytest.raises(CheckpointError, match="shard over fewer ranks"):
        Outlines([_outline(_has(rank, 4)) for rank in range(4)]).shared()
    monkeypatch.setattr(outline, "MANY", 1)
    Outlines([_outline(_has(rank, 4)) for rank in range(4)]).shared()


def test_a_rank_sends_little_more_than_numbers() -> None:
    items = [
        _item(f"model.layers.{at}.weight", (64, 64), Box((8, 0), (8, 64))) for at in range(1000)
    ]
    assert len(pickle.dumps(_outline(items))) < 20 * len(items)
