"""Sources: windows cut tensors into parts that fit; extents are read with any strides."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.boxes import Box, full_box, is_tiling
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk.entries import TensorInfo, dtype_name, torch_dtype
from shardwise.checkpoint.disk.values import replaced_in
from shardwise.checkpoint.formats import source
from shardwise.checkpoint.formats.detect import Format, find_checkpoint, format_of, open_source
from shardwise.checkpoint.formats.source import (
    LEAST_BUFFER,
    Extent,
    ExtentReader,
    ExtentSource,
    ReadWindow,
    check_boxes,
    model_tensors,
)
from shardwise.checkpoint.formats.torchfile import (
    Placeholder,
    StoredTensor,
    TorchSource,
    read_tree,
    write_tree,
)
from tests.checkpoint.small import save_small
from tests.checkpoint.tilings import QUICK, boxes_in, part_of, shapes, tilings


@QUICK
@given(shape=shapes, data=st.data())
def test_parts_fit_in_the_window_and_cover_the_box(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    shape = tuple(100 * n for n in shape[:1]) + shape[1:]
    window, info = ReadWindow(4096), TensorInfo("F64", shape)
    box = data.draw(boxes_in(shape))
    parts = list(window.boxes(info, box))
    assert all(part.numel * 8 <= 4096 for part in parts)
    assert is_tiling([part.relative_to(box.offsets) for part in parts], box.sizes)
    spans = [part.span(shape) for part in parts]
    assert spans == sorted(spans), "front to back"


def test_a_window_reads_in_parts_and_reports_them(tmp_path: Path) -> None:
    tensor = torch.arange(5000.0)
    torch.save({"model": {"w": tensor}}, tmp_path / "x.pt")
    moved: list[int] = []
    with TorchSource(tmp_path / "x.pt") as opened:
        window = ReadWindow(4096, moved.append)
        data = b"".join(bytes(chunk) for chunk in window.chunks(opened, ("model", "w")))
    assert data == tensor.numpy().tobytes()
    assert sum(moved) == tensor.nbytes
    assert max(moved) <= 4096
    with pytest.raises(ValueError, match="buffer: found 4095 bytes, expected 4096 or more"):
        ReadWindow(4095)


class _OneTensor(ExtentSource):
    """A tensor that lies in one file, in pieces."""

    def __init__(self, info: TensorInfo, extents: Sequence[Extent]) -> None:
        super().__init__(extents[0].file)
        self.tensors = {("model", "a"): info}
        self.values: dict[Any, Any] = {}
        self._extents = extents

    def _extents_of(self, path: Any) -> Sequence[Extent]:
        return self._extents


@QUICK
@given(
    shape=shapes,
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float64]),
    scratch=st.sampled_from([8, 40]),
    data=st.data(),
)
def test_any_box_of_any_cut_in_any_order_of_storage_is_read_through_any_scratch(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype, scratch: int, data: st.DataObject
) -> None:
    whole = torch.arange(math.prod(shape)).view(shape).to(dtype)
    names = {torch.uint8: "U8", torch.int16: "I16", torch.float64: "F64"}
    file = tmp_path / "data"
    extents = []
    with file.open("wb") as opened:
        for box in data.draw(tilings(shape)):
            order = data.draw(st.permutations(range(len(shape))))
            stored = part_of(whole, box).permute(order).contiguous()
            back = stored.permute(tuple(map(order.index, range(len(order)))))
            extents.append(Extent(box, file, opened.tell(), tuple(back.stride())))
            opened.write(stored.numpy().tobytes())

    with (
        _OneTensor(TensorInfo(names[dtype], shape), extents) as opened,
        pytest.MonkeyPatch.context() as patch,
    ):
        read = b"".join(map(bytes, ReadWindow(LEAST_BUFFER).chunks(opened, ("model", "a"))))
        assert read == whole.numpy().tobytes()
        patch.setattr(source, "_MOST_SCRATCH", scratch)
        wanted = data.draw(boxes_in(shape))
        out = torch.empty(wanted.sizes, dtype=dtype)
        opened.read(("model", "a"), wanted, out)
        assert torch.equal(out, part_of(whole, wanted))


def test_a_cut_across_rows_longer_than_the_scratch_buffer_is_read(tmp_path: Path) -> None:
    whole = torch.arange(3 * 3_000_000, dtype=torch.int16).view(3, 3_000_000)
    (tmp_path / "data").write_bytes(whole.numpy().tobytes())
    extent = Extent(Box((0, 0), (3, 3_000_000)), tmp_path / "data", 0, (3_000_000, 1))

    out = torch.empty(3, 2, dtype=torch.int16)
    reader = ExtentReader()
    reader.read([extent], Box((0, 2_999_990), (3, 2)), out)
    reader.close()

    assert torch.equal(out, whole[:, 2_999_990:2_999_992])


def test_few_files_are_open_at_a_time_and_none_in_the_end(tmp_path: Path) -> None:
    extents = []
    for i in range(100):
        (tmp_path / str(i)).write_bytes(bytes([i]))
        extents.append(Extent(Box((i,), (1,)), tmp_path / str(i), 0, (1,)))
    before = len(os.listdir("/proc/self/fd"))
    into = torch.zeros(100, dtype=torch.uint8)
    with ExtentReader() as reader:
        reader.read(extents, Box((0,), (100,)), into)
        assert len(os.listdir("/proc/self/fd")) <= before + 64
    assert len(os.listdir("/proc/self/fd")) == before
    assert into.tolist() == list(range(100))


def test_boxes_that_do_not_cover_a_tensor_are_refused() -> None:
    info = TensorInfo("F32", (4,))
    check_boxes("f", info, [Box((2,), (2,)), Box((0,), (2,))])
    with pytest.raises(CheckpointError, match=r"f: found a piece at \[3\] with sizes \[2\]"):
        check_boxes("f", info, [Box((3,), (2,))])
    with pytest.raises(CheckpointError, match="f: found gaps or overlaps between 1 pieces"):
        check_boxes("f", info, [Box((0,), (3,))])


def test_each_format_is_found_by_its_files(tmp_path: Path) -> None:
    save_small(tmp_path / "run" / "checkpoints" / "step-00000003")
    step = tmp_path / "run" / "checkpoints" / "step-00000003"
    for name in (".metadata", "model.safetensors", "x.pt", "y.txt", "index"):
        (tmp_path / name.strip(".")).mkdir(exist_ok=True)
    (tmp_path / "metadata" / ".metadata").touch()
    (tmp_path / "model.safetensors" / "a.safetensors").touch()
    (tmp_path / "index" / "model.safetensors.index.json").touch()
    for name in ("f.pt", "f.pth", "f.bin", "f.safetensors", "f.txt"):
        (tmp_path / name).touch()
    found = {path.name: format_of(path) for path in [*tmp_path.iterdir(), step]}
    assert found == {
        "run": None,
        "metadata": Format.DCP,
        "model.safetensors": Format.HF,
        "index": Format.HF,
        "x.pt": None,
        "y.txt": None,
        "f.pt": Format.TORCH,
        "f.pth": Format.TORCH,
        "f.bin": Format.TORCH,
        "f.safetensors": Format.HF,
        "f.txt": None,
        "step-00000003": Format.SHARDWISE,
    }
    assert find_checkpoint(tmp_path / "run") == step
    assert find_checkpoint(step.parent) == step
    (step / "manifest.json").unlink()
    assert format_of(step) is Format.SHARDWISE, "the error says that its manifest is lost"
    for path in (tmp_path / "run", tmp_path / "y.txt"):
        with pytest.raises(CheckpointError, match="found no checkpoint; expected manifest"):
            find_checkpoint(path)
    with pytest.raises(CheckpointError, match="found nothing there"):
        open_source(tmp_path / "nowhere")


_TREES: list[Any] = [
    {"a": torch.arange(6.0).view(2, 3), "b": [torch.tensor(3), (torch.ones(2).bool(), None)]},
    {"t": torch.arange(6).view(2, 3).T, "part": torch.arange(9.0)[2:5], "empty": torch.empty(0, 3)},
    {"half": torch.ones(3).half(), "bf": torch.ones(3).bfloat16(), "c": torch.ones(2) * 1j},
    {"n": 1.5, "s": {1, 2}, "b": b"x", "size": (2, 3)},
]


def _read(path: Path, stored: Any) -> Any:
    """A tensor of a file; other values as they are."""
    if not isinstance(stored, StoredTensor):
        return stored
    box = full_box(stored.info.shape)
    made = torch.empty(box.sizes, dtype=torch_dtype(stored.info.dtype))
    if box.numel:
        with ExtentReader() as reader:
            reader.read([Extent(box, path, stored.start, stored.strides)], box, made)
    return made


@pytest.mark.parametrize("tree", _TREES, ids=["nested", "views", "dtypes", "values"])
def test_a_torch_file_is_read_as_torch_reads_it(tmp_path: Path, tree: Any) -> None:
    torch.save(tree, tmp_path / "x.pt")
    found = replaced_in(read_tree(tmp_path / "x.pt"), lambda each: _read(tmp_path / "x.pt", each))
    assert str(found) == str(torch.load(tmp_path / "x.pt", weights_only=True))


def test_what_is_written_in_chunks_is_what_torch_would_write(tmp_path: Path) -> None:
    tensors = {
        "w": torch.randn(50, 3),
        "n": torch.arange(7),
        "none": torch.empty(0, 2),
        "scalar": torch.tensor(0.5, dtype=torch.float64),
    }
    holes = {
        name: Placeholder(name, TensorInfo(dtype_name(t.dtype), tuple(t.shape)))
        for name, t in tensors.items()
    }
    tree = {"model": {**holes, "tied": holes["w"]}, "step": 3, "list": [holes["n"], (1, "x")]}

    def chunks(name: str) -> Any:
        data = tensors[name].numpy().tobytes()
        return (memoryview(data[i : i + 10]) for i in range(0, len(data), 10))

    write_tree(tmp_path / "x.pt", tree, chunks)
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None, "checksums other programs look at"
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["step"] == 3
    assert found["list"][1] == (1, "x")
    for name, tensor in tensors.items():
        assert torch.equal(found["model"][name], tensor)
    assert found["model"]["tied"].data_ptr() == found["model"]["w"].data_ptr()


def test_the_model_of_a_torch_file_is_found_under_its_usual_names(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    for key in ("model", "state_dict", "model_state_dict", None):
        torch.save({key: state, "epoch": 3} if key else state, tmp_path / "x.pt")
        with TorchSource(tmp_path / "x.pt") as opened:
            assert model_tensors(opened) == {"w": ("model", "w")}
    for other in ([torch.ones(1)], {"epoch": 3}, {1: torch.ones(1)}):
        torch.save(other, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match=r"expected a (state dict|name)"):
            TorchSource(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "name",
    [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00004.safetensors",
    ],
)
def test_parts_that_torch_writes_on_each_rank_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"found {name}, one of the parts.*consolidation"):
        open_source(tmp_path)
