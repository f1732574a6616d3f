"""Where documents come from: the Hugging Face hub, or local files of any of these kinds.

    hf:allenai/c4:en          a dataset of the hub, and its configuration; a local folder works too
    *.jsonl, *.json           an object a line, its text in the field "text"
    *.parquet                 a row a document, its text in the column "text"
    everything else           text: a document is a paragraph, which ends at an empty line

Local files may be compressed (.zst, .gz). Nothing here imports torch or opens a file: this is what
the command line checks before processes start.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.launch.errors import UserError
from shardwise.recipes.config import OptionError
from shardwise.recipes.data import find_files

HUB = "hf:"
_COMPRESSED = {".zst": "zstandard", ".gz": None}  # suffix -> package that reads it
_DOCUMENTS = {".jsonl", ".parquet"}  # what nobody wants to learn byte by byte
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Documents:
    """Documents to be streamed, in the order that their source has.

    Attributes:
        name: for people: where they come from.
        builder: what ``datasets.load_dataset`` is asked for: ``json``, ``parquet``, ``text``, or
            the name of a dataset.
        configuration: of that dataset, if it has several.
        files: local files; empty for a dataset of the hub.
        tokenizer: name or folder of a tokenizer of ``transformers``; None: bytes.
        commit: of the hub, at which to read; None: the newest.
    """

    name: str
    builder: str
    configuration: str | None = None
    files: tuple[Path, ...] = ()
    tokenizer: str | None = None
    commit: str | None = None

    @property
    def summary(self) -> str:
        """For people: how much there is, as far as that is known before it is read."""
        counted = f", {len(self.files)} {'file' if len(self.files) == 1 else 'files'}"
        return f"{self.name}, streamed{counted if self.files else ''}"

    def facts(self) -> dict[str, Any]:
        """For ``run.json``."""
        return {
            "name": self.name,
            "summary": self.summary,
            "files": len(self.files),
            "tokenizer": self.tokenizer or "bytes",
            "fingerprint": self.fingerprint(),
        }

    def fingerprint(self) -> str:
        """A short text that changes when the tokens or their order change."""
        digest = hashlib.sha256(f"{self.configuration}\0{self.tokenizer}\n".encode())
        if not self.files:
            digest.update(self.builder.encode())
        for file in self.files:
            digest.update(f"{file.name}\0{file.stat().st_size}\n".encode())
        return digest.hexdigest()[:16]


def is_streamed(paths: Sequence[str], tokenizer: str | None) -> bool:
    """Whether ``--data`` and ``--tokenizer`` ask for documents, and not for files of bytes."""
    if tokenizer is not None or any(path.startswith(HUB) for path in paths):
        return True
    return bool(paths) and all(_kind(file) in _DOCUMENTS for file in find_files(paths))


def find_documents(paths: Sequence[str], tokenizer: str | None) -> Documents:
    """Find out what ``--data`` names.

    Raises:
        OptionError: several sources at once, files of several kinds, or nothing there.
        UserError: a package that reads them is not installed.
    """
    _require("datasets")
    if any(path.startswith(HUB) for path in paths):
        if len(paths) > 1:
            raise OptionError("--data", " and ".join(paths), f"one {HUB}NAME and nothing else")
        name, _, configuration = paths[0].removeprefix(HUB).partition(":")
        if not name:
            raise OptionError("--data", paths[0], "a dataset behind hf:, as hf:allenai/c4:en")
        return Documents(paths[0], name, configuration or None, (), tokenizer)
    files = find_files(paths)
    builders = {_builder(file): file for file in files}
    if len(builders) > 1:
        found = " and ".join(str(file) for file in builders.values())
        raise OptionError("--data", found, "files of one kind: .jsonl, .parquet or text")
    for file in files:
        _require(_COMPRESSED.get(file.suffix))
    name = ", ".join(paths) or "the Python standard library's source"
    return Documents(name, next(iter(builders)), None, tuple(files), tokenizer)


def _kind(file: Path) -> str:
    """The suffix that tells what is in a file, without that of its compression."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in _COMPRESSED]
    return suffixes[-1] if suffixes else ""


def _builder(file: Path) -> str:
    return _BUILDERS.get(_kind(file), "text")


def _require(package: str | None) -> None:
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"--data: streaming documents needs {package}, which is not installed here: "
            "pip install shardwise[data]"
        )
