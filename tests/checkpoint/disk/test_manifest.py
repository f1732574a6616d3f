"""Manifests: any comes back as it was written, and no damage to one goes unnoticed."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.boxes import Box, full_box
from shardwise.base.units import version_of
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk import manifest as module
from shardwise.checkpoint.disk.columns import Pieces, files_of, parts_in
from shardwise.checkpoint.disk.entries import (
    DTYPE_NAMES,
    MANIFEST,
    Manifest,
    ModelFacts,
    StoredPiece,
    TensorEntry,
    Value,
    itemsize,
    shard_name,
)
from shardwise.checkpoint.disk.manifest import (
    MANY,
    in_files,
    read_manifest,
    write_manifest,
    writer_versions,
)
from tests.checkpoint.small import read_json, write_json
from tests.checkpoint.tilings import QUICK, boxes_in, shapes, tilings

_PRINTABLE = st.characters(exclude_categories=("C", "Z"))
_TEXT = st.text(_PRINTABLE, min_size=1, max_size=8)


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


@pytest.mark.parametrize("many", [MANY, 1, 2], ids="many {}".format)
@settings(QUICK, max_examples=30)
@given(manifest=_manifests())
def test_a_manifest_comes_back_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int, manifest: Manifest
) -> None:
    """However many pieces a tensor has when they are written in columns."""
    monkeypatch.setattr(module, "MANY", many)
    (tmp_path / MANIFEST).unlink(missing_ok=True)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    in_columns = any(len(entry.pieces) >= many for entry in manifest.tensors)
    assert read_json(tmp_path)["version"] == (2 if in_columns else 1)


@settings(QUICK, max_examples=30)
@given(manifest=_manifests())
def test_pieces_are_found_by_file(tmp_path: Path, manifest: Manifest) -> None:
    found = [(piece.file, piece.offset, entry.fqn) for piece, entry in in_files(manifest)]
    assert found == sorted(
        (piece.file, piece.offset, entry.fqn)
        for entry in manifest.tensors
        for piece in entry.pieces
    )
    assert files_of(entry.pieces for entry in manifest.tensors) == {file for file, _, _ in found}


@QUICK
@given(shape=shapes, data=st.data())
def test_columns_give_the_pieces_and_find_those_of_a_box(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    made = []
    for at, box in enumerate(data.draw(tilings(shape))):
        file, count = data.draw(st.sampled_from("bca")), data.draw(st.integers(0, 3))
        made.append(StoredPiece(file, 8 * at, box, tuple(f"{each:016x}" for each in range(count))))
    columns, box = Pieces.of(made), data.draw(boxes_in(shape))
    assert [columns[at] for at in range(-len(made), len(made))] == 2 * made
    assert columns == Pieces.of(columns, ("c", "b", "a")) == made
    assert columns[1:] == tuple(made[1:])
    assert columns.first == min(
        (piece.file, piece.offset) for piece in made if piece.file == columns.files[0]
    )
    expected = [(piece, piece.box.intersection(box)) for piece in made]
    assert list(parts_in(columns, box)) == [each for each in expected if each[1] is not None]
    assert not list(parts_in(columns, Box(box.offsets, (0,) * len(shape)))) or not shape


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
    lines = (tmp_path / MANIFEST).read_text().splitlines()
    assert sum('"path"' in line for line in lines) == len(manifest.tensors)
    assert lines[-2].startswith('"of_all_above": ')
    assert set(json.loads("\n".join(lines))["versions"]) == {"shardwise", "torch"}


def _rows(ranks: int = MANY) -> Manifest:
    """A matrix, of which each rank has written two rows in three blocks."""
    files = {shard_name(rank, ranks): 100 + 8 * rank + 40 for rank in range(ranks)}
    pieces = [
        StoredPiece(
            name,
            100 + 8 * rank,
            Box((2 * rank, 0), (2, 5)),
            tuple(f"{3 * rank + block:016x}" for block in range(3)),
        )
        for rank, name in enumerate(files)
    ]
    entry = TensorEntry(("model", "w"), (2 * ranks, 5), "F32", "Shard(0)", "", tuple(pieces))
    return Manifest((entry,), (), files, 16, ranks)


def test_what_many_ranks_have_written_takes_a_short_line(tmp_path: Path) -> None:
    write_manifest(tmp_path, _rows())
    (line,) = (each for each in (tmp_path / MANIFEST).read_text().splitlines() if '"path"' in each)
    pieces = json.loads(line)["pieces"]
    assert (pieces["count"], pieces["sizes"], pieces["offsets"][1]) == (MANY, [2, 5], 0)
    assert len(line) < 3 * 8 * MANY * 4 / 3 + 600


def test_pieces_that_an_earlier_release_wrote_one_by_one_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MANY", 10**9)
    write_manifest(tmp_path, _rows(3 * MANY))
    assert read_json(tmp_path)["version"] == 1
    assert read_manifest(tmp_path) == _rows(3 * MANY)


Columns = dict[str, Any]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _column(*numbers: int) -> str:
    return _text(zlib.compress(np.diff(np.array(numbers, np.int64), prepend=0).tobytes()))


def _set(name: str, *values: Any) -> Callable[[Columns], None]:
    """Set a field, or of a column the first numbers."""

    def change(columns: Columns) -> None:
        place: Any = columns
        at: Any = name
        if name[-1].isdigit():
            place, at = columns[name[:-1]], int(name[-1])
        if all(type(value) is int for value in values) and isinstance(place[at], str):
            known = np.cumsum(np.frombuffer(zlib.decompress(base64.b64decode(place[at])), np.int64))
            place[at] = _column(*values, *known[len(values) :].tolist())
        else:
            (place[at],) = values

    return change


_DELTAS = np.ones(MANY, np.int64).tobytes()
HOSTILE: dict[str, tuple[Callable[[Columns], object], str]] = {
    "no count": (lambda c: c.pop("count"), "has no 'count'"),
    "a count of nothing": (_set("count", 0), "'count'"),
    "a count without checksums": (_set("count", 3 * MANY + 1), f"1 to {3 * MANY}"),
    "a larger count": (_set("count", MANY + 1), r"'offsets': found '512 bytes', expected 520"),
    "a smaller count": (_set("count", MANY - 1), r"'offsets': found .* expected 504"),
    "a bomb": (_set("offset", _text(zlib.compress(bytes(10**8)))), "'offset': found '513 bytes'"),
    "more after a column": (
        _set("offset", _text(zlib.compress(_DELTAS) + b"x")),
        "'offset': found '512 bytes', expected 512 of 64 numbers, and no more",
    ),
    "a column cut off": (_set("offset", _text(zlib.compress(_DELTAS)[:-2])), "'offset'"),
    "a column that is not packed": (_set("offset", _text(_DELTAS)), "expected compressed numbers"),
    "a column that is no text": (_set("offset", [1]), "'offset'"),
    "a column that is true": (_set("file", True), "'file'"),
    "no base64": (_set("offset", "a*=="), "expected base64"),
    "letters of others": (_set("checksums", "\u00e9"), "expected base64"),
    "checksums that are a number": (lambda c: c.update(checksums=5), "expected base64"),
    "a negative number": (_set("offset", -8), "found -8, expected integers from 0"),
    "a sum beyond 64 bits": (
        _set("offset", _text(zlib.compress(np.full(MANY, 2**62, np.int64).tobytes()))),
        "expected integers from 0",
    ),
    "a file that is not listed": (_set("file", MANY), "'file': found 64, expected .* 0 to 63"),
    "a file before the first": (_set("file", -1), "'file': found -1"),
    "one file for all": (
        lambda c: c.update(file=0),
        r"piece 6, 'offset': found 'bytes 148 \.\. 188', expected .* 140 of",
    ),
    "beyond the file": (_set("offset", 101), r"piece 0: found 'bytes 101 \.\. 141'"),
    "far beyond the file": (_set("offset", 2**62), "piece 0, 'offset'"),
    "an overlap": (_set("offsets0", 0, 1), "gaps or overlaps"),
    "a gap": (lambda c: (_set("offsets0", 1)(c), _set("sizes0", 2)(c)), "gaps or overlaps"),
    "outside": (
        _set("offsets1", 1),
        r"piece 0: found '\(0, 1\) \+ \(2, 5\)', expected a non-empty",
    ),
    "far outside": (_set("sizes0", 2**62), "piece 0: found .* expected a non-empty part"),
    "an end beyond 64 bits": (
        lambda c: (_set("offsets0", 2**62)(c), _set("sizes0", 2**62)(c)),
        r"piece \d+: found .* expected a non-empty part",
    ),
    "all of them with an end beyond 64 bits": (
        lambda c: [c[name].__setitem__(0, 2**62) for name in ("offsets", "sizes")],
        "piece 0: found .* expected a non-empty part",
    ),
    "empty": (_set("sizes0", 0), "expected a non-empty part"),
    "a dimension less": (lambda c: c["sizes"].pop(), "2 offsets and 1 sizes"),
    "a dimension more": (lambda c: c["sizes"].append(1), "'sizes': found '3 items'"),
    "a checksum less": (_set("checksums", _text(bytes(24 * MANY - 8))), "'checksums': found '1528"),
    "a checksum more": (_set("checksums", _text(bytes(24 * MANY + 8))), "'checksums': found '1544"),
    "half a checksum": (_set("checksums", _text(bytes(24 * MANY - 4))), "'checksums': found '1532"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_columns_are_refused_by_the_name_of_their_tensor(tmp_path: Path, what: str) -> None:
    write_manifest(tmp_path, _rows())
    content = read_json(tmp_path)
    change, complaint = HOSTILE[what]
    change(content["tensors"][0]["pieces"])
    write_json(tmp_path, content)
    with pytest.raises(CheckpointError, match=rf"tensor 0 \(model\.w\).*{complaint}") as caught:
        read_manifest(tmp_path)
    assert len(str(caught.value)) < 400


def test_columns_that_share_bytes_of_a_file_are_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, _rows())
    content = read_json(tmp_path)
    content["tensors"] = [content["tensors"][0] | {"path": ["model", name]} for name in "ab"]
    write_json(tmp_path, content)
    with pytest.raises(CheckpointError, match=r"model\.a and model\.b overlap in shard-00000"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(("ranks", "kind"), [(MANY - 1, tuple), (MANY, Pieces)])
def test_only_many_pieces_are_columns_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, kind: type
) -> None:
    """For few, array operations take longer than what they replace."""
    monkeypatch.setattr(module, "MANY", 10**9)
    write_manifest(tmp_path, _rows(ranks))
    monkeypatch.undo()
    (entry,) = read_manifest(tmp_path).tensors
    assert type(entry.pieces) is kind
    assert entry.pieces == _rows(ranks).tensors[0].pieces


def test_an_overlap_is_found_without_making_the_pieces_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making one takes a hundred times as long as reading it."""
    write_manifest(tmp_path, _rows())
    content = read_json(tmp_path)
    last = content["tensors"][0] | {"path": ["model", "last"], "shape": [2, 5]}
    known = _rows().tensors[0].pieces[-1]
    piece = {"file": known.file, "offset": known.offset, "offsets": [0, 0]}
    last["pieces"] = [piece | {"sizes": [2, 5], "checksums": "0" * 48}]
    content["tensors"].append(last)
    write_json(tmp_path, content)
    made, original = [], Pieces.__getitem__
    monkeypatch.setattr(Pieces, "__getitem__", lambda *at: made.append(at) or original(*at))
    with pytest.raises(CheckpointError, match=r"model\.w and model\.last overlap in shard-00063"):
        read_manifest(tmp_path)
    assert len(made) == 1


def test_columns_are_not_of_the_first_version(tmp_path: Path) -> None:
    write_manifest(tmp_path, _rows())
    write_json(tmp_path, read_json(tmp_path) | {"version": 1})
    with pytest.raises(CheckpointError, match="'pieces': found dict of 6, expected a list"):
        read_manifest(tmp_path)


def test_no_changed_byte_goes_unnoticed(tmp_path: Path) -> None:
    _write(tmp_path)
    data = (tmp_path / MANIFEST).read_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        (tmp_path / MANIFEST).write_bytes(damaged)
        try:
            found = read_manifest(tmp_path)
        except CheckpointError:
            continue
        (tmp_path / MANIFEST).write_bytes(data)
        assert found == read_manifest(tmp_path), f"byte {at} only changed white space"


def test_who_edits_it_deletes_its_checksum(tmp_path: Path) -> None:
    manifest = _write(tmp_path)
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text.replace('"full"', '"none"'))
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
