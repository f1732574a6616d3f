"""A short run of the fuzzer, and what it must be able to find."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.errors import CheckpointError
from tests.fuzz import corpus, readers
from tests.fuzz.readers import READERS, fuzz


@pytest.mark.parametrize("name", READERS)
def test_mutants_are_read_or_refused_within_bounds(name: str) -> None:
    result = fuzz(name, 200, seed=20)
    assert result.mutants == 200
    assert result.read
    assert result.refused
    assert not result.finds, "\n".join(map(str, result.finds))


def _leaks(folder: Path) -> corpus.Content:
    # Far above the limit: a thread of this process that ends meanwhile leaves room below it.
    torch.empty(16 * readers.MEMORY, dtype=torch.uint8)
    return {}


def _crashes(folder: Path) -> corpus.Content:
    raise RecursionError("of a reader")


def _talks(folder: Path) -> corpus.Content:
    raise CheckpointError("of two\nlines")


def _believes(folder: Path) -> corpus.Content:
    return {"model.safetensors": (folder / "model.safetensors").read_bytes()}


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (_leaks, "DefaultCPUAllocator|memory"),
        (_crashes, "RecursionError: of a reader"),
        (_talks, "of several lines"),
        (_believes, "holds other than the original"),
    ],
)
def test_a_reader_that_breaks_a_promise_is_found(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], corpus.Content], what: str
) -> None:
    reader = READERS["safetensors"]
    calls: list[Path] = []

    def first_well(folder: Path) -> corpus.Content:
        calls.append(folder)
        return reader.read(folder) if len(calls) == 1 and read is not _believes else read(folder)

    broken = dataclasses.replace(reader, read=first_well, sealed=lambda name, data: True)
    monkeypatch.setattr(readers, "READERS", {"broken": broken})
    result = fuzz("broken", 3, seed=1)
    assert len(result.finds) == 3
    assert all(re.search(what, find.what) for find in result.finds), result.finds


# ---- what is no file ----


def _pipe(path: Path) -> Any:
    os.mkfifo(path)


def _socket(path: Path) -> Any:
    opened = socket.socket(socket.AF_UNIX)
    opened.bind(str(path))
    return opened


def _endless(path: Path) -> Any:
    path.symlink_to("/dev/zero")


def _circle(path: Path) -> Any:
    path.symlink_to(path)


def _places() -> Iterator[tuple[str, str]]:
    for name, reader in READERS.items():
        for file in reader.mutations:
            if file != "config.json":  # which is left out where it cannot be read
                yield name, file


@pytest.mark.parametrize("put", [_pipe, _socket, _endless, _circle, Path.mkdir])
@pytest.mark.parametrize(("name", "file"), [*_places()])
def test_what_is_no_file_is_refused_and_not_waited_for(
    name: str,
    file: str,
    put: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    READERS[name].make(folder)
    (folder / file).unlink()
    monkeypatch.chdir(folder)  # the name of a socket may not be long
    kept = put(Path(file))
    with pytest.raises(CheckpointError, match=r"expected|missing|no checkpoint") as caught:
        READERS[name].read(folder)
    if kept is not None:
        kept.close()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("put", [_pipe, _endless])
def test_a_configuration_that_is_no_file_is_left_out(
    put: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    READERS["hf"].make(folder)
    (folder / "config.json").unlink()
    put(folder / "config.json")
    assert READERS["hf"].read(folder)["config"] == "None"
