"""Checkpoints in S3, of a server on this machine that fails in the ways that servers do."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint, fully_shard
from shardwise.app.recipes.core.begin import check_folder
from shardwise.app.recipes.core.recipe import RecipeConfig
from shardwise.app.recipes.text.config import LmConfig
from shardwise.base.errors import StoreError
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk import store_commit, store_path, store_reads
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_path import StorePath
from shardwise.checkpoint.formats.detect import open_source
from shardwise.elastic.world import World
from shardwise.insight.schema.training import Existing
from tests.checkpoint.meshes import Setup, build, filled, give_state, wrong
from tests.cli.shell import call
from tests.recipes.running import train
from tests.recipes.small import losses, small_config
from tests.threads import run_threads
from tests.worlds import Ranks

pytest.importorskip("obstore", reason="needs obstore: install .[test]")
pytest.importorskip("moto", reason="needs moto: install .[ecosystem]")

from tests.checkpoint.stores.server import ACCESS, SECRET, Fault, Server, serving

PART = 5 << 20  # bytes: the least that S3 takes


@pytest.fixture(scope="module")
def _server() -> Iterator[Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with serving() as server:
        yield server


@pytest.fixture
def server(_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in _server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store_path, "_PART", PART)
    monkeypatch.setattr(store_reads, "_PART", 1 << 20)
    monkeypatch.setattr(store_path, "_RETRIES", 3)
    store_path._store_of.cache_clear()
    _server.faults.clear()
    _server.hidden.clear()
    _server.ignored.clear()
    _server.seen.clear()
    store_path._refusing.clear()
    yield _server
    _server.on_request = lambda method, path: None


@pytest.fixture
def root(request: pytest.FixtureRequest) -> str:
    return f"s3://runs/{abs(hash(request.node.nodeid))}"


def large(seed: int = 0) -> torch.nn.Module:
    """A model of three parts of S3."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(3)))


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def objects(root: str) -> list[str]:
    place = place_of(root)
    assert isinstance(place, StorePath)
    return sorted(place.below())


def test_large_files_go_in_parts_both_ways(server: Server, root: str) -> None:
    model, loaded = large(), large(seed=1)
    nbytes = sum(each.nbytes for each in model.parameters())
    before = server.sent, server.got
    checkpoint.save(f"{root}/a", model)
    parts = [path for method, path in server.seen if method == "PUT" and "partNumber=" in path]
    assert len(parts) == 3
    assert nbytes < server.sent - before[0] < 1.02 * nbytes
    checkpoint.load(f"{root}/a", loaded)
    assert nbytes < server.got - before[1] < 1.02 * nbytes
    assert equal(model, loaded)


def test_a_model_that_ranks_save_goes_in_parts_once(server: Server, root: str) -> None:
    before = server.sent

    def save(rank: int, world_size: int) -> torch.nn.Module:
        model = large()
        fully_shard(model)
        checkpoint.save_hf(f"{root}/hf", model, max_shard_size=8 << 20)
        return model

    run_threads(save, 2)
    nbytes = sum(each.nbytes for each in large().parameters())
    assert nbytes < server.sent - before < 1.02 * nbytes
    parts = [path for method, path in server.seen if method == "PUT" and "partNumber=" in path]
    assert len(parts) == 2  # of the first file; the second one has less than a part
    assert len(objects(root)) == 3
    loaded, before = large(seed=1), server.got
    checkpoint.load_weights(f"{root}/hf", loaded)
    assert nbytes < server.got - before < 1.02 * nbytes
    assert equal(large(), loaded)


@pytest.mark.parametrize("key", ["partNumber=2", "uploads", "model-00002-of", "index.json"])
def test_a_model_that_the_store_does_not_take_is_not_there(
    key: str, server: Server, root: str
) -> None:
    server.faults[:] = [Fault("PUT", key, 403, times=99), Fault("POST", key, 403, times=99)]

    def save(rank: int, world_size: int) -> str:
        model = large()
        fully_shard(model)
        with pytest.raises(CheckpointError, match="403 Forbidden") as error:
            checkpoint.save_hf(f"{root}/hf", model, max_shard_size=8 << 20)
        return str(error.value)

    (said,) = {*run_threads(save, 2)}
    assert said.startswith(f"saving {root}/hf: rank ") and SECRET not in said
    assert objects(root) == []
    server.faults.clear()
    checkpoint.save_hf(f"{root}/hf", large())


FAULTS = {
    "500s of parts": [Fault("PUT", "partNumber=2", 500, times=2)],
    "slow down": [Fault("PUT", "shard", 503, times=2), Fault("GET", "shard", 503, times=3)],
    "resets of parts": [
        Fault("PUT", "partNumber=1", "reset"),
        Fault("PUT", "partNumber=3", "lost"),
    ],
    "the end of parts": [Fault("POST", "uploadId=", 500)],
    "the beginning of parts": [Fault("POST", "uploads", 503)],
    "the commit": [Fault("PUT", "manifest", 503, times=2)],
    "the answer to the commit": [Fault("PUT", "manifest", "lost")],
    "no answer to the commit": [Fault("PUT", "manifest", "reset")],
    "marks": [Fault("PUT", ".partial", 500), Fault("HEAD", ".partial", "reset")],
    "reads": [Fault("GET", "shard", 500, times=2), Fault("GET", "shard", "reset", after=2)],
    "reads in the middle": [Fault("GET", "shard", "cut", times=2, after=1)],
    "lists": [Fault("GET", "list-type", 503), Fault("GET", "list-type", "reset", after=1)],
    "looks": [Fault("HEAD", "shard", 503), Fault("HEAD", "manifest", "reset")],
    "the manifest": [Fault("GET", "manifest", "cut"), Fault("GET", "manifest", 500)],
}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_passes_is_tried_again(kind: str, server: Server, root: str) -> None:
    server.faults[:] = [Fault(**vars(each)) for each in FAULTS[kind]]
    model, loaded = large(), large(seed=1)
    checkpoint.save(f"{root}/step-00000001", model)
    assert checkpoint.latest(root) == place_of(f"{root}/step-00000001")
    checkpoint.load(f"{root}/step-00000001", loaded)
    assert equal(model, loaded)
    assert not [each for each in server.faults if each.times]
    assert len(objects(root)) == 2


LASTING = {
    "500 Internal Server Error": Fault("PUT", "partNumber=2", 500, times=99),
    "503 Service Unavailable: SlowDown": Fault("PUT", "partNumber=2", 503, times=99),
    "403 Forbidden: AccessDenied: Access Denied": Fault("PUT", "partNumber=2", 403, times=99),
    "error sending request": Fault("PUT", "partNumber=2", "reset", times=99),
}


@pytest.mark.parametrize("words", LASTING)
def test_what_lasts_is_reported_in_the_stores_words(words: str, server: Server, root: str) -> None:
    checkpoint.save(f"{root}/step-00000001", large())
    fault = LASTING[words]
    server.faults[:] = [Fault(**vars(fault))]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(f"{root}/step-00000002", large())
    message = str(caught.value)
    assert f"rank 0: {root}/step-00000002/shard-00000-of-00001-" in message
    assert "cannot be written" in message
    assert words in message or "HTTP error" in message
    assert ACCESS not in message and SECRET not in message
    assert len(objects(root)) == 2  # and no parts:
    uploads = [path for method, path in server.seen if method == "DELETE" and "uploadId" in path]
    assert len(uploads) == 1
    server.faults.clear()
    assert checkpoint.steps(root) == [1]


@pytest.mark.parametrize("kind", [403, 500, "reset"])
def test_a_store_that_cannot_be_asked_does_not_count_as_empty(
    kind: int | str, server: Server, root: str
) -> None:
    checkpoint.save(f"{root}/step-00000001", large())
    server.faults[:] = [Fault(method, "", kind, times=999) for method in ("GET", "HEAD")]
    for ask in (checkpoint.latest, checkpoint.steps):
        with pytest.raises(StoreError, match=f"{root}"):
            ask(root)
    with pytest.raises(StoreError):
        checkpoint.is_complete(f"{root}/step-00000001")
    with pytest.raises(CheckpointError, match="rank 0"):
        checkpoint.load(f"{root}/step-00000001", large())


def test_a_403_in_the_middle_of_a_load_is_reported(server: Server, root: str) -> None:
    checkpoint.save(f"{root}/a", large())
    server.faults[:] = [Fault("GET", "shard", 403, times=99, after=3)]
    with pytest.raises(CheckpointError, match=r"rank 0: .*/a/shard-.* cannot be read .403 Forbid"):
        checkpoint.load(f"{root}/a", large())


def test_the_commands_read_and_write_in_parts(
    server: Server, root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, loaded = large(), large(seed=1)
    nbytes = sum(each.nbytes for each in model.parameters())
    checkpoint.save(f"{root}/run/checkpoints/step-00000001", model)
    before = server.got
    assert call("checkpoint", "verify", f"{root}/run") == 0
    assert nbytes < server.got - before < 1.02 * nbytes
    before = server.got, server.sent
    assert call("checkpoint", "ls", f"{root}/run") == 0
    assert server.got - before[0] < 32 << 10
    server.faults[:] = [Fault("GET", "shard", "cut", after=2), Fault("HEAD", "model", 503)]
    assert call("checkpoint", "convert", f"{root}/run", f"{root}/hf", "--to", "hf") == 0
    assert nbytes < server.sent - before[1] < 1.02 * nbytes
    assert not [each for each in server.faults if each.times]
    checkpoint.load_weights(f"{root}/hf", loaded)
    assert equal(model, loaded)
    assert call("checkpoint", "convert", f"{root}/hf", str(tmp_path / "own"), "--to", "hf") == 0
    assert call("checkpoint", "diff", f"{root}/hf", str(tmp_path / "own")) == 0
    refused = call("checkpoint", "convert", f"{root}/run", f"{root}/hf", "--to", "hf")
    assert (refused, len(objects(root))) == (2, 4)
    assert "exists; give another name, or --force" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [403, 500, "reset"])
def test_a_store_that_fails_is_one_line_of_the_commands(
    kind: int | str, server: Server, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(f"{root}/step-00000001", large())
    server.faults[:] = [Fault(method, "", kind, times=999) for method in ("GET", "HEAD", "PUT")]
    for words in (["ls"], ["ls", "--leftovers"], ["clean"], ["show"], ["verify"]):
        assert call("checkpoint", *words, root) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {root}") and error.count("\n") == 1
        assert ACCESS not in error and SECRET not in error
    server.faults[:] = [Fault("PUT", "model-", kind, times=999)]
    assert call("checkpoint", "convert", root, f"{root}/hf", "--to", "hf") == 1
    assert capsys.readouterr().err.startswith(f"error: {root}/hf/model-")
    assert len(objects(f"{root}/step-00000001")) == len(objects(root)) == 2


def test_a_model_that_is_replaced_names_itself(server: Server, root: str) -> None:
    for step in (1, 2):
        checkpoint.save(f"{root}/step-0000000{step}", large(seed=step))
    assert call("checkpoint", "consolidate", root, f"{root}/a.safetensors") == 0
    with open_source(place_of(f"{root}/a.safetensors")) as source:
        (path, *_) = source.tensors
        source.full(path)
        words = [f"{root}/step-00000001", f"{root}/a.safetensors", "--force"]
        assert call("checkpoint", "consolidate", *words) == 0
        with pytest.raises(CheckpointError, match=r"a\.safetensors: was replaced"):
            source.full(path)


def test_a_store_that_ignores_the_condition_is_refused_before_all_is_sent(
    server: Server, root: str
) -> None:
    server.ignored.add("HTTP_IF_NONE_MATCH")
    before = server.sent
    with pytest.raises(CheckpointError, match=rf"{root}/\.partial/a\..*\(If-None-Match"):
        checkpoint.save(f"{root}/a", large())
    assert server.sent - before < 1000 and objects(root) == []
    with pytest.raises(StoreError, match="If-None-Match"):
        place_of(f"{root}/sessions/1").create(b"{}")


def test_the_condition_is_tried_once_in_a_process(server: Server, root: str) -> None:
    """So it costs a request of the first save, and none of the others."""
    counts = []
    for step in (1, 2):
        server.seen.clear()
        checkpoint.save(f"{root}/step-{step:08}", large())
        counts.append(sum(".partial" in path and method == "PUT" for method, path in server.seen))
    assert counts == [2, 1]


def test_a_store_that_ignores_tags_is_noticed(server: Server, root: str) -> None:
    server.ignored.add("HTTP_IF_MATCH")
    place = place_of(f"{root}/a")
    place.write([b"one"], 3)
    tag = place.find().tag
    assert place.read(0, 2, tag)[0] == b"on"
    place.write([b"two"], 3)
    with pytest.raises(CheckpointError, match="a: was replaced while it was read"):
        place.read(0, 2, tag)


def test_google_gets_the_same_requests(
    server: Server, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its protocol of XML is that of S3, but for the name of the condition, and for deletions."""
    account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
    google = root.replace("s3://", "gs://")
    for step in (1, 2, 3):
        checkpoint.save(f"{google}/step-{step:08}", large(step), keep_last=2)
    loaded = large()
    checkpoint.load(f"{google}/step-00000003", loaded)
    assert equal(loaded, large(3))
    assert objects(google) == objects(root) and len(objects(root)) == 4
    assert checkpoint.steps(google) == [2, 3]
    assert not place_of(f"{google}/step-00000003/manifest.json").create(b"{}")
    server.ignored.add("HTTP_IF_NONE_MATCH")
    store_path._refusing.clear()
    with pytest.raises(CheckpointError, match="although on condition"):
        checkpoint.save(f"{google}/step-00000004", large())


def test_without_a_network_it_gives_up(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_path, "_RETRIES", 2)
    for name, value in Server(url="http://127.0.0.1:9").environment.items():
        monkeypatch.setenv(name, value)
    store_path._store_of.cache_clear()
    for use in (lambda: checkpoint.save(f"{root}/a", large()), lambda: checkpoint.latest(root)):
        with pytest.raises(CheckpointError, match=f"{root}.* cannot be .*rror") as caught:
            use()
        assert SECRET not in str(caught.value)


def test_a_list_that_lags_tears_nothing(
    server: Server, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(f"{root}/step-00000001", large())
    server.hidden |= {f"{root.removeprefix('s3://runs/')}/{each}" for each in objects(root)}
    monkeypatch.setattr(store_commit, "LEFT", timedelta(microseconds=1))
    loaded = large(seed=1)
    checkpoint.load(f"{root}/step-00000001", loaded)
    checkpoint.save(f"{root}/step-00000002", large())
    server.hidden.clear()
    assert checkpoint.steps(root) == [1, 2]


def test_a_bucket_that_is_missing_is_named(server: Server) -> None:
    checks = (
        lambda: checkpoint.save("s3://none/a", large()),
        lambda: checkpoint.load("s3://none/a", large()),
        lambda: checkpoint.load_weights("s3://none/a", large()),
        lambda: checkpoint.latest("s3://none"),
        lambda: checkpoint.is_complete("s3://none/a"),
    )
    for check in checks:
        with pytest.raises(CheckpointError, match=r"s3://none.*NoSuchBucket"):
            check()


def test_credentials_are_also_those_of_a_profile(
    server: Server, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"[mine]\naws_access_key_id = AKIAOFPROFILE\naws_secret_access_key = {SECRET}\n"
    (tmp_path / "credentials").write_text(text)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    checkpoint.save(f"{root}/a", large())
    assert "Credential=AKIAOFPROFILE/" in server.signed


def _save_some(root: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    store_path._PART = PART
    for step in range(2, 9):
        checkpoint.save(f"{root}/step-{step:08}", large(seed=step), keep_last=2)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.long) for n in range(6, 60))]
)
def test_kills_tear_nothing_and_leave_nothing(
    seed: int, server: Server, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any request. Incomplete uploads are for the bucket's own rules to delete."""
    checkpoint.save(f"{root}/step-00000001", large(seed=1))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # which imports torch once
    process = context.Process(target=_save_some, args=(root, server.environment))
    count = 5 + seed * 7

    def kill(method: str, path: str) -> None:
        nonlocal count
        count -= 1
        if count == 0 and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)

    server.on_request = kill
    process.start()
    process.join()
    server.on_request = lambda method, path: None
    found = checkpoint.steps(root)
    assert found
    for step in found:
        loaded = large()
        checkpoint.load(f"{root}/step-{step:08}", loaded)
        assert equal(loaded, large(seed=step))
    monkeypatch.setattr(store_commit, "LEFT", timedelta(seconds=-1))
    checkpoint.save(f"{root}/step-00000099", large(), keep_last=1)
    assert checkpoint.steps(root) == [99]
    assert len(objects(root)) == 2


def _of_ranks(rank: int, world_size: int, root: str, environment: dict[str, str]) -> Any:
    os.environ.update(environment)
    model, optimizer = filled(Setup("mlp", (world_size,)))
    checkpoint.async_save(f"{root}/a", model, optimizer, {"step": 3}).result()
    other, its = build(Setup("mlp", (world_size,), last_dim=True), seed=3)
    give_state(its)
    extra = checkpoint.load(f"{root}/a", other, its)
    try:
        checkpoint.save(f"{root}/a", model, optimizer)
    except CheckpointError as error:
        return wrong(other, its), extra, str(error)
    return None


@pytest.mark.usefixtures("new_ranks")
def test_ranks_save_and_load(ranks: Ranks, server: Server, root: str) -> None:
    for bad, extra, error in ranks(_of_ranks, 2, root, server.environment):
        assert (bad, extra) == ([], {"step": 3})
        assert "already exists" in error


def _train(
    rank: int, world_size: int, host: str, environment: dict[str, str], config: RecipeConfig
) -> list[str]:
    os.environ.update(environment, XDG_CACHE_HOME=host)
    return train(rank, world_size, config)


@pytest.mark.usefixtures("new_ranks")
def test_a_run_goes_on_on_another_host(
    ranks: Ranks, server: Server, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if requests fail at times. No credentials get into what the run writes."""
    environment = server.environment

    def config(steps: int, existing: Existing) -> LmConfig:
        small = small_config(tmp_path, steps=steps, checkpoint_every=2)
        output = dataclasses.replace(
            small.train.output, out=place_of(f"{root}/run"), existing=existing
        )
        return small.with_train(output=output)

    first, again = config(4, Existing.REFUSE), config(6, Existing.AUTO)
    server.faults[:] = [
        *(Fault("PUT", "metrics", 503), Fault("PUT", "sessions", "lost")),
        *(Fault("GET", "run.json", 500), Fault("HEAD", "sessions", "reset", times=2)),
    ]
    assert ranks(_train, 2, str(tmp_path / "a"), environment, first) == [["finished"]] * 2
    assert ranks(_train, 2, str(tmp_path / "b"), environment, again) == [["finished"]] * 2
    assert not [each for each in server.faults if each.times]
    assert checkpoint.steps(f"{root}/run/checkpoints") == [4, 6]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert [step for step, *_ in losses(again)] == [1, 2, 3, 4, 5, 6]
    place = place_of(f"{root}/run")
    assert isinstance(place, StorePath)
    for name in place.below():
        written = (place / name).read_small(1 << 24)
        assert ACCESS.encode() not in written and SECRET.encode() not in written, name


def test_a_run_does_not_begin_where_the_store_refuses(server: Server, tmp_path: Path) -> None:
    small = small_config(tmp_path)
    output = dataclasses.replace(small.train.output, out=place_of("s3://none/run"))
    config = small.with_train(output=output)
    assert config.files.store is not None
    for look in (config.files.store.reach, lambda: check_folder(config.check(World(0, 1, 0, 1)))):
        with pytest.raises(StoreError, match=r"s3://none/run: cannot be listed \(404.*NoSuchB"):
            look()
        server.faults[:] = [Fault("GET", "list-type", 403)]
        with pytest.raises(StoreError, match=r"s3://none/run: cannot be listed \(403 Forbidden"):
            look()


def test_a_forked_process_is_told_instead_of_hanging(server: Server, root: str) -> None:
    assert checkpoint.steps(root) == []
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            checkpoint.steps(root)
        except StoreError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"start it with the method 'spawn'" in os.read(read, 1000)
