"""Entries: names and sizes of dtypes, names of pieces, and what reading them imports."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load, save

from shardwise.base.boxes import Box, full_box
from shardwise.checkpoint.disk.entries import (
    DTYPE_NAMES,
    Manifest,
    StoredPiece,
    TensorEntry,
    TensorInfo,
    dotted,
    dtype_name,
    itemsize,
    shard_name,
    torch_dtype,
)


@pytest.mark.parametrize("name", sorted(DTYPE_NAMES))
def test_dtypes_have_the_names_and_sizes_of_the_safetensors_library(name: str) -> None:
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name
    assert itemsize(name) == dtype.itemsize
    if dtype != torch.float8_e8m0fnu:  # which the library writes since its release 0.6
        written = save({"x": torch.zeros(2, dtype=dtype)})
        assert f'"dtype":"{name}"'.encode() in written
        assert load(written)["x"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.qint8, torch.complex128, torch.complex32])
def test_a_dtype_that_the_format_lacks_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"found dtype {str(dtype)[6:]}, expected one of"):
        dtype_name(dtype)


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (7,)])
def test_the_bytes_of_a_tensor_follow_from_its_shape(shape: tuple[int, ...]) -> None:
    info = TensorInfo("F32", shape)
    assert (info.numel, info.nbytes) == (math.prod(shape), 4 * math.prod(shape))
    assert info.nbytes == torch.empty(shape).nbytes


def _entry(*path: str | int, shape: tuple[int, ...] = (4, 6)) -> TensorEntry:
    return TensorEntry(path, shape, "F32", "Shard(0)", "shard=2", ())


def test_an_entry_is_named_by_its_path() -> None:
    entry = _entry("optimizer", "state", "layers.0.weight", "exp_avg")
    assert entry.fqn == "optimizer.state.layers.0.weight.exp_avg"
    assert (entry.section, entry.name) == ("optimizer", "state.layers.0.weight.exp_avg")
    assert entry.info == TensorInfo("F32", (4, 6))
    assert entry.nbytes == 96
    assert dotted(("extra", "rows", 3)) == "extra.rows.3"


def test_a_piece_is_named_by_its_indices_unless_it_is_the_full_tensor() -> None:
    entry = _entry("model", "w")
    assert entry.key(StoredPiece("f", 0, full_box((4, 6)), ())) == "model.w"
    assert entry.key(StoredPiece("f", 0, Box((2, 0), (2, 6)), ())) == "model.w[2:4,0:6]"
    assert _entry("model", "s", shape=()).key(StoredPiece("f", 0, Box((), ()), ())) == "model.s"


def test_sections_and_sizes_of_a_manifest() -> None:
    entries = (_entry("model", "a"), _entry("extra", "b"), _entry("model", "c"))
    manifest = Manifest(entries, (), {shard_name(0, 2): 10, shard_name(1, 2): 5}, 16, 2)
    assert [entry.name for entry in manifest.section("model")] == ["a", "c"]
    assert manifest.section("optimizer") == []
    assert manifest.nbytes == 15
    assert list(manifest.files) == [f"shard-0000{i}-of-00002.safetensors" for i in (0, 1)]


def test_reading_a_manifest_does_not_import_torch() -> None:
    """``shardwise checkpoint list`` starts at once."""
    code = (
        "import sys, shardwise.checkpoint.disk.manifest, shardwise.checkpoint.disk.commit; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
