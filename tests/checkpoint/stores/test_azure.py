"""Checkpoints in Azure's storage, of its emulator on this machine: ``npm install -g azurite``."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import multiprocessing
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection

import pytest
import torch

from shardwise import checkpoint
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk import store_commit, store_path
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_path import StorePath

pytest.importorskip("obstore", reason="needs obstore: install .[test]")
_AZURITE = shutil.which("azurite-blob")
pytestmark = pytest.mark.skipif(_AZURITE is None, reason="needs azurite: npm install -g azurite")

_ACCOUNT = "devstoreaccount1"
# Of every emulator, by its documentation.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def _environment() -> Iterator[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
    command = [str(_AZURITE), *options, "--blobPort", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        _make_container(port, "runs")
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}",
        }
    finally:
        process.terminate()
        process.wait()


def _make_container(port: int, name: str) -> None:
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    signed = "\n".join(
        [
            *("PUT", "", "", "", "", "text/plain", *[""] * 6),
            *(f"{key}:{value}" for key, value in headers.items()),
            *(f"/{_ACCOUNT}/{_ACCOUNT}/{name}", "restype:container"),
        ]
    )
    digest = hmac.digest(base64.b64decode(_KEY), signed.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"http://127.0.0.1:{port}/{_ACCOUNT}/{name}?restype=container"
    headers["Content-Type"] = "text/plain"
    urllib.request.urlopen(
        urllib.request.Request(url, method="PUT", data=b"", headers=headers)
    ).close()


@pytest.fixture
def root(
    _environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    for name, value in _environment.items():
        monkeypatch.setenv(name, value)
    store_path._store_of.cache_clear()
    return f"abfss://runs@{_ACCOUNT}.dfs.core.windows.net/{request.node.name}"


def _model(seed: int) -> torch.nn.Module:
    """A model of a few MiB."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(3)))


def _check(path: str, seed: int) -> None:
    loaded = _model(0)
    checkpoint.load(path, loaded)
    pairs = zip(loaded.parameters(), _model(seed).parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def _objects(root: str) -> list[str]:
    place = place_of(root)
    assert isinstance(place, StorePath)
    return sorted(place.below())


def test_what_is_saved_is_loaded_and_nothing_is_replaced(root: str) -> None:
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
