"""List the checkpoints of a folder, and verify their checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.base.errors import CheckpointError
from shardwise.base.files import size_of
from shardwise.checkpoint.disk.commit import check_complete, is_partial, lost_files, step_folder
from shardwise.checkpoint.disk.entries import TensorEntry
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.disk.pieces import LEAST_BUFFER, PieceReader
from shardwise.checkpoint.formats.detect import (
    Format,
    format_of,
    open_source,
    refuse_foreign,
    steps_root,
)
from shardwise.checkpoint.formats.filenames import files_beside, sets_of_rank_files
from shardwise.checkpoint.formats.source import DEFAULT_BUFFER, Watch, unwatched

_LOOKS = 50  # attempts to list a folder that a run changes at the same time
_PATIENCE = 10  # attempts after which an incomplete list is accepted


@dataclass(frozen=True)
class Listed:
    """One checkpoint in a list.

    Attributes:
        path: its folder or file.
        step: the step in its name; ``None`` if there is none.
        format: its format; ``None`` if it is unknown, as while a folder is being written.
        nbytes: size of all its files.
        problem: why it is not complete; empty if it is complete.
        world_size: number of ranks that saved it; ``None`` if the format does not record it.
        mesh: the mesh of the model; empty if it was not sharded or the format does not record it.
        strategy: the sharding strategy; empty in the same cases.
    """

    path: Path
    step: int | None
    format: Format | None
    nbytes: int
    problem: str = ""
    world_size: int | None = None
    mesh: str = ""
    strategy: str = ""


def list_checkpoints(path: Path) -> list[Listed]:
    """List the checkpoints in a folder by step, or the checkpoint at a path.

    Completeness is checked by manifests and file sizes; data is not read. A checkpoint that a run
    saves or deletes at the same time may be listed in its old or new state, or not at all. Symbolic
    links among the steps are listed, but not followed.

    Args:
        path: a run, a folder of ``step-...`` folders, or a checkpoint of any format.

    Raises:
        CheckpointError: the path does not exist, is a file that is no checkpoint, or has files that
            other software alone reads.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: found nothing there, expected a folder of checkpoints")
    found = _look_around(steps_root(path))
    if found:
        return sorted(found, key=lambda each: (each.step is None, each.step or 0, each.path))
    sets = sets_of_rank_files(path)
    if sets and format_of(path) is Format.RANKS:
        return [_look(files[0]) for files in sets]
    if format_of(path) is not None:
        return [_look(path)]
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: found a file, expected a folder of checkpoints")
    refuse_foreign(path)
    return []


def newer_incomplete(path: Path, checkpoint: Path) -> list[Listed]:
    """The incomplete checkpoints in ``path`` that are newer than ``checkpoint``.

    Leaves out checkpoints that are being written, or that a killed run was writing.
    """
    step = _step_of(checkpoint)
    if path == checkpoint or step is None:
        return []
    return [
        each
        for each in list_checkpoints(path)
        if each.problem and not each.path.name.startswith(".") and (each.step or 0) > step
    ]


def _look_around(root: Path) -> list[Listed]:
    """List all checkpoints in a folder; start over if one was renamed or deleted meanwhile."""
    found: list[Listed] = []
    for look in range(_LOOKS):
        paths = _candidates(root)
        looked = [_look_steadily(path) for path in paths]
        found = [each for each in looked if each is not None]
        if any(not each.problem for each in found):
            if len(found) == len(paths) or look >= _PATIENCE:
                break
        elif len(found) == len(paths) and _candidates(root) == paths:
            break
    return found


def _candidates(root: Path) -> list[Path]:
    """The folders that are listed, and the links that have the name of a step."""
    try:
        # What kind of entry it is comes with its name: one that goes meanwhile stays in the list.
        with os.scandir(root) as entries:
            return [Path(entry.path) for entry in entries if _is_listed(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_listed(entry: os.DirEntry[str]) -> bool:
    path = Path(entry.path)
    if entry.is_symlink():
        return _step_of(path) is not None
    if not entry.is_dir():
        return False
    return is_partial(path) or _step_of(path) is not None or format_of(path) is not None


def _look_steadily(path: Path) -> Listed | None:
    """Examine an entry of a folder; ``None`` if it was renamed, replaced or deleted meanwhile."""
    before, problem = _identity(path), "is a symbolic link, which is not followed"
    listed = Listed(path, _step_of(path), None, 0, problem)
    try:
        if not path.is_symlink():
            listed = _look(path)
    except OSError as error:
        listed = replace(listed, problem=f"cannot be read ({error.strerror or error})")
    return listed if before is not None and _identity(path) == before else None


def _identity(path: Path) -> tuple[int, ...] | None:
    """What distinguishes an entry from a later one of the same name; ``None`` if it is gone."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    # Inode numbers are reused, so the time counts too, except while the entry is being written.
    changed = 0 if is_partial(path) else status.st_ctime_ns
    return status.st_dev, status.st_ino, changed


def _step_of(folder: Path) -> int | None:
    name = folder.name.removeprefix(".").removesuffix(".partial")
    digits = name.removeprefix("step-")
    if not digits.isdecimal() or step_folder(folder.parent, int(digits)).name != name:
        return None
    return int(digits)


def _look(path: Path) -> Listed:
    form, problem, saved = format_of(path), "", dict[str, Any]()
    nbytes = path.stat().st_size if path.is_file() else size_of(path)
    if path.is_file() and form is Format.RANKS:
        files = files_beside(path)
        saved = {"world_size": len(files)}
        nbytes = sum(file.stat().st_size for file in files)
    try:
        if is_partial(path):
            problem = "is being written or deleted, or was left by a killed process"
        elif form is None:
            problem = "has no manifest.json"
        elif form is Format.SHARDWISE:
            manifest = read_manifest(path)
            check_complete(path)
            how = {"mesh": manifest.mesh, "strategy": manifest.facts.strategy}
            saved = {"world_size": manifest.world_size, **how}
        else:
            open_source(path).close()
    except CheckpointError as error:
        problem = str(error)
    return Listed(path, _step_of(path), form, nbytes, problem, **saved)


@dataclass(frozen=True)
class Damage:
    """A damaged piece of a checkpoint.

    Attributes:
        file: the file that contains it.
        parameter: the tensor that it belongs to.
        piece: the tensor's name, and the rows and columns of the piece.
        reason: what is wrong.
    """

    file: str
    parameter: str
    piece: str
    reason: str


def verify(
    path: Path, *, buffer: int = DEFAULT_BUFFER, watch: Watch = unwatched
) -> Iterator[Damage]:
    """Read a checkpoint in Shardwise's format, and compare every checksum.

    Args:
        path: its folder.
        buffer: bytes of memory to use.
        watch: called with the number of bytes to read; the function that it returns is called with
            the bytes of each part that was read.

    Yields:
        Every damaged piece.

    Raises:
        CheckpointError: the manifest cannot be read, or the checkpoint is deleted meanwhile.
        ValueError: the buffer is too small.
    """
    folder = _identity(path.resolve())
    for damage in _damages(path, buffer, watch):
        if _identity(path.resolve()) != folder:
            raise CheckpointError(f"{path}: was deleted while it was read; a run has newer ones")
        yield damage


def _damages(path: Path, buffer: int, watch: Watch) -> Iterator[Damage]:
    manifest = read_manifest(path)
    lost = lost_files(path, manifest)
    in_file: dict[str, list[TensorEntry]] = {file: [] for file in lost}
    for entry in manifest.tensors:
        for file in {piece.file for piece in entry.pieces} & lost.keys():
            in_file[file].append(entry)
    for file, reason in lost.items():
        entries = in_file[file]
        others = f" and {len(entries) - 1} others" if len(entries) > 1 else ""
        yield Damage(file, f"{entries[0].name}{others}" if entries else "none", "all", reason)
    with PieceReader(path, manifest, buffer=max(buffer, LEAST_BUFFER)) as reader:
        progress = watch(sum(entry.nbytes for entry in manifest.tensors))
        for entry in manifest.tensors:
            for piece in entry.pieces:
                if piece.file in lost:
                    continue
                try:
                    for chunk in reader.stream(entry, piece):
                        progress(chunk.nbytes)
                except CheckpointError as error:
                    yield Damage(piece.file, entry.name, entry.key(piece), str(error))
