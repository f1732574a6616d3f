"""Readers see one version or the one before, and the publisher does not wait for them."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_commit import StoreCommit
from shardwise.checkpoint.disk.store_path import StorePath
from shardwise.weights import folder, memory
from shardwise.weights.folder import newest_in_folder
from tests.weights.constant import constant_model, set_weights
from tests.weights.names import keep_names_in


@pytest.fixture(params=["memory", "folder", "store"])
def to(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Where weights are published."""
    if request.param == "store":
        pytest.importorskip("obstore", reason="needs obstore: install .[test]")
    places = {"folder": f"{tmp_path}/published", "store": f"file://{tmp_path}/published"}
    return places.get(request.param)


# -- any place -------------------------------------------------------------------------------------


def test_a_reader_keeps_the_version_that_it_has_read(to: str | None) -> None:
    model = constant_model(1)
    with shardwise.publish(model, "policy", to=to) as weights:
        first = dict(shardwise.subscribe("policy", at=to))
        for value in (2, 3, 4):
            set_weights(model, value)
            weights.update()
        assert first["weight"].eq(1).all()
        assert dict(shardwise.subscribe("policy", at=to))["weight"].eq(4).all()


def test_what_a_reader_writes_stays_its_own(to: str | None) -> None:
    model = constant_model(1)
    with shardwise.publish(model, "policy", to=to):
        subscription = shardwise.subscribe("policy", at=to)
        dict(subscription)["weight"].zero_()
        assert dict(subscription)["weight"].eq(1).all()
        assert model.weight.eq(1).all()


def test_a_reader_waits_for_a_newer_version(to: str | None) -> None:
    model = constant_model(1)
    with shardwise.publish(model, "policy", to=to) as weights:
        subscription = shardwise.subscribe("policy", at=to)
        assert subscription.version == 0
        assert subscription.wait() == 1  # nothing has been read yet
        dict(subscription)
        with pytest.raises(CheckpointError, match=r"found version 1 again within the timeout"):
            subscription.wait(timeout=0.01)
        weights.update()
        assert subscription.wait() == 2


def test_one_that_nobody_publishes_is_an_error_after_the_timeout(to: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"'policy': found no version within the timeout"):
        dict(shardwise.subscribe("policy", at=to, timeout=0.01))


@pytest.mark.parametrize("to", ["memory", "folder"], indirect=True)
def test_a_name_has_one_publisher(to: str | None) -> None:
    first = shardwise.publish(constant_model(), "policy", to=to)
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* doing that"):
        shardwise.publish(constant_model(), "policy", to=to)
    with shardwise.publish(constant_model(), "another", to=to):
        pass
    first.close()
    with shardwise.publish(constant_model(5), "policy", to=to):
        assert dict(shardwise.subscribe("policy", at=to))["weight"].eq(5).all()


@pytest.mark.parametrize(
    "name",
    [
        *("org/model", "../../x", "ein Käse", ".", "..", ".a.b", "~", "%2F"),
        *("\0", "a\nb", "\udc80", "x.lock", "x.pointer", "💥" * 16),
    ],
)
def test_a_name_may_contain_anything(to: str | None, name: str, tmp_path: Path) -> None:
    with (
        shardwise.publish(constant_model(1), "x", to=to),
        shardwise.publish(constant_model(3), name, to=to),
    ):
        assert dict(shardwise.subscribe(name, at=to))["weight"].eq(3).all()
        assert dict(shardwise.subscribe("x", at=to))["weight"].eq(1).all()
    inside = {"names", "published"} if to else {"names"}
    assert {each.name for each in tmp_path.iterdir()} == inside


@pytest.mark.parametrize("name", ["", "x" * 201, "Käse" * 40])
def test_a_name_that_no_file_can_have_is_refused(to: str | None, name: str) -> None:
    for call in (
        lambda: shardwise.publish(constant_model(), name, to=to),
        lambda: shardwise.subscribe(name, at=to),
    ):
        with pytest.raises(ValueError, match="name: found"):
            call()


def test_a_closed_publication_publishes_no_more(to: str | None) -> None:
    weights = shardwise.publish(constant_model(), "policy", to=to)
    weights.close()
    weights.close()
    with pytest.raises(ValueError, match=r"found it closed, expected an open one; publish again"):
        weights.update()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, "dtype: found torch.int8, expected a floating-point one"),
        ({"buffers": 1}, "buffers: found 1, expected 2 or more"),
        ({"adapters": "both"}, "adapters: found 'both', expected 'alone' or 'merged'"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        shardwise.publish(constant_model(), "policy", **options)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/policy: Not a directory"):
        shardwise.publish(constant_model(), "policy", to=tmp_path / "file")
    with shardwise.publish(constant_model(), "policy", to=tmp_path / "folder"):
        pass


# -- memory ----------------------------------------------------------------------------------------


def test_memory_is_written_again_once_nobody_reads_it() -> None:
    model = constant_model(1)
    with shardwise.publish(model, "policy") as weights:
        before = _descriptors()
        for value in range(2, 9):
            set_weights(model, value)
            weights.update()
            assert dict(shardwise.subscribe("policy"))["weight"].eq(value).all()
            gc.collect()
        assert _descriptors() - before <= 2


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_readers_of_all_older_versions_are_named() -> None:
    model = constant_model(1)
    with shardwise.publish(model, "policy", buffers=2) as weights:
        kept = dict(shardwise.subscribe("policy"))
        set_weights(model, 2)
        weights.update()
        with pytest.raises(
            CheckpointError, match=rf"found readers .*process {os.getpid()} \(.*python"
        ):
            weights.update()
        assert dict(shardwise.subscribe("policy"))["weight"].eq(2).all()
        assert kept["weight"].eq(1).all()
        del kept
        gc.collect()
        set_weights(model, 3)
        weights.update()
        assert dict(shardwise.subscribe("policy"))["weight"].eq(3).all()


def test_tensors_outlive_their_publisher() -> None:
    weights = shardwise.publish(constant_model(4), "policy")
    tensors = dict(shardwise.subscribe("policy"))
    weights.close()
    assert tensors["weight"].eq(4).all()
    with pytest.raises(CheckpointError, match="found no version"):
        dict(shardwise.subscribe("policy", timeout=0.01))


def test_a_pointer_of_another_release_is_refused(tmp_path: Path) -> None:
    with shardwise.publish(constant_model(), "policy") as weights:
        [pointer] = (tmp_path / "names").rglob("*.pointer")
        said = json.loads(pointer.read_text())
        newer = said | {"version": said["version"] | {"format": 2}}
        for changed in (newer, {"format": 1}, {**said, "more": 1}):
            pointer.write_text(json.dumps(changed))
            with pytest.raises(CheckpointError, match=r"policy\.pointer: found .*release"):
                dict(shardwise.subscribe("policy"))
        weights.update()  # says where the newest version is again
        assert dict(shardwise.subscribe("policy"))["weight"].eq(1).all()


def test_a_pointer_to_something_else_is_not_followed(tmp_path: Path) -> None:
    """Numbers of processes, descriptors and files come again."""
    (tmp_path / "other").write_bytes(b"secret")
    reading, writing = os.pipe()
    with shardwise.publish(constant_model(), "policy"), (tmp_path / "other").open() as opened:
        [pointer] = (tmp_path / "names").rglob("*.pointer")
        said = json.loads(pointer.read_text())
        others = [opened.fileno(), reading]
        for changed in (
            *({"descriptor": each} for each in (0, *others)),
            *({"descriptor": each, "inode": os.fstat(each).st_ino} for each in others),
            {"process": 2**30},
        ):
            pointer.write_text(json.dumps(said | changed))
            with pytest.raises(CheckpointError, match="found no version"):
                dict(shardwise.subscribe("policy", timeout=0.01))
    os.close(reading)
    os.close(writing)


def test_a_publisher_in_another_container_is_said_to_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with shardwise.publish(constant_model(), "policy"):
        monkeypatch.setattr(memory, "host_by", lambda namespace: "another boot")
        with pytest.raises(CheckpointError, match=r"another container.* Publish to a folder"):
            dict(shardwise.subscribe("policy"))


def test_names_in_a_folder_that_others_may_write_to_are_refused(tmp_path: Path) -> None:
    home = tmp_path / "names" / f"shardwise-{os.getuid()}"
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(CheckpointError, match=r"found drwxrwxrwx of user .*, expected a folder"):
        shardwise.publish(constant_model(), "policy")
    home.rmdir()
    home.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"found lrwxrwxrwx of user"):
        shardwise.subscribe("policy")


def _read_as(user: int, names: str, results: Any) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    keep_names_in(names)
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += [
                os.readlink(f"/proc/{process}/fd/{fd}") for fd in os.listdir(f"/proc/{process}/fd")
            ]
        except OSError:
            continue
    results.put([each for each in found if "weights" in each])


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_cannot_read_them(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with shardwise.publish(constant_model(), "policy"):
        results = context.SimpleQueue()
        process = context.Process(target=_read_as, args=(12345, str(tmp_path / "names"), results))
        process.start()
        assert results.get() == []
        process.join()
        [home] = (tmp_path / "names").iterdir()
        assert home.stat().st_mode & 0o077 == 0


# -- folders ---------------------------------------------------------------------------------------


def _versions(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.glob("version-*"))


def test_the_newest_version_and_the_one_before_it_stay(tmp_path: Path) -> None:
    model = constant_model(0)
    with shardwise.publish(model, "policy", to=tmp_path) as weights:
        for value in (1, 2, 3):
            set_weights(model, value)
            weights.update()
    assert _versions(tmp_path / "policy") == ["version-00000003", "version-00000004"]


def test_a_version_is_a_model_that_others_load(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    with shardwise.publish(model, "policy", to=tmp_path):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "policy/version-00000001"
        )
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True)
    )


def test_a_damaged_version_is_refused_and_the_next_one_is_read(tmp_path: Path) -> None:
    model = constant_model(1)
    with shardwise.publish(model, "policy", to=tmp_path) as weights:
        subscription = shardwise.subscribe("policy", at=tmp_path)
        dict(subscription)
        weights.update()
        (tmp_path / "policy/version-00000002/model.safetensors").write_bytes(b"short")
        with pytest.raises(CheckpointError, match="version-00000002"):
            dict(subscription)
        set_weights(model, 3)
        weights.update()
        assert dict(subscription)["weight"].eq(3).all()
        assert subscription.version == 3


def test_changes_that_an_earlier_release_published_are_refused_and_kept(tmp_path: Path) -> None:
    model = constant_model(1)
    with shardwise.publish(model, "policy", to=tmp_path):
        subscription = shardwise.subscribe("policy", at=tmp_path)
    changes = tmp_path / "policy/version-00000002"
    shardwise.checkpoint.save(changes, nn.Module(), extra={"about": {"number": 2}, "rank0": []})
    for read in (lambda: dict(subscription), lambda: newest_in_folder("policy", tmp_path)):
        with pytest.raises(
            CheckpointError, match=r"version-00000002: .* Shardwise 0\.1\.0 .* again"
        ):
            read()
    with shardwise.publish(model, "policy", to=tmp_path):
        assert changes.is_dir()
        assert dict(subscription)["weight"].eq(1).all()
        assert subscription.version == 3


def test_a_model_that_gets_a_parameter_is_published_with_it(tmp_path: Path) -> None:
    model: Any = constant_model(1)
    with shardwise.publish(model, "policy", to=tmp_path) as weights:
        subscription = shardwise.subscribe("policy", at=tmp_path)
        dict(subscription)
        model.bias = nn.Parameter(torch.ones(64))
        weights.update()
        assert dict(subscription).keys() == {"weight", "bias"}


# -- object stores ---------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StorePath:
    pytest.importorskip("obstore", reason="needs obstore: install .[test]")
    place = place_of(f"{request.param}://{tmp_path}/bucket")
    assert isinstance(place, StorePath)
    return place


def _stored_versions(store: StorePath) -> set[str]:
    return {each.split("/")[1] for each in store.below()}


def test_in_a_store_the_newest_version_and_the_one_before_it_stay(store: StorePath) -> None:
    model = constant_model(0)
    for _ in range(2):  # also if it is published by another process then
        with shardwise.publish(model, "policy", to=str(store)) as weights:
            for value in (1, 2, 3):
                set_weights(model, value)
                weights.update()
        last = weights.version
        assert _stored_versions(store) == {f"version-{last - n:08}" for n in (0, 1)}
    assert last == 8
    number, folder = newest_in_folder("policy", str(store))
    assert (number, folder) == (8, store / "policy" / "version-00000008")


def test_a_version_that_is_incomplete_is_not_seen(
    store: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a publisher that was killed. The next one takes another number, and deletes it."""

    def killed(*_: Any) -> None:
        raise RuntimeError("killed")

    model = constant_model(1)
    with shardwise.publish(model, "policy", to=str(store)) as weights:
        with monkeypatch.context() as patch:
            patch.setattr(StoreCommit, "_put", killed)  # all but the index is there
            patch.setattr(StoreCommit, "abandon", lambda self: None)
            with pytest.raises(CheckpointError, match="killed"):
                weights.update()
        assert weights.version == newest_in_folder("policy", str(store))[0] == 1
        subscription = shardwise.subscribe("policy", at=str(store))
        assert dict(subscription)["weight"].eq(1).all()
        assert _stored_versions(store) >= {"version-00000002"}
        for value in (3, 4, 5):
            set_weights(model, value)
            assert weights.update() == value
    assert dict(subscription)["weight"].eq(5).all()
    assert not _stored_versions(store) & {"version-00000001", "version-00000002"}


def test_a_version_that_is_deleted_while_it_is_read_gives_way_to_the_next(
    store: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = constant_model(1)
    with shardwise.publish(model, "policy", to=str(store)) as weights:
        subscription = shardwise.subscribe("policy", at=str(store))
        full = folder.HfSource.full

        def publish_meanwhile(self: Any, path: Any) -> torch.Tensor:
            monkeypatch.setattr(folder.HfSource, "full", full)
            for value in (2, 3, 4):
                set_weights(model, value)
                weights.update()
            return full(self, path)

        monkeypatch.setattr(folder.HfSource, "full", publish_meanwhile)
        assert dict(subscription)["weight"].eq(4).all()
        assert subscription.version == 4


def test_of_two_publishers_one_wins_each_number(
    store: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shardwise.publish(constant_model(1), "policy", to=str(store))
    second = shardwise.publish(constant_model(2), "policy", to=str(store))
    write = folder.hf.write_model

    def be_late(*given: Any, **options: Any) -> None:
        monkeypatch.setattr(folder.hf, "write_model", write)
        second.update()
        write(*given, **options)

    monkeypatch.setattr(folder.hf, "write_model", be_late)
    with pytest.raises(CheckpointError, match="version-00000003 exists"):
        first.update()
    assert dict(shardwise.subscribe("policy", at=str(store)))["weight"].eq(2).all()
    assert (first.update(), second.update()) == (4, 5)


def test_a_url_that_is_none_is_refused() -> None:
    for url in ("ftp://host/a", "s3://key:secret@bucket/a"):
        for call in (
            lambda url=url: shardwise.publish(constant_model(), "policy", to=url),
            lambda url=url: shardwise.subscribe("policy", at=url),
        ):
            with pytest.raises(ValueError, match="found") as error:
                call()
            assert "secret" not in str(error.value)
