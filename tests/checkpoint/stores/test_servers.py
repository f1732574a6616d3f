"""Checkpoints in the stores that other programs serve: S3 and Azure, more than one of S3."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from shardwise import checkpoint
from shardwise.app.recipes.core.recipe import RecipeConfig
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk import store_commit, store_path
from shardwise.checkpoint.disk.fetched import cached
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_path import StorePath
from shardwise.insight.schema.training import Existing
from tests.checkpoint.stores.programs import CARELESS, PROGRAMS, Program
from tests.cli.shell import call
from tests.recipes.running import train
from tests.recipes.small import small_config
from tests.worlds import Ranks

pytest.importorskip("obstore", reason="needs obstore: install .[test]")

Environment = dict[str, str]


def _serve(
    program: Program, temporary: pytest.TempPathFactory
) -> Iterator[tuple[str, Environment]]:
    if shutil.which(program.executable) is None:
        pytest.skip(f"needs {program.executable}: {program.install}")
    with program.serving(temporary.mktemp("store")) as environment:
        yield program.root, environment


@pytest.fixture(scope="module", params=PROGRAMS)
def _server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Environment]]:
    yield from _serve(PROGRAMS[request.param], tmp_path_factory)


@pytest.fixture(scope="module", params=CARELESS)
def careless(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Environment]]:
    yield from _serve(CARELESS[request.param], tmp_path_factory)


def _enter(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store_path._store_of.cache_clear()
    store_path._refusing.clear()


@pytest.fixture
def environment(_server: tuple[str, Environment]) -> Environment:
    return _server[1]


@pytest.fixture
def root(
    _server: tuple[str, Environment],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> str:
    _enter(_server[1], monkeypatch)
    return f"{_server[0]}/{request.node.name.partition('[')[0]}-{time.monotonic_ns()}"


def _model(seed: int) -> torch.nn.Module:
    """A model of a few MiB."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(3)))


def _equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _check(path: str, seed: int) -> None:
    loaded = _model(0)
    checkpoint.load(path, loaded)
    assert _equal(loaded, _model(seed))


def _place(root: str) -> StorePath:
    place = place_of(root)
    assert isinstance(place, StorePath)
    return place


def _objects(root: str) -> list[str]:
    return sorted(_place(root).below())


def test_what_is_saved_is_loaded_and_nothing_is_replaced(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_path, "_PART", 5 << 20)
    for step in (1, 2, 3):
        checkpoint.save(f"{root}/step-{step:08}", _model(step), keep_last=2)
    assert checkpoint.steps(root) == [2, 3]
    _check(f"{root}/step-00000003", 3)
    with pytest.raises(CheckpointError, match="already exists"):
        checkpoint.save(f"{root}/step-00000003", _model(4))
    assert len(_objects(root)) == 4


def test_of_two_that_save_one_name_one_wins(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = StorePath.create

    def late(self: StorePath, text: bytes) -> bool:
        monkeypatch.setattr(StorePath, "create", create)
        checkpoint.save(f"{root}/a", _model(1))  # another commits first
        return create(self, text)

    monkeypatch.setattr(StorePath, "create", late)
    with pytest.raises(CheckpointError, match="made by another process"):
        checkpoint.save(f"{root}/a", _model(2))
    _check(f"{root}/a", 1)
    assert len(_objects(root)) == 2


def test_models_are_converted_and_their_weights_read(root: str) -> None:
    checkpoint.save(f"{root}/a", _model(1))
    assert call("checkpoint", "convert", f"{root}/a", f"{root}/hf", "--to", "hf") == 0
    assert call("checkpoint", "diff", f"{root}/a", f"{root}/hf") == 0
    loaded = _model(0)
    checkpoint.load_weights(f"{root}/hf", loaded)
    assert _equal(loaded, _model(1))


def test_what_a_killed_save_left_is_listed_and_deleted(
    root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(f"{root}/step-00000001", _model(1))
    before = _objects(root)
    with monkeypatch.context() as patch:
        patch.setattr(store_commit.StoreCommit, "finish", _die)
        patch.setattr(store_commit.StoreCommit, "abandon", lambda self: None)
        with pytest.raises(CheckpointError, match="killed"):
            checkpoint.save(f"{root}/step-00000002", _model(2))
    assert call("checkpoint", "ls", root, "--leftovers") == 0
    assert "may still be written" in capsys.readouterr().out
    assert len(_objects(root)) == len(before) + 2
    monkeypatch.setattr(store_commit, "LEFT", timedelta(seconds=-1))
    assert call("checkpoint", "clean", root) == 0
    assert _objects(root) == before


def _die(*_: object) -> None:
    raise RuntimeError("killed")


def test_files_are_fetched_and_what_is_replaced_is_noticed(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = _place(root)
    for name in ("a.txt", "more/b.txt"):
        (place / name).write([b"x" * 100_000], 100_000)
    files = place.below()
    folder = cached(place, {place: files}, most=1 << 20)
    assert (folder / "more" / "b.txt").read_bytes() == b"x" * 100_000
    (place / "a.txt").write([b"y" * 100_000], 100_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another host"))
    with pytest.raises(CheckpointError, match=r"a\.txt: was replaced while it was read"):
        cached(place, {place: files}, most=1 << 20)


def _train(rank: int, world_size: int, environment: Environment, config: RecipeConfig) -> list[str]:
    os.environ.update(environment)
    return train(rank, world_size, config)


@pytest.mark.usefixtures("new_ranks")
def test_a_run_goes_on(ranks: Ranks, root: str, environment: Environment, tmp_path: Path) -> None:
    environment = environment | {"XDG_CACHE_HOME": str(tmp_path / "host")}
    for steps, existing in ((2, Existing.REFUSE), (4, Existing.AUTO)):
        small = small_config(tmp_path, steps=steps, checkpoint_every=2)
        output = dataclasses.replace(
            small.train.output, out=place_of(f"{root}/run"), existing=existing
        )
        config = small.with_train(output=output)
        assert ranks(_train, 2, environment, config) == [["finished"]] * 2
    assert checkpoint.steps(f"{root}/run/checkpoints") == [2, 4]


def _save_many(root: str, begun: Connection) -> None:
    begun.send(None)
    for step in range(2, 99):
        checkpoint.save(f"{root}/step-{step:08}", _model(step), keep_last=2)


@pytest.mark.parametrize("wait", [0.1, 0.37])
def test_kills_tear_nothing_and_leave_nothing(
    wait: float, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(f"{root}/step-00000001", _model(1))
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=_save_many, args=(root, its))
    process.start()
    mine.recv()
    time.sleep(wait)
    process.kill()
    process.join()
    for step in checkpoint.steps(root):
        _check(f"{root}/step-{step:08}", step)
    monkeypatch.setattr(store_commit, "LEFT", timedelta(seconds=-1))
    checkpoint.save(f"{root}/step-00000099", _model(99), keep_last=1)
    assert checkpoint.steps(root) == [99]
    assert len(_objects(root)) == 2


def test_a_store_that_replaces_what_it_should_refuse_is_refused(
    careless: tuple[str, Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, environment = careless
    _enter(environment, monkeypatch)
    with pytest.raises(CheckpointError, match="was written a second time, although on condition"):
        checkpoint.save(f"{root}/run/a", _model(1))
    assert _objects(f"{root}/run") == []
