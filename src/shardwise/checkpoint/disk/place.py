"""Where a checkpoint is: a folder, or a name in an object store. Torch is not imported."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from shardwise.base.files import Links, read_small

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.store_path import StorePath

#: A path, as text or as an object.
StrPath = str | os.PathLike[str]
Place: TypeAlias = "Path | StorePath"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def place_of(path: StrPath) -> Place:
    """What a path means: a URL, such as ``s3://bucket/run``, is a name in an object store.

    Raises:
        ValueError: the URL is of no store, or has a user name, a password or a query.
    """
    if isinstance(path, Path) or not is_url(os.fspath(path)):
        return Path(path)
    from shardwise.checkpoint.disk.store_path import StorePath  # of no use to folders

    return StorePath(os.fspath(path))


def is_url(text: str) -> bool:
    """Whether a text is a URL, and no path of this host."""
    return _URL.match(text) is not None


def in_memory(place: StrPath) -> bool:
    """Whether a place is in the memory of this process, and ends with it."""
    return os.fspath(place).startswith("memory:")


def folder_of(name: str, path: StrPath) -> Path:
    """The path of this host that an argument is, where nothing else is known yet.

    Raises:
        ValueError: it is a URL, of which a folder of this host would be made.
    """
    if is_url(os.fspath(path)):
        raise ValueError(
            f"{name}: found a URL, expected a folder of this host; object stores get Shardwise's "
            "own checkpoints, and safetensors"
        )
    return Path(path)


def read_whole(path: Place, most: int, links: Links = Links.FOLLOW) -> bytes:
    """Read a file of at most ``most`` bytes.

    Raises:
        CheckpointError: it is missing, or larger, or no regular file.
        StoreError: the object store does not answer.
    """
    return read_small(path, most, links) if isinstance(path, Path) else path.read_small(most)


def absolute(path: StrPath) -> Place:
    """The same, whatever the working directory will be."""
    place = place_of(path)
    return Path(os.path.abspath(place)) if isinstance(place, Path) else place
