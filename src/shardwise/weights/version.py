"""Versions of published weights, as readers see them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shardwise.base.errors import CheckpointError

#: Changes when a reader of an earlier release would misread what is published.
FORMAT = 1
_MOST_NAME = 200  # bytes, so that a suffix fits in the name of a file


@dataclass(frozen=True)
class Version:
    """A version of published weights.

    Attributes:
        number: counted by the publisher; a later one is higher, unless publishing began anew.
        origin: what tells it from a version of the same number that another process published.
    """

    number: int
    origin: str


class Versions(Protocol):
    """Where the versions of one name are read."""

    def newest(self) -> Version | None:
        """The newest version; ``None`` if there is none.

        Raises:
            CheckpointError: what is there cannot be read.
        """

    def read(self) -> tuple[Version, Iterator[tuple[str, torch.Tensor]]] | None:
        """The newest version, and its tensors by name; ``None`` if there is none.

        Raises:
            CheckpointError: what is there cannot be read.
        """


def quoted(name: str) -> str:
    """The name of published weights as the name of a file. It may contain anything.

    Raises:
        ValueError: it is empty or too long.
    """
    safe = urllib.parse.quote(name, safe=" ")
    if safe.startswith("."):
        safe = f"%2E{safe[1:]}"  # neither hidden nor the folder above
    if not 0 < len(safe) <= _MOST_NAME:
        raise ValueError(
            f"name: found {name[:40]!r}, expected 1 to {_MOST_NAME} characters once it is quoted "
            "as in a URL"
        )
    return safe


def check_format(where: Path, found: int) -> None:
    """Check that this release can read what is published.

    Raises:
        CheckpointError: it is of a release that publishes in another form.
    """
    if found != FORMAT:
        raise CheckpointError(
            f"{where}: found format {found}, expected {FORMAT}; publish and read with the same "
            "release of Shardwise"
        )
