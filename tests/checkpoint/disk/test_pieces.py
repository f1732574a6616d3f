"""Pieces: any part of any tensor is read through any buffer and verified."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.boxes import Box, full_box
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk.entries import (
    Manifest,
    TensorEntry,
    TensorInfo,
    dtype_name,
)
from shardwise.checkpoint.disk.pieces import LEAST_BUFFER, PieceReader, read_box
from shardwise.checkpoint.disk.safetensors import PieceData, write_shard
from tests.checkpoint.tilings import QUICK, part_of, shapes

FILE = "shard-00000-of-00001.safetensors"


def _stored(folder: Path, tensor: torch.Tensor, cut: int, block: int) -> Manifest:
    """Write a tensor in two pieces, cut along its first dimension."""
    shape = tuple(tensor.shape)
    boxes = [full_box(shape)]
    if shape and 0 < cut < shape[0]:
        boxes = [
            Box((0,) * len(shape), (cut, *shape[1:])),
            Box((cut, *(0 for _ in shape[1:])), (shape[0] - cut, *shape[1:])),
        ]
    info = TensorInfo(dtype_name(tensor.dtype), shape)
    parts = [PieceData("model.w", info, box, lambda box=box: part_of(tensor, box)) for box in boxes]
    (folder / FILE).unlink(missing_ok=True)
    pieces = tuple(write_shard(folder / FILE, parts, block))
    entry = TensorEntry(("model", "w"), shape, info.dtype, "", "", pieces)
    return Manifest((entry,), (), {FILE: (folder / FILE).stat().st_size}, block, 1)


@QUICK
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
        assert torch.equal(target, part_of(tensor, box).to(target.dtype))
        read_box(reader, entry, full_box(entry.shape), again := torch.empty_like(tensor))
        assert torch.equal(again, tensor)
        streamed = b"".join(bytes(c) for p in entry.pieces for c in reader.stream(entry, p))
    assert streamed == tensor.numpy().tobytes()


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


def test_a_header_that_differs_from_the_manifest_is_refused(tmp_path: Path) -> None:
    manifest = _stored(tmp_path, torch.arange(4.0), 0, 16)
    [entry] = manifest.tensors
    other = TensorEntry(("model", "v"), entry.shape, entry.dtype, "", "", entry.pieces)
    with (
        PieceReader(tmp_path, manifest) as reader,
        pytest.raises(CheckpointError, match=r"model\.v: found null in its header, expected"),
    ):
        reader.open(other, entry.pieces[0])


def test_only_the_blocks_of_the_part_are_read_and_verified(tmp_path: Path) -> None:
    """Damage elsewhere in the piece does not hinder who does not need it."""
    tensor = torch.arange(64.0)
    manifest = _stored(tmp_path, tensor, 0, 64)  # 16 elements a block
    [entry] = manifest.tensors
    data = bytearray((tmp_path / FILE).read_bytes())
    data[-1] ^= 1
    (tmp_path / FILE).write_bytes(data)
    part = torch.zeros(48)
    with PieceReader(tmp_path, manifest) as reader:
        read_box(reader, entry, Box((0,), (48,)), part)
        assert torch.equal(part, tensor[:48])
        with pytest.raises(CheckpointError, match=r"model\.w: is damaged: bytes 192 \.\. 256"):
            read_box(reader, entry, Box((47,), (2,)), torch.zeros(2))
