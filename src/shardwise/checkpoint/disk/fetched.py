"""Objects of a store as files of this host, for programs that read files. Torch is not imported.

    ~/.cache/shardwise/fetched/books-1f0c...f2/    complete, or not there
    ~/.cache/shardwise/fetched/.books-1f0c...f2.partial/ of a process that fetches, or was killed

The name of a folder depends on the entity tags of what is in it: what was replaced in the store is
fetched again, and whoever reads the former files still has them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from shardwise.base.caches import cache_folder
from shardwise.base.errors import CheckpointError
from shardwise.base.files import LockHandle, NewFile
from shardwise.base.units import binary_size
from shardwise.checkpoint.disk.beside import folders_of, written_beside
from shardwise.checkpoint.disk.commit import partial_of, remove
from shardwise.checkpoint.disk.companions import TOKENIZER, is_companion
from shardwise.checkpoint.disk.store_path import StoredObject, StorePath
from shardwise.checkpoint.disk.store_reads import StoreReads

_MOST_FILES = 10_000  # of one place
_PART = 8 << 20  # bytes of a request
_BESIDE = ("config.json", "run.json")  # weights, and no companions of theirs

Files = Mapping[str, StoredObject]
"""Objects by the rest of their names below a place."""


def _quiet(total: int, folder: Path) -> Callable[[int], object]:
    return lambda moved: None


def cached(
    place: StorePath,
    sources: Mapping[StorePath, Files],
    *,
    most: float,
    begin: Callable[[int, Path], Callable[[int], object]] = _quiet,
) -> Path:
    """The folder of this host that has objects of a store, which are fetched unless they are there.

    Several processes may ask for it at once; one of them fetches.

    Args:
        place: what the user has named.
        sources: the objects, by the place that they are below. No two have one name.
        most: bytes of each.
        begin: called with all bytes and the folder, before some are fetched; what it returns is
            called with the bytes of each part.

    Raises:
        CheckpointError: there are too many or too large ones, a name leads elsewhere, one was
            replaced meanwhile, or the disk has no room.
        StoreError: the object store does not answer.
    """
    digest = hashlib.sha256()
    for source, files in sources.items():
        for name, found in sorted(files.items()):
            version = found.tag or found.modified
            digest.update(f"{source}\0{name}\0{found.size}\0{version}\n".encode())
    folder = folder_for("fetched", place, digest.hexdigest())
    total = sum(found.size for files in sources.values() for found in files.values())
    try:
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}-lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        with LockHandle(handle):
            fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.is_dir():  # by now
                return folder
            remove(partial_of(folder))  # which may take up the room
            _check_room(place, total, folder.parent)
            moved = begin(total, folder)
            with written_beside(folder, None) as partial:
                partial.mkdir()
                for source, files in sources.items():
                    fetch(source, files, partial, most, moved)
    except OSError as error:
        raise CheckpointError(
            f"{place}: cannot be fetched to {folder} ({error.strerror})"
        ) from None
    return folder


def _check_room(place: StorePath, total: int, folder: Path) -> None:
    if (free := shutil.disk_usage(folder).free) < total:
        raise CheckpointError(
            f"{place}: found {binary_size(total)}, and {binary_size(free)} free in {folder}, "
            "expected room for it; XDG_CACHE_HOME names another folder"
        )


def cached_companions(model: StorePath, most: int) -> Path:
    """The folder of this host with the small files of a model: configuration, tokenizer, run.json.

    Args:
        model: a model, a run, or a checkpoint in one.
        most: bytes of each file.

    Raises:
        CheckpointError: see :func:`cached`.
        StoreError: the object store does not answer.
    """
    seen: set[str] = set()
    sources: dict[StorePath, Files] = {}
    for folder in folders_of(model):
        for each in (folder, folder / TOKENIZER):
            sources[each] = {
                name: found
                for name, found in each.listed()[1].items()
                if name not in seen and (name in _BESIDE or is_companion(name))
            }
            seen |= sources[each].keys()
    return cached(model, sources, most=most)


def fetch(
    source: StorePath,
    files: Files,
    folder: Path,
    most: float,
    moved: Callable[[int], object] = lambda moved: None,
) -> None:
    """Fetch objects to files that do not exist, and wait until they are on the disk.

    Args:
        source: what they are below.
        files: the objects.
        folder: where the files go.
        most: bytes of each.
        moved: called with the bytes of each part.

    Raises:
        CheckpointError: there are too many or too large ones, a name leads elsewhere, or one was
            replaced meanwhile.
        OSError: a file cannot be written.
        StoreError: the object store does not answer.
    """
    if len(files) > _MOST_FILES:
        raise CheckpointError(
            f"{source}: found {len(files):,} files, expected at most {_MOST_FILES:,}"
        )
    for name, found in files.items():
        try:
            path = source / name
        except ValueError as error:
            raise CheckpointError(f"{source}: {str(error).removeprefix('path: ')}") from None
        if found.size > most:
            raise CheckpointError(f"{path}: found {found.size:,} bytes, expected at most {most:,}")
    sizes = {name: found.size for name, found in files.items()}
    tags = {name: found.tag for name, found in files.items()}
    buffer = memoryview(bytearray(min(_PART, max(sizes.values(), default=0))))
    with StoreReads(source, sizes, tags=tags) as reads:
        for name, size in sizes.items():
            reads.want(name, 0, size)
        for name, size in sizes.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with NewFile(target) as file:
                for start in range(0, size, _PART):
                    part = buffer[: size - start]
                    reads.read(name, part, start)
                    file.write(part)
                    moved(part.nbytes)


def folder_for(kind: str, place: StorePath, version: str = "") -> Path:
    """The folder of this host for files of a place in a store.

    Args:
        kind: the folder of the caches that it is in.
        place: the place; each has its own.
        version: each has its own.

    Raises:
        CheckpointError: this user has no folder for caches.
    """
    try:
        caches = cache_folder()
    except RuntimeError:  # no HOME, and the system does not know the user
        raise CheckpointError(
            "HOME: found no home folder, expected one, or XDG_CACHE_HOME"
        ) from None
    name = re.sub(r"[^\w.-]", "_", place.name, flags=re.ASCII).lstrip(".")[:64] or kind[:-1]
    digest = hashlib.sha256(f"{place}{version}".encode()).hexdigest()
    return caches / kind / f"{name}-{digest[:16]}"
