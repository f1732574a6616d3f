"""``shardwise checkpoint`` on URLs: what it shows, reads and writes in an object store."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from shardwise.base.errors import CheckpointError, StoreError
from shardwise.checkpoint.disk import beside, commit, store_commit
from shardwise.checkpoint.disk.entries import MANIFEST, shard_name
from shardwise.checkpoint.disk.filenames import INDEX, is_of_attempt
from shardwise.checkpoint.disk.place import Place, place_of
from shardwise.checkpoint.disk.store_path import StorePath
from shardwise.checkpoint.formats.detect import Format, format_of, open_source
from shardwise.checkpoint.formats.source import Source
from shardwise.checkpoint.tools.convert import consolidate, convert
from shardwise.checkpoint.tools.diff import differences
from shardwise.checkpoint.tools.survey import (
    UNFINISHED,
    delete_leftovers,
    list_checkpoints,
    list_leftovers,
    newer_incomplete,
    verify,
)
from tests.checkpoint.small import make, same
from tests.cli.shell import call, refused

obstore = pytest.importorskip("obstore", reason="needs obstore: install .[test]")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def on_disk(tmp_path: Path) -> StorePath:
    """A folder in a store that outlives a command."""
    place = place_of(f"file://{tmp_path}/bucket")
    assert isinstance(place, StorePath)
    return place


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> StorePath:
    """A folder in a store, in which there is nothing."""
    place = place_of(f"{request.param}://{tmp_path}/bucket")
    assert isinstance(place, StorePath)
    return place


def save(folder: Any, step: int = 1) -> torch.nn.Module:
    model, optimizer = make(seed=step)
    model.note = "saved"
    checkpoint.save(folder, model, optimizer, {"step": step})
    return model


def save_run(root: StorePath) -> StorePath:
    run = root / "run"
    for step in (10, 20):
        save(checkpoint.step_folder(run / "checkpoints", step), step)
    assert (run / "run.json").create(b"{}")
    return run


def shard_of(folder: StorePath) -> StorePath:
    return next(folder / name for name in folder.below() if name.startswith("shard"))


def put(path: StorePath, data: bytes) -> None:
    path.write([data], len(data))


def get(path: StorePath) -> bytes:
    return path.read_small(1 << 20)


def test_a_source_is_not_replaced_under_another_name(on_disk: StorePath, tmp_path: Path) -> None:
    """A model of Hugging Face would be left of a checkpoint with an optimizer."""
    folder = tmp_path / "bucket" / "step"
    save(folder)
    before = sorted(folder.iterdir())
    for source, target in ((folder, on_disk / "step"), (on_disk / "step", folder)):
        with pytest.raises(ValueError, match="is, or contains, the checkpoint that is read"):
            convert(source, target, Format.HF, force=True)
    assert sorted(folder.iterdir()) == before
    assert beside.contains(place_of("s3a://b/run"), place_of("s3://b/run/step"))
    assert not beside.contains(place_of("s3://b/run"), place_of("s3a://b/run2"))


def read_tensors(source: Source) -> None:
    for path in source.tensors:
        source.full(path)


def read_all(place: Place) -> None:
    with open_source(place) as source:
        read_tensors(source)


def equal(one: Place, other: Place) -> bool:
    with open_source(one) as a, open_source(other) as b:
        return not list(differences(a, b))


def shown(place: Place) -> list[tuple[str, bool]]:
    return [(each.path.name, not each.problem) for each in list_checkpoints(place)]


def stored(root: StorePath) -> set[str]:
    return {"SHARD" if is_of_attempt(each) else each for each in root.below()}


# -- what is there ---------------------------------------------------------------------------------


def test_a_run_and_its_folder_of_checkpoints_and_one_of_them_are_listed(root: StorePath) -> None:
    run = save_run(root)
    both = [("step-00000010", True), ("step-00000020", True)]
    assert shown(run) == shown(run / "checkpoints") == both
    (alone,) = list_checkpoints(run / "checkpoints" / "step-00000010")
    assert (alone.step, alone.world_size, alone.format) == (10, 1, Format.SHARDWISE)
    files = (run / "checkpoints" / "step-00000010").below()
    assert alone.nbytes == sum(each.size for each in files.values())


def test_a_step_without_a_checkpoint_is_not_complete(root: StorePath, tmp_path: Path) -> None:
    run = save_run(root)
    put(run / "checkpoints" / "step-00000030" / "notes.txt", b"mine")
    listed = {each.path.name: each.problem for each in list_checkpoints(run)}
    assert listed == {
        "step-00000010": "",
        "step-00000020": "",
        "step-00000030": "has no manifest.json",
    }
    store_commit.delete_stored(run / "checkpoints" / "step-00000010")  # a disk keeps the folder
    assert [name for name, _ in shown(run)] == ["step-00000020", "step-00000030"]


@pytest.mark.parametrize("name", ["..", ".", "x?y", "x#y"])
def test_a_mark_of_no_checkpoint_is_in_nobodys_way(root: StorePath, name: str) -> None:
    run = save_run(root)
    key = f"{run._key}/checkpoints/.partial/{name}.6f1c09d26f1c09d2"
    obstore.put(run._store(), key, b"x")
    assert list_leftovers(run) == []
    store_commit.clean(run / "checkpoints", float("inf"))
    assert len(shown(run)) == 2


def test_what_is_being_written_and_what_is_damaged_are_told_apart(root: StorePath) -> None:
    run = save_run(root)
    steps = run / "checkpoints"
    name = "shard-00000-of-00001-6f1c09d26f1c09d2.safetensors"
    put(steps / "step-00000030" / name, b"half")
    save(steps / "step-00000040")
    shard_of(steps / "step-00000040").remove()
    problems = {each.step: each.problem for each in list_checkpoints(run)}
    assert problems[10] == problems[20] == ""
    assert problems[30] == UNFINISHED
    assert problems[40].endswith("is missing")
    newest = checkpoint.latest(steps)
    assert newest == steps / "step-00000020"
    assert [each.step for each in newer_incomplete(run, newest)] == [40]


def test_the_commands_show_what_they_show_of_folders(root: StorePath, capsys: Capture) -> None:
    run = save_run(root)
    assert call("checkpoint", "ls", str(run), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["path"] for each in found] == [
        f"{run}/checkpoints/step-000000{step}" for step in (10, 20)
    ]
    assert call("checkpoint", "show", str(run)) == 0
    assert f"{run}/checkpoints/step-00000020" in capsys.readouterr().out.replace("\n", "")
    assert call("checkpoint", "verify", str(run)) == 0
    assert "every checksum is right" in capsys.readouterr().out
    assert call("checkpoint", "diff", str(run), f"{run}/checkpoints/step-00000010") == 1
    assert "extra.step" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_nothing_there_is_one_line(root: StorePath, command: str, capsys: Capture) -> None:
    assert call("checkpoint", command, str(root / "none")) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {root}/none: found n") and error.count("\n") == 1


def test_a_url_of_no_store_and_one_with_a_secret_are_refused(capsys: Capture) -> None:
    assert "SRC: found ftp://host/a, expected" in refused(
        capsys, "checkpoint", "show", "ftp://host/a"
    )
    message = refused(capsys, "checkpoint", "ls", "s3://key:not-to-be-shown@bucket/run")
    assert "not-to-be-shown" not in message and message.startswith("error: DIR: found a URL")


def test_a_store_that_does_not_answer_is_one_line(
    root: StorePath, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run = save_run(root)

    def fail(self: StorePath, *_: Any, **__: Any) -> Any:
        raise StoreError(f"{self}: cannot be read (403 Forbidden)")

    for name in ("listed", "_get", "find"):
        with monkeypatch.context() as patch:
            patch.setattr(StorePath, name, fail)
            for command in ("ls", "show", "verify"):
                if (name, command) not in (("find", "ls"), ("listed", "show")):
                    assert call("checkpoint", command, str(run)) == 1, (name, command)
                    error = capsys.readouterr().err
                    assert "(403 Forbidden)" in error and error.count("\n") == 1


# -- what is read ----------------------------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()
    for name in ("listed", "below", "find", "_get"):
        original = getattr(StorePath, name)

        def count(
            self: StorePath, *more: Any, _name: str = name, _do: Any = original, **options: Any
        ) -> Any:
            counted[_name] += 1
            if options:
                counted["bytes"] += more[0]
            return _do(self, *more, **options)

        monkeypatch.setattr(StorePath, name, count)
    return counted


def test_a_manifest_is_read_with_one_request(root: StorePath, requests: Counter[str]) -> None:
    save(root / "a")
    requests.clear()
    with open_source(root / "a"):
        assert requests == {"find": 1, "_get": 1}


def test_a_list_reads_manifests_alone(root: StorePath, requests: Counter[str]) -> None:
    run = save_run(root)
    requests.clear()
    assert len(list_checkpoints(run)) == 2
    assert requests["_get"] == 2 and not requests["bytes"]


def test_everything_is_verified_once(root: StorePath, requests: Counter[str]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(12)))
    checkpoint.save(root / "a", model)
    requests.clear()
    moved: list[int] = []
    assert not list(verify(root / "a", watch=lambda total: moved.append))
    nbytes = sum(each.nbytes for each in model.parameters())
    assert sum(moved) == nbytes
    assert nbytes <= requests["bytes"] <= nbytes + (64 << 10)


def test_a_flipped_byte_names_its_file_and_parameter(root: StorePath) -> None:
    save(root / "a")
    shard = shard_of(root / "a")
    data = bytearray(get(shard))
    data[-1] ^= 1
    put(shard, bytes(data))
    (damage,) = verify(root / "a")
    assert damage.file == shard.name and "is damaged" in damage.reason


@pytest.mark.parametrize("what", ["truncated", "missing", "grown"])
def test_a_file_of_another_size_names_itself(root: StorePath, what: str) -> None:
    save(root / "a")
    shard = shard_of(root / "a")
    data = get(shard)
    shard.remove()
    if what != "missing":
        put(shard, data[:-8] if what == "truncated" else data + b"12345678")
    (damage,) = verify(root / "a")
    assert shard.name in damage.reason
    with pytest.raises(CheckpointError, match=shard.name):
        read_all(root / "a")


def test_a_model_that_is_replaced_while_it_is_read_names_itself(root: StorePath) -> None:
    save(root / "a")
    consolidate(root / "a", root / "model.safetensors")
    data = get(root / "model.safetensors")
    with open_source(root / "model.safetensors") as source:
        (root / "model.safetensors").remove()
        put(root / "model.safetensors", data[:-1] + b"x")
        with pytest.raises(CheckpointError, match=r"model\.safetensors: was replaced"):
            read_tensors(source)


HOSTILE = {
    "another folder": {"weight_map": {"w": "../secret.safetensors"}},
    "a path": {"weight_map": {"w": "/etc/secret.safetensors"}},
    "no map": {"weight_map": []},
    "none of them": {"weight_map": {"w": "model-00001-of-00001.safetensors"}},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_index_of_strangers_is_refused(root: StorePath, what: str) -> None:
    save(root / "a")
    convert(root / "a", root / "hf", Format.HF)
    put(root / "hf" / "model.safetensors.index.json", json.dumps(HOSTILE[what]).encode())
    with pytest.raises(CheckpointError, match=r"index\.json|00001-of-00001.* is missing"):
        open_source(root / "hf")


def test_random_bytes_in_a_header_are_refused(root: StorePath) -> None:
    save(root / "a")
    consolidate(root / "a", root / "model.safetensors")
    data, rng = bytearray(get(root / "model.safetensors")), random.Random(0)
    for _ in range(40):
        changed = bytearray(data)
        changed[rng.randrange(300)] = rng.randrange(256)
        put(root / "model.safetensors", bytes(changed))
        with contextlib.suppress(CheckpointError):  # or what changed is a name
            read_all(root / "model.safetensors")


def test_other_formats_are_refused_by_name(root: StorePath, capsys: Capture) -> None:
    put(root / "dcp" / ".metadata", b"x")
    put(root / "model.pt", b"x")
    for name, form in (("dcp", "dcp"), ("model.pt", "torch")):
        with pytest.raises(CheckpointError, match=rf"{name}: .*\({form}\).* copy it to a folder"):
            open_source(root / name)


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [Format.SHARDWISE, Format.HF])
def test_what_is_converted_is_the_same_in_folders_and_stores(
    root: StorePath, to: Format, tmp_path: Path
) -> None:
    save(root / "a")
    convert(root / "a", tmp_path / "folder", to, buffer=4096, max_shard_size=100)
    convert(root / "a", root / "there", to, buffer=4096, max_shard_size=100)
    convert(tmp_path / "folder", root / "again", to, buffer=4096)
    assert equal(tmp_path / "folder", root / "there")
    assert equal(root / "there", root / "again")
    assert not [name for name in root.below() if name.startswith(".partial")]


def test_large_tensors_go_and_come_in_parts(root: StorePath, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2000, 1500), torch.nn.Linear(1500, 3))
    checkpoint.save(root / "a", model)
    convert(root / "a", root / "hf", Format.HF, buffer=1 << 20)
    consolidate(root / "a", root / "one.safetensors", buffer=1 << 20)
    loaded = torch.nn.Sequential(torch.nn.Linear(2000, 1500), torch.nn.Linear(1500, 3))
    checkpoint.load_weights(str(root / "hf"), loaded)
    assert same(model, loaded)
    assert equal(root / "hf", root / "one.safetensors")


def test_a_model_in_a_store_has_an_index_last_and_all_that_transformers_needs(
    root: StorePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "run" / "step-00000001")
    put(root / "run" / "config.json", b'{"model_type": "mine"}')
    put(root / "run" / "tokenizer" / "tokenizer.json", b"{}")
    written: list[str] = []
    for name in ("write", "create"):
        original = getattr(StorePath, name)

        def note(self: StorePath, *more: Any, _do: Any = original) -> Any:
            written.append("SHARD" if is_of_attempt(self.name) else self.name)
            return _do(self, *more)

        monkeypatch.setattr(StorePath, name, note)
    convert(root / "run", root / "hf", Format.HF, max_shard_size=200)
    assert written[1:3] == ["SHARD", "SHARD"] and written[-1] == "model.safetensors.index.json"
    assert {*written[3:-1]} == {"config.json", "tokenizer.json"}


def test_an_existing_destination_is_refused_and_replaced_with_force(root: StorePath) -> None:
    save(root / "a", step=1)
    save(root / "b", step=2)
    convert(root / "a", root / "out", Format.HF, max_shard_size=100)
    before = root.below()
    for to in (Format.HF, Format.SHARDWISE):
        with pytest.raises(beside.DestinationError, match="exists; give another name, or --force"):
            convert(root / "b", root / "out", to)
    assert root.below() == before
    convert(root / "b", root / "out", Format.HF, force=True)
    assert equal(root / "out", root / "out")
    consolidate(root / "b", root / "b.safetensors")
    assert equal(root / "out", root / "b.safetensors")
    assert stored(root / "out") == {"SHARD", "model.safetensors.index.json"}
    convert(root / "a", root / "out", Format.SHARDWISE, force=True)
    assert equal(root / "out", root / "a")
    assert stored(root / "out") == {"SHARD", "manifest.json"}


def test_what_is_not_ours_is_not_replaced(root: StorePath) -> None:
    save(root / "a")
    put(root / "out" / "thesis.pdf", b"x")
    with pytest.raises(beside.DestinationError, match=r"thesis\.pdf, which is not part"):
        convert(root / "a", root / "out", Format.HF, force=True)
    with pytest.raises(beside.DestinationError, match="contains, the checkpoint that is read"):
        convert(root / "a", root / "a", Format.HF, force=True)
    assert get(root / "out" / "thesis.pdf") == b"x"


def test_of_two_that_write_one_name_one_wins_and_the_other_is_told(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "a", step=1)
    save(root / "b", step=2)
    create = StorePath.create

    def be_late(self: StorePath, data: bytes) -> bool:
        monkeypatch.setattr(StorePath, "create", create)
        convert(root / "b", root / "out", Format.HF)
        return create(self, data)

    monkeypatch.setattr(StorePath, "create", be_late)
    with pytest.raises(CheckpointError, match="out: was made by another process"):
        convert(root / "a", root / "out", Format.HF)
    consolidate(root / "b", root / "b.safetensors")
    assert equal(root / "out", root / "b.safetensors")
    assert stored(root / "out") == {"SHARD", "model.safetensors.index.json"}


@pytest.mark.parametrize("to", [Format.SHARDWISE, Format.HF])
def test_what_fails_half_way_leaves_nothing_and_an_old_one_as_it_was(
    root: StorePath, to: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "a", step=1)
    save(root / "b", step=2)
    convert(root / "a", root / "old", to)
    before = root.below()
    create, write = StorePath.create, StorePath.write

    def fail(of: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(self: StorePath, *more: Any) -> Any:
            if self.name.endswith(".json"):
                raise StoreError(f"{self}: cannot be written (500)")
            return of(self, *more)

        return maybe

    monkeypatch.setattr(StorePath, "create", fail(create))
    monkeypatch.setattr(StorePath, "write", fail(write))
    for name, force in (("new", False), ("old", True)):
        with pytest.raises(StoreError, match="cannot be written"):
            convert(root / "b", root / name, to, force=force)
    after = {name: each for name, each in root.below().items() if ".partial" not in name}
    assert after == before


@pytest.mark.parametrize("words", [["convert", "--to", "dcp"], ["consolidate"]])
def test_what_stores_do_not_get_is_refused(
    on_disk: StorePath, words: list[str], capsys: Capture
) -> None:
    save(on_disk / "a")
    name = "out" if words[0] == "convert" else "out.pt"
    words = [words[0], str(on_disk / "a"), str(on_disk / name), *words[1:]]
    assert "expected a folder of this host" in refused(capsys, "checkpoint", *words)


def test_a_command_writes_nothing_that_ends_with_it(on_disk: StorePath, capsys: Capture) -> None:
    save(on_disk / "a")
    for words in (["convert", "--to", "hf"], ["consolidate"]):
        words = [words[0], str(on_disk / "a"), "memory:///out", *words[1:]]
        assert "DST: found memory:///out, expected" in refused(capsys, "checkpoint", *words)


def attempt_at(folder: StorePath, last: str) -> store_commit.StoreCommit:
    """Another process that replaces a checkpoint, and has sent half of it."""
    replaces = beside.check_name(folder, folder.parent / "source", force=True)
    attempt = store_commit.StoreCommit(folder, last, replaces)
    put(attempt / shard_name(0, 1) if last == MANIFEST else attempt / "model.safetensors", b"half")
    return attempt


@pytest.mark.parametrize("to", [Format.HF, Format.SHARDWISE])
@pytest.mark.parametrize("last", [MANIFEST, INDEX])
def test_what_is_to_be_replaced_is_read_until_then(root: StorePath, to: Format, last: str) -> None:
    save(root / "a")
    convert(root / "a", root / "out", to)
    attempt_at(root / "out", last)
    assert equal(root / "out", root / "out")
    assert format_of(root / "out") is to


def test_with_force_nothing_is_deleted_of_what_another_is_writing(root: StorePath) -> None:
    save(root / "a", step=1)
    save(root / "b", step=2)
    convert(root / "a", root / "out", Format.HF)
    attempt = attempt_at(root / "out", INDEX)
    convert(root / "b", root / "out", Format.HF, force=True)
    assert "half" in [get(root / "out" / name)[:4].decode("latin1") for name in attempt._files]
    convert(root / "b", root / "plain", Format.HF)
    assert equal(root / "out", root / "plain")


@pytest.mark.parametrize(
    ("first", "then"),
    [(Format.SHARDWISE, Format.HF), (Format.HF, Format.SHARDWISE), (Format.HF, Format.HF)],
)
@pytest.mark.parametrize("deletions", range(3))
def test_what_was_replaced_is_not_read_if_its_deletion_is_killed(
    root: StorePath,
    monkeypatch: pytest.MonkeyPatch,
    first: Format,
    then: Format,
    deletions: int,
) -> None:
    """Nor forgotten. Until its manifest is deleted, by this command or the next, it is read."""
    save(root / "a", step=1)
    save(root / "b", step=2)
    convert(root / "a", root / "out", first)
    convert(root / "b", root / "new", then)
    remove, left = StorePath.remove, deletions

    def kill(self: StorePath, names: Any = ("",)) -> None:
        nonlocal left
        if self == root / "out":
            left -= 1
            if left < 0:
                raise RuntimeError("killed")
        remove(self, names)

    with monkeypatch.context() as patch:
        patch.setattr(StorePath, "remove", kill)
        patch.setattr(store_commit.StoreCommit, "abandon", lambda self: None)
        with contextlib.suppress(RuntimeError):
            convert(root / "b", root / "out", then, force=True)
    is_old = first is Format.SHARDWISE and deletions == 0
    assert equal(root / "out", root / ("a" if is_old else "new"))
    left = [each.nbytes for each in list_leftovers(root)]
    assert bool(sum(left)) == (len((root / "out").below()) > len((root / "new").below()))
    store_commit.clean(root, float("inf"))
    assert list_leftovers(root) == []
    assert equal(root / "out", root / "new")
    assert len((root / "out").below()) == len((root / "new").below()), "the rest is deleted"


def test_what_has_been_put_there_since_a_killed_replacement_is_kept(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "a", step=1)
    convert(root / "a", root / "out", Format.HF)
    put(root / "out" / "config.json", b"{}")
    with monkeypatch.context() as patch:
        patch.setattr(StorePath, "remove", lambda *_: None)
        convert(root / "a", root / "out", Format.SHARDWISE, force=True)
    time.sleep(0.01)
    put(root / "out" / "config.json", b"mine")
    store_commit.clean(root, float("inf"))
    assert stored(root / "out") == {"SHARD", "manifest.json", "config.json"}
    assert equal(root / "out", root / "a")


def test_what_cannot_be_deleted_is_not_replaced(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs would go on reading it."""
    save(root / "a", step=1)
    save(root / "b", step=2)
    convert(root / "a", root / "out", Format.SHARDWISE)

    def refuse(*_: Any) -> None:
        raise StoreError("cannot be deleted (403 Forbidden)")

    with monkeypatch.context() as patch:
        patch.setattr(StorePath, "remove", refuse)
        with pytest.raises(StoreError, match="403"):
            convert(root / "b", root / "out", Format.HF, force=True)
    assert equal(root / "out", root / "a")


# -- what killed saves leave -----------------------------------------------------------------------


def killed(*_: Any) -> None:
    raise RuntimeError("killed")


@pytest.fixture
def die(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Save, and be killed before the commit."""

    def save_half(folder: Any) -> None:
        with monkeypatch.context() as patch:
            for kind in (store_commit.StoreCommit, commit.Commit):
                patch.setattr(kind, "finish", killed)
                patch.setattr(kind, "abandon", lambda self: None)
            with pytest.raises(CheckpointError, match="killed"):
                save(folder)

    return save_half


def test_leftovers_in_a_store_are_deleted_once_they_are_old(
    root: StorePath, die: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run = save_run(root)
    steps = run / "checkpoints"
    before = root.below()
    die(steps / "step-00000030")
    (left,) = list_leftovers(run)
    assert (left.path, left.nbytes > 0) == (steps / "step-00000030", True)
    assert 0 <= left.age < 60 and "may still be written, for 1" in left.kept
    delete_leftovers(run)
    assert list_leftovers(run)[0].nbytes == left.nbytes
    assert call("checkpoint", "ls", str(run), "--leftovers") == 0
    assert "may still be written" in capsys.readouterr().out
    monkeypatch.setattr(store_commit, "LEFT", timedelta(microseconds=1))
    assert list_leftovers(steps)[0].kept == ""
    assert call("checkpoint", "clean", str(run)) == 0
    assert "deleted 1 of 1 leftover" in capsys.readouterr().out
    assert root.below().keys() == before.keys()


def test_a_model_that_was_written_half_is_a_leftover_too(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "a")
    with monkeypatch.context() as patch:
        patch.setattr(store_commit.StoreCommit, "publish", killed)
        patch.setattr(store_commit.StoreCommit, "abandon", lambda self: None)
        with pytest.raises(RuntimeError, match="killed"):
            convert(root / "a", root / "out", Format.HF)
    assert [each.path.name for each in list_leftovers(root)] == ["out"]
    convert(root / "a", root / "out", Format.HF)  # is not in its way
    monkeypatch.setattr(store_commit, "LEFT", timedelta(microseconds=1))
    delete_leftovers(root)
    assert list_leftovers(root) == []
    assert stored(root / "out") == {"SHARD", "model.safetensors.index.json"}
    assert len(root.below()) == 4
    read_all(root / "out")


def test_leftovers_in_a_folder_are_what_nobody_holds(
    die: Callable[[Any], None], tmp_path: Path
) -> None:
    save(tmp_path / "checkpoints" / "step-00000010")
    writing = commit.Commit(tmp_path / "checkpoints" / "step-00000020")
    die(tmp_path / "checkpoints" / "step-00000030")
    gc.collect()  # and with it the lock of the save that was killed
    partial = tmp_path / "checkpoints" / ".step-00000030.partial"
    foreign = tmp_path / ".mine.partial"
    foreign.mkdir()
    (foreign / "thesis.pdf").write_bytes(b"x")
    found = {each.path: each for each in list_leftovers(tmp_path)}
    assert found.keys() == {partial, foreign}
    assert found[partial].kept == "" and found[partial].nbytes > 0
    assert "thesis.pdf, which is not of a checkpoint" in found[foreign].kept
    delete_leftovers(tmp_path)
    assert [each.path for each in list_leftovers(tmp_path)] == [foreign]
    assert writing.partial.is_dir()
    writing.abandon()


def test_leftovers_of_nothing_are_an_error(
    root: StorePath, tmp_path: Path, capsys: Capture
) -> None:
    for place in (root / "none", tmp_path / "none"):
        for words in (["ls", "--leftovers"], ["clean"]):
            assert call("checkpoint", *words, str(place)) in (1, 2)
            error = capsys.readouterr().err
            assert f"{place}" in error and error.count("\n") == 1
