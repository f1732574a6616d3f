"""Looking at checkpoints: which there are, and whether what they hold is what was written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.checkpoint.disk.commit import check_complete, check_files, step_folder
from shardwise.checkpoint.disk.entries import Manifest, TensorEntry
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.disk.pieces import LEAST_BUFFER, PieceReader
from shardwise.checkpoint.formats.detect import Format, format_of, open_source, steps_root
from shardwise.checkpoint.formats.source import DEFAULT_BUFFER, Watch, unwatched
from shardwise.errors import CheckpointError

_LOOKS = 50  # at a folder in which a run saves and deletes meanwhile
_PATIENCE = 10  # looks until what was found is good enough, if a run deletes faster than we look


@dataclass(frozen=True)
class Listed:
    """One checkpoint.

    Attributes:
        path: its folder or file.
        step: by its name; ``None`` if the name does not say.
        format: ``None`` if it is none that is known, as that of a folder being written.
        nbytes: of all its files.
        problem: why it is not complete; empty if it is.
        world_size: ranks that saved it; ``None`` if the format does not tell.
        mesh: the mesh of the model; empty if it was not sharded, or the format does not tell.
        strategy: how it was sharded, in words; empty likewise.
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
    """The checkpoints in a folder, by step; or the one that the path is itself.

    Complete or not is told by manifests and the sizes of files; the files are not read. What a run
    saves or deletes meanwhile is shown as it was or as it is, or not at all. A symbolic link among
    the steps is shown as one, and not followed.

    Args:
        path: a run, a folder of ``step-...`` folders, or a checkpoint of any format.

    Raises:
        CheckpointError: there is nothing.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: found nothing there, expected a folder of checkpoints")
    found = _look_around(steps_root(path))
    if found:
        return sorted(found, key=lambda each: (each.step is None, each.step or 0, each.path))
    if format_of(path) is not None:
        return [_look(path)]
    if path.is_file():
        raise CheckpointError(f"{path}: found a file, expected a folder of checkpoints")
    return []


def newer_incomplete(path: Path, checkpoint: Path) -> list[Listed]:
    """What of the checkpoints in ``path`` is newer than ``checkpoint``, and not complete.

    One that is being written, or that a killed run was writing, does not count.
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
    """Look at all checkpoints in a folder, again if one was renamed or deleted meanwhile."""
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
    return _is_partial(path) or _step_of(path) is not None or format_of(path) is not None


def _is_partial(folder: Path) -> bool:
    return folder.name.startswith(".") and folder.name.endswith(".partial")


def _look_steadily(path: Path) -> Listed | None:
    """Look at one entry of a folder; ``None`` if it was renamed, replaced or deleted meanwhile."""
    before = _identity(path)
    try:
        listed = _look_inside(path)
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        listed = Listed(path, _step_of(path), None, 0, problem)
    return listed if before is not None and _identity(path) == before else None


def _identity(path: Path) -> tuple[int, ...] | None:
    """What tells an entry from another one of the same name; ``None`` if it has gone."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    # The number of one that was deleted may come back. What is being written changes all the time.
    changed = 0 if _is_partial(path) else status.st_ctime_ns
    return status.st_dev, status.st_ino, changed


def _look_inside(path: Path) -> Listed:
    if path.is_symlink():
        problem = "is a symbolic link, which is not followed"
        return Listed(path, _step_of(path), None, 0, problem)
    return _look(path)


def _step_of(folder: Path) -> int | None:
    name = folder.name.removeprefix(".").removesuffix(".partial")
    digits = name.removeprefix("step-")
    if not digits.isdecimal() or step_folder(folder.parent, int(digits)).name != name:
        return None
    return int(digits)


def _look(path: Path) -> Listed:
    form = format_of(path)
    step, nbytes = _step_of(path), _size(path)
    if _is_partial(path):
        problem = "is being written or deleted, or was left by a killed process"
        return Listed(path, step, form, nbytes, problem)
    if form is None:
        return Listed(path, step, form, nbytes, "has no manifest.json")
    if form is not Format.SHARDWISE:
        return Listed(path, step, form, nbytes, _problem(path))
    try:
        manifest = read_manifest(path)
        check_complete(path)
    except CheckpointError as error:
        return Listed(path, step, form, nbytes, str(error))
    return Listed(
        path, step, form, nbytes, "", manifest.world_size, manifest.mesh, manifest.facts.strategy
    )


def _problem(path: Path) -> str:
    """Why a checkpoint of others cannot be read; empty if it can."""
    try:
        open_source(path).close()
    except CheckpointError as error:
        return str(error)
    return ""


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    total = 0
    for each in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # of a folder that is being deleted
            total += each.stat().st_size if each.is_file() else 0
    return total


@dataclass(frozen=True)
class Damage:
    """A piece that is not what was written.

    Attributes:
        file: where it lies.
        parameter: the tensor that it is a part of.
        piece: which part: the name of the tensor, and the rows and columns.
        reason: what is wrong.
    """

    file: str
    parameter: str
    piece: str
    reason: str


def verify(
    path: Path, *, buffer: int = DEFAULT_BUFFER, watch: Watch = unwatched
) -> Iterator[Damage]:
    """Read a checkpoint of Shardwise, and compare every checksum.

    Args:
        path: its folder.
        buffer: bytes that may be in memory.
        watch: told how many bytes there are, and then how many were read.

    Yields:
        What is damaged.

    Raises:
        CheckpointError: its manifest cannot be read; or it is deleted meanwhile.
        ValueError: the buffer is too small.
    """
    folder = _identity(path.resolve())
    for damage in _damages(path, buffer, watch):
        if _identity(path.resolve()) != folder:
            raise CheckpointError(f"{path}: was deleted while it was read; a run has newer ones")
        yield damage


def _damages(path: Path, buffer: int, watch: Watch) -> Iterator[Damage]:
    manifest = read_manifest(path)
    lost = _lost_files(path, manifest)
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


def _lost_files(path: Path, manifest: Manifest) -> dict[str, str]:
    """Files that are missing, or have another size than they had, and what is wrong with them."""
    lost = {}
    for name, size in manifest.files.items():
        try:
            check_files(path, replace(manifest, files={name: size}))
        except CheckpointError as error:
            lost[name] = str(error)
    return lost
