"""Manifests: any comes back as it was written, and no damage to one goes unnoticed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.boxes import full_box
from shardwise.base.units import version_of
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk import manifest as module
from shardwise.checkpoint.disk.entries import (
    DTYPE_NAMES,
    Manifest,
    ModelFacts,
    StoredPiece,
    TensorEntry,
    Value,
    itemsize,
    shard_name,
)
from shardwise.checkpoint.disk.manifest import (
    NAME,
    read_manifest,
    write_manifest,
    writer_versions,
)
from tests.checkpoint.small import read_json, write_json
from tests.checkpoint.tilings import QUICK, shapes, tilings

_TEXT = st.text(min_size=1, max_size=8).filter(str.isprintable)


@st.composite
def _manifests(draw: Any) -> Manifest:
    """Tensors that are cut and spread over files in any way, and values beside them."""
    block, world_size = draw(st.sampled_from([16, 64, 1024])), draw(st.integers(1, 4))
    sizes = {shard_name(rank, world_size): 100 for rank in range(world_size)}
    names = draw(st.lists(_TEXT.map(lambda x: x.replace(".", "_")), unique=True, max_size=6))
    tensors, values = [], []
    for i, name in enumerate(names):
        if i % 3 == 2:
            value = draw(st.none() | st.integers() | st.lists(st.floats(allow_nan=False)))
            values.append(Value(("extra", name), value))
            continue
        shape, dtype = draw(shapes), draw(st.sampled_from(sorted(DTYPE_NAMES)))
        pieces = []
        for box in draw(tilings(shape)):
            nbytes = box.numel * itemsize(dtype)
            file = draw(st.sampled_from(sorted(sizes)))
            checksums = tuple(f"{j:016x}" for j in range(math.ceil(nbytes / block)))
            pieces.append(StoredPiece(file, sizes[file], box, checksums))
            sizes[file] += nbytes
        path = ("model", name) if i % 3 == 0 else ("optimizer", "state", name, i)
        tensors.append(
            TensorEntry(path, shape, dtype, draw(_TEXT), f"shard={world_size}", tuple(pieces))
        )
    facts = ModelFacts(draw(_TEXT), {}, draw(st.dictionaries(_TEXT, st.integers())))
    return Manifest(
        tuple(tensors), tuple(values), sizes, block, world_size, draw(_TEXT), facts, {"torch": "2"}
    )


@settings(QUICK, max_examples=30)
@given(manifest=_manifests())
def test_a_manifest_comes_back_as_it_was(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / NAME).unlink(missing_ok=True)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def _write(folder: Path) -> Manifest:
    """A manifest with a tied pair of tensors."""
    file = shard_name(0, 1)
    entries = [
        TensorEntry(
            ("model", name),
            (2, 3),
            "F32",
            "",
            "",
            (StoredPiece(file, at, full_box((2, 3)), ("0" * 16,)),),
        )
        for name, at in (("embed", 64), ("head", 88))
    ]
    facts = ModelFacts("full", {"head": "embed"}, {"model_type": "llama"})
    manifest = Manifest(tuple(entries), (), {file: 112}, 64, 1, "", facts, writer_versions())
    write_manifest(folder, manifest)
    return manifest


def test_it_has_a_line_for_each_tensor_and_one_for_its_own_checksum(tmp_path: Path) -> None:
    manifest = _write(tmp_path)
    lines = (tmp_path / NAME).read_text().splitlines()
    assert sum('"path"' in line for line in lines) == len(manifest.tensors)
    assert lines[-2].startswith('"of_all_above": ')
    assert set(json.loads("\n".join(lines))["versions"]) == {"shardwise", "torch"}


def test_no_changed_byte_goes_unnoticed(tmp_path: Path) -> None:
    _write(tmp_path)
    data = (tmp_path / NAME).read_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        (tmp_path / NAME).write_bytes(damaged)
        try:
            found = read_manifest(tmp_path)
        except CheckpointError:
            continue
        (tmp_path / NAME).write_bytes(data)
        assert found == read_manifest(tmp_path), f"byte {at} only changed white space"


def test_who_edits_it_deletes_its_checksum(tmp_path: Path) -> None:
    manifest = _write(tmp_path)
    text = (tmp_path / NAME).read_text()
    (tmp_path / NAME).write_text(text.replace('"full"', '"none"'))
    with pytest.raises(CheckpointError, match="is damaged: its contents do not match its checksum"):
        read_manifest(tmp_path)
    content = read_json(tmp_path)
    write_json(tmp_path, content)
    found = read_manifest(tmp_path)
    assert (found.facts.strategy, found.tensors) == ("none", manifest.tensors)


def test_it_is_written_once_and_only_with_plain_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = _write(tmp_path)
    with pytest.raises(FileExistsError):
        write_manifest(tmp_path, manifest)
    other = Manifest((), (Value(("extra", "x"), object()),), {}, 16, 1)
    with pytest.raises(TypeError, match=r"extra\.x: found builtins\.object"):
        write_manifest(tmp_path / "elsewhere", other)

    assert version_of("no-package-of-this-name") is None
    monkeypatch.setattr(module, "version_of", lambda name: None)
    assert writer_versions() == {"shardwise": "unknown", "torch": "unknown"}
