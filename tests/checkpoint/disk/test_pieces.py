"""Boxes, and the bytes that they need: any part of any piece, read through any buffer."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.disk.boxes import Box, boxes_of_span, full_box, is_tiling
from shardwise.checkpoint.disk.entries import Manifest, Piece, TensorEntry, TensorInfo, dtype_name
from shardwise.checkpoint.disk.manifest import read_manifest, write_manifest
from shardwise.checkpoint.disk.pieces import LEAST_BUFFER, PieceReader, read_box, read_tensor
from shardwise.checkpoint.disk.safetensors import TensorData, write_shard

FILE = "shard-00000-of-00001.safetensors"
_QUICK = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def test_a_span_is_the_boxes_of_the_picture() -> None:
    #   . . # # #     elements 2 .. 15 of 4 x 5
    #   # # # # #
    #   # # # # #
    #   # . . . .
    assert list(boxes_of_span((4, 5), 2, 16)) == [
        Box((0, 2), (1, 3)),
        Box((1, 0), (2, 5)),
        Box((3, 0), (1, 1)),
    ]


@given(shape=shapes, data=st.data())
def test_the_boxes_of_a_span_are_its_elements_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(first, numel))
    boxes = list(boxes_of_span(shape, first, end))
    elements = torch.arange(numel).view(shape)
    found = [_part(elements, box).flatten() for box in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(first, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]


@pytest.mark.parametrize(
    ("boxes", "shape", "fills"),
    [
        ([Box((0, 0), (2, 3))], (2, 3), True),
        ([Box((0, 0), (1, 3)), Box((1, 0), (1, 3))], (2, 3), True),
        ([Box((0, 0), (2, 1)), Box((0, 1), (1, 2)), Box((1, 1), (1, 2))], (2, 3), True),
        ([Box((), ())], (), True),
        ([], (0, 3), True),
        ([], (), False),
        ([], (2,), False),
        ([Box((0,), (1,)), Box((0,), (1,))], (2,), False),
        ([Box((0,), (2,)), Box((1,), (1,))], (3,), False),
        ([Box((), ()), Box((), ())], (), False),
    ],
)
def test_boxes_fill_a_tensor_or_do_not(
    boxes: list[Box], shape: tuple[int, ...], fills: bool
) -> None:
    assert is_tiling(boxes, shape) is fills


def test_boxes_may_be_cut_in_any_way() -> None:
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    boxes = [Box(offsets, sizes) for offsets, sizes in pinwheel]
    assert is_tiling([*boxes, Box((1, 1), (1, 1))], (3, 3))
    assert not is_tiling([*boxes, Box((0, 0), (1, 1))], (3, 3)), "a gap, and an overlap as large"


@_QUICK
@given(shape=shapes, data=st.data())
def test_boxes_fill_where_each_element_is_in_one(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = [full_box(shape)]
    for _ in range(data.draw(st.integers(0, 4))):  # cut, and now and then move a part
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1)) if shape else 0
        if not shape or box.sizes[dim] < 2:
            boxes.append(box)
            continue
        moved = data.draw(st.sampled_from([0, 0, 0, 1]))
        for first, size in ((0, 1), (1 - moved, box.sizes[dim] - 1)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += first
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    counts = torch.zeros(shape)
    for box in boxes:
        _part(counts, box).add_(1)
    assert is_tiling(boxes, shape) is bool((counts == 1).all())


def test_checking_boxes_takes_work_in_proportion_to_them() -> None:
    def cut(count: int) -> tuple[list[Box], tuple[int, ...]]:
        """Cuts within cuts, in the last two of many dimensions."""
        lead = (1,) * 20
        boxes, left = [], [0, 0]
        for depth in range(15):
            dim = depth % 2
            sizes = [count - left[0], count - left[1]]
            sizes[dim] = 1
            boxes.append(Box((0,) * 20 + tuple(left), (*lead, *sizes)))
            left[dim] += 1
        rest = count - left[0], count - left[1]
        boxes += [
            Box((*(0,) * 20, left[0] + row, left[1]), (*lead, 1, rest[1])) for row in range(rest[0])
        ]
        return boxes, (*lead, count, count)

    boxes, shape = cut(400)
    calls = 0

    def count_calls(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count_calls)
    try:
        assert is_tiling(boxes, shape)
    finally:
        sys.setprofile(None)
    assert calls < 5 * len(boxes) * len(shape)


def _stored(folder: Path, tensor: torch.Tensor, cut: int, block: int) -> Manifest:
    """Write a tensor in two pieces, cut along its first dimension."""
    shape = tuple(tensor.shape)
    boxes = [full_box(shape)]
    if shape and 0 < cut < shape[0]:
        boxes = [
            Box((0,) * len(shape), (cut, *shape[1:])),
            Box((cut, *(0 for _ in shape[1:])), (shape[0] - cut, *shape[1:])),
        ]
    dtype = dtype_name(tensor.dtype)
    entry = TensorEntry(("model", "w"), shape, dtype, "", "", ())
    keys = {entry.key(Piece(FILE, 0, box, ())): box for box in boxes}
    parts = [
        TensorData(key, TensorInfo(dtype, box.sizes), lambda box=box: _part(tensor, box))
        for key, box in keys.items()
    ]
    (folder / FILE).unlink(missing_ok=True)
    written = write_shard(folder / FILE, parts, block)
    pieces = tuple(
        Piece(FILE, written[key].offset, box, written[key].checksums) for key, box in keys.items()
    )
    entry = TensorEntry(("model", "w"), shape, dtype, "", "", pieces)
    return Manifest((entry,), (), {FILE: (folder / FILE).stat().st_size}, block, 1)


@_QUICK
@given(shape=shapes, data=st.data())
def test_any_part_is_read_through_any_blocks(
    tmp_path: Path, shape: tuple[int, ...], data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.int16, torch.uint8]))
    tensor = torch.arange(math.prod(shape)).view(shape).to(dtype)
    block = data.draw(st.sampled_from([16, 48, 4096]))
    manifest = _stored(tmp_path, tensor, data.draw(st.integers(0, 5)), block)
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(offsets, shape, strict=True))
    box = Box(offsets, sizes)
    target = torch.zeros(sizes, dtype=data.draw(st.sampled_from([dtype, torch.float64])))
    if data.draw(st.booleans()) and target.ndim > 1:
        target = torch.zeros(sizes[::-1], dtype=dtype).permute(*reversed(range(len(sizes))))
    [entry] = manifest.tensors
    with PieceReader(tmp_path, manifest, buffer=LEAST_BUFFER) as reader:
        read_box(reader, entry, box, target)
        assert torch.equal(target, _part(tensor, box).to(target.dtype))
        assert torch.equal(read_tensor(reader, entry), tensor)
        streamed = b"".join(bytes(c) for p in entry.pieces for c in reader.stream(entry, p))
    assert streamed == tensor.numpy().tobytes()


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    manifest = _stored(tmp_path, torch.arange(35.0).view(5, 7), 2, 16)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    with pytest.raises(FileExistsError):
        write_manifest(tmp_path, manifest)


def test_reading_past_autograd_is_seen_by_it(tmp_path: Path) -> None:
    manifest = _stored(tmp_path, torch.arange(4.0), 0, 16)
    weight = torch.nn.Parameter(torch.ones(4))
    loss = weight.square().sum()
    with PieceReader(tmp_path, manifest) as reader:
        read_box(reader, manifest.tensors[0], full_box((4,)), weight)
    assert weight.tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_wrong_use_is_told(tmp_path: Path) -> None:
    manifest = _stored(tmp_path, torch.arange(4.0), 0, 16)
    [entry] = manifest.tensors
    with pytest.raises(ValueError, match="buffer: found 4095 bytes, expected 4096 or more"):
        PieceReader(tmp_path, manifest, buffer=4095)
    with (
        PieceReader(tmp_path, manifest) as reader,
        pytest.raises(ValueError, match=r"model\.w: found a destination of \[3\], expected \[4\]"),
    ):
        reader.read_into(entry, entry.pieces[0], full_box((4,)), torch.empty(3))
