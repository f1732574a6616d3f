"""Files of strangers, in every format: what is cut short is refused, and nothing in them runs.

What else may be done to them is in :mod:`tests.fuzz.readers`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwise.base.errors import CheckpointError
from tests.checkpoint.small import Runs
from tests.fuzz.corpus import READERS


def _files() -> Iterator[tuple[str, str]]:
    """Each format's reader, and each file that it does not do without."""
    for name, reader in READERS.items():
        yield from ((name, file) for file in reader.mutations if file != "config.json")


@pytest.fixture
def folder(tmp_path: Path, name: str) -> Path:
    """A checkpoint for the reader ``name``."""
    (tmp_path / "x").mkdir()
    READERS[name].make(tmp_path / "x")
    return tmp_path / "x"


@pytest.mark.parametrize(("name", "file"), [*_files()])
def test_a_file_cut_short_anywhere_is_refused_by_its_name(
    folder: Path, name: str, file: str
) -> None:
    data, parts = (folder / file).read_bytes(), 12
    for part in range(parts):
        (folder / file).write_bytes(data[: len(data) * part // parts])
        with pytest.raises(CheckpointError, match=re.escape(file)):
            READERS[name].read(folder)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("dcp", ".metadata"),
        *((name, file) for name, file in _files() if name in ("ranks", "torch-xla", "own-rank")),
    ],
)
def test_no_code_in_a_file_runs(folder: Path, name: str, file: str) -> None:
    evidence = folder / "evidence"
    if file == ".metadata":
        (folder / file).write_bytes(pickle.dumps(Runs(evidence)))
    else:
        torch.save({"model": {}, "shard_metadata": Runs(evidence)}, folder / file)
    with pytest.raises(CheckpointError, match="without running code"):
        READERS[name].read(folder)
    assert not evidence.exists()
