"""What is read of a store: what is needed, in few requests, and nothing that is not as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from shardwise.base.boxes import Box
from shardwise.base.errors import StoreError
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk import store_reads
from shardwise.checkpoint.disk.entries import MANIFEST
from shardwise.checkpoint.disk.manifest import MAX_BYTES, read_manifest
from shardwise.checkpoint.disk.pieces import PieceReader, read_box
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_path import StorePath
from shardwise.checkpoint.disk.store_reads import StoreReads
from tests.checkpoint.small import make, same

pytest.importorskip("obstore", reason="needs obstore: install .[test]")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """All ranges that are read."""
    read, found = StorePath.read, []

    def note(self: StorePath, start: int, end: int, *tag: Any) -> tuple[memoryview, int]:
        found.append((self.name, start, end))
        return read(self, start, end, *tag)

    monkeypatch.setattr(StorePath, "read", note)
    return found


def store_of(folder: Path) -> StorePath:
    place = place_of(f"file://{folder}")
    assert isinstance(place, StorePath)
    return place


@pytest.mark.parametrize("seed", range(20))
def test_any_ranges_in_any_order_are_what_the_file_has(
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[str, int, int]],
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(store_reads, "_PART", draw.choice([16, 100, 1000]))
    monkeypatch.setattr(store_reads, "_HELD", draw.choice([16, 300, 5000]))
    monkeypatch.setattr(store_reads, "_GAP", draw.choice([0, 50]))
    data = {name: draw.randbytes(3000) for name in "ab"}
    for name, each in data.items():
        (tmp_path / name).write_bytes(each)
    ranges = [
        (draw.choice("ab"), start, min(3000, start + draw.choice([1, 20, 400])))
        for start in (draw.randrange(3000) for _ in range(30))
    ]
    with StoreReads(store_of(tmp_path), {}) as reads:
        for each in draw.sample(ranges, 20):
            reads.want(*each)
        for name, start, end in draw.sample(ranges, 30):
            found = bytearray(end - start)
            reads.read(name, memoryview(found), start)
            assert found == data[name][start:end]
            assert reads._held == sum(each.end - each.start for each in reads._asked)
            assert reads._held <= max(store_reads._HELD, store_reads._PART)


def test_what_is_expected_is_read_once_and_nothing_else(
    tmp_path: Path, asked: list[tuple[str, int, int]]
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(18)))
    checkpoint.save(store_of(tmp_path) / "a", model)
    manifest = read_manifest(tmp_path / "a")
    [(shard, size)] = manifest.files.items()
    loaded = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(18)))
    asked.clear()
    checkpoint.load(store_of(tmp_path) / "a", loaded)
    reads = sorted((start, end) for name, start, end in asked if name == shard)[1:]  # no header
    assert len(reads) == 4  # of 36 tensors: of the small ones, and of 18 MB in parts of 8 MiB
    assert reads[-1][1] == size
    assert sum(end - start for start, end in reads) == sum(p.nbytes for p in model.parameters())

    asked.clear()
    entry = next(each for each in manifest.tensors if each.fqn == "model.5.weight")
    into = torch.empty(10, 500)
    with PieceReader(store_of(tmp_path) / "a", manifest) as reader:
        read_box(reader, entry, Box((100, 0), (10, 500)), into)
    assert torch.equal(into, model[5].weight.detach()[100:110])
    assert sum(end - start for _, start, end in asked[1:]) <= manifest.block


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, optimizer = make()
    checkpoint.save(store_of(tmp_path) / "a", model, optimizer)
    return tmp_path / "a"


def shard_of(folder: Path) -> Path:
    [shard] = folder.glob("*.safetensors")
    return shard


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        fields = json.loads((folder / MANIFEST).read_text())
        del fields["of_all_above"]
        change(fields)
        (folder / MANIFEST).write_text(json.dumps(fields))

    return apply


def _flip(folder: Path) -> None:
    data = bytearray(shard_of(folder).read_bytes())
    data[-3] ^= 1
    shard_of(folder).write_bytes(data)


def _rename(name: str) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        [size] = fields["files"].values()
        fields["files"] = {name: size}
        for each in fields["tensors"]:
            for piece in each["pieces"]:
                piece["file"] = name

    return change


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda folder: shard_of(folder).unlink(), r"shard-.*safetensors: is missing"),
    "cut": (
        lambda folder: shard_of(folder).write_bytes(shard_of(folder).read_bytes()[:-1]),
        r"shard-.*: found [\d,]+ bytes, expected",
    ),
    "longer": (
        lambda folder: shard_of(folder).write_bytes(shard_of(folder).read_bytes() + b"x"),
        r"shard-.*: found [\d,]+ bytes, expected",
    ),
    "another": (_flip, r"shard-.*: is damaged: bytes .* have the checksum"),
    "header": (
        lambda folder: shard_of(folder).write_bytes(
            b"\xff" * 8 + shard_of(folder).read_bytes()[8:]
        ),
        "header, length",
    ),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), r"manifest\.json: is missing"),
    "no JSON": (lambda folder: (folder / MANIFEST).write_bytes(b"\0" * 100), "not valid JSON"),
    "nothing": (lambda folder: (folder / MANIFEST).write_bytes(b""), "not valid JSON"),
    "a bomb": (lambda folder: (folder / MANIFEST).write_bytes(b"[" * 10**7), "in memory"),
    "elsewhere": (_edit(_rename("../b/shard-00000-of-00001.safetensors")), "shard-RRRRR-of-NNNNN"),
    "another nonce": (
        _edit(_rename("shard-00000-of-00001-0123456789abcdeg.safetensors")),
        "shard-RRRRR-of-NNNNN",
    ),
    "sizes": (
        _edit(lambda fields: fields["files"].update(dict.fromkeys(fields["files"], 2**60))),
        r"found [\d,]+ bytes, expected 1,152,921,504,606,846,976",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_or_hostile_names_itself(kind: str, folder: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(folder)
    model, optimizer = make(seed=1)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(store_of(folder), model, optimizer)
    if kind not in ("another", "header"):
        assert not checkpoint.is_complete(store_of(folder))
        assert checkpoint.latest(store_of(folder.parent)) is None


def test_a_manifest_that_is_too_large_is_not_read(
    folder: Path, asked: list[tuple[str, int, int]]
) -> None:
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match="at most 268,435,456"):
        checkpoint.load(store_of(folder), make()[0])
    assert asked == []


def test_a_list_with_odd_names_is_read_for_what_it_is(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-x", "step-00000002 x", "a b", "step-00000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(b"")
    assert checkpoint.steps(store_of(tmp_path)) == []
    assert checkpoint.latest(store_of(tmp_path)) is None
    with pytest.raises(CheckpointError, match="found no checkpoint"):
        checkpoint.load_weights(store_of(tmp_path), make()[0])


@pytest.fixture
def broken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store that ends to answer in the middle of a load."""
    read = StorePath.read

    def fail(self: StorePath, start: int, end: int, *tag: Any) -> tuple[memoryview, int]:
        if self.name != MANIFEST and start > 0:
            raise StoreError(f"{self}: cannot be read (503 Slow Down)")
        return read(self, start, end, *tag)

    monkeypatch.setattr(StorePath, "read", fail)
    return


@pytest.mark.usefixtures("broken")
def test_a_store_that_does_not_answer_is_named_with_the_rank(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 0: file:///.*/a/shard-.*\(503 Slow Down\)"):
        checkpoint.load(store_of(folder), *make(seed=1))


def test_small_tensors_of_safetensors_side_by_side_are_read_with_one_request(
    tmp_path: Path, asked: list[tuple[str, int, int]]
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(18)))
    checkpoint.save_hf(str(store_of(tmp_path) / "hf"), model)
    loaded = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(18)))
    asked.clear()
    checkpoint.load_weights(str(store_of(tmp_path) / "hf"), loaded)
    reads = sorted((start, end) for _, start, end in asked)[1:]  # no header
    assert len(reads) == 3  # of 36 tensors and 18 MB, in parts of 8 MiB
    assert sum(end - start for start, end in reads) == sum(p.nbytes for p in model.parameters())
    assert same(model, loaded)
