"""List the checkpoints of a folder, and verify their checksums."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import CheckpointError, StoreError
from shardwise.base.files import size_of
from shardwise.checkpoint.disk.columns import files_of
from shardwise.checkpoint.disk.commit import (
    check_files,
    clean,
    is_partial,
    leftovers,
    lost_files,
    step_folder,
)
from shardwise.checkpoint.disk.entries import MANIFEST, StoredPiece, TensorEntry
from shardwise.checkpoint.disk.filenames import files_beside, sets_of_rank_files
from shardwise.checkpoint.disk.manifest import in_files, read_manifest
from shardwise.checkpoint.disk.pieces import LEAST_BUFFER, PieceReader
from shardwise.checkpoint.disk.place import Place
from shardwise.checkpoint.formats.detect import (
    Format,
    format_among,
    format_of,
    open_source,
    refuse_foreign,
    steps_root,
)
from shardwise.checkpoint.formats.source import DEFAULT_BUFFER, Watch, unwatched

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.store_path import StoredObject, StorePath

_LOOKS = 50  # attempts to list a folder that a run changes at the same time
_PATIENCE = 10  # attempts after which an incomplete list is accepted


@dataclass(frozen=True)
class Listed:
    """One checkpoint in a list.

    Attributes:
        path: its folder or file, or its name in an object store.
        step: the step in its name; ``None`` if there is none.
        format: its format; ``None`` if it is unknown, as while a folder is being written.
        nbytes: size of all its files.
        problem: why it is not complete; empty if it is complete.
        world_size: number of ranks that saved it; ``None`` if the format does not record it.
        mesh: the mesh of the model; empty if it was not sharded or the format does not record it.
        strategy: the sharding strategy; empty in the same cases.
    """

    path: Place
    step: int | None
    format: Format | None
    nbytes: int
    problem: str = ""
    world_size: int | None = None
    mesh: str = ""
    strategy: str = ""


#: Of a checkpoint that a process is writing or deleting, or was.
UNFINISHED = "is being written or deleted, or was left by a killed process"


def list_checkpoints(path: Place) -> list[Listed]:
    """List the checkpoints in a folder by step, or the checkpoint at a path.

    Completeness is checked by manifests and file sizes; data is not read. A checkpoint that a run
    saves or deletes at the same time may be listed in its old or new state, or not at all. Symbolic
    links among the steps are listed, but not followed.

    Args:
        path: a run, a folder of ``step-...`` folders, or a checkpoint of any format; or the name of
            one of these in an object store.

    Raises:
        CheckpointError: the path does not exist, is a file that is no checkpoint, or has files that
            other software alone reads.
        StoreError: the object store does not answer.
    """
    if not isinstance(path, Path):
        return _list_stored(path)
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


def _list_stored(path: StorePath) -> list[Listed]:
    folders, files = path.listed()
    if path / "checkpoints" in folders and all(_step_of(each) is None for each in folders):
        folders, files = (path / "checkpoints").listed()
    looked = [(each, each.listed()[1]) for each in folders]
    found = [_look_stored(each, beside) for each, beside in looked if beside]
    found = [each for each in found if each.step is not None or each.format is not None]
    if not found and format_among(files) is not None:
        found = [_look_stored(path, files)]
    if not folders and not files:
        if (file := path.find()) is None:
            raise CheckpointError(f"{path}: found nothing there, expected a folder of checkpoints")
        found = [Listed(path, None, format_of(path), file.size)]
    return sorted(found, key=lambda each: (each.step is None, each.step or 0, str(each.path)))


def _look_stored(folder: StorePath, files: Mapping[str, StoredObject]) -> Listed:
    form, problem, saved = format_among(files), "", dict[str, Any]()
    try:
        problem, saved = _opened(folder, form)
    except StoreError:
        raise
    except CheckpointError as error:
        is_there = form is not Format.SHARDWISE or (folder / MANIFEST).is_file()
        problem = str(error) if is_there else UNFINISHED
    nbytes = sum(each.size for each in files.values())
    return Listed(folder, _step_of(folder), form, nbytes, problem, **saved)


def _opened(path: Place, form: Format | None) -> tuple[str, dict[str, Any]]:
    """Open a checkpoint; return what is wrong with its format, and how it was saved.

    Raises:
        CheckpointError: it is damaged, or in an object store in a format that is not read there.
    """
    if form is None:
        return "has no manifest.json", {}
    if form is not Format.SHARDWISE:
        open_source(path).close()
        return "", {}
    manifest = read_manifest(path)
    check_files(path, manifest)
    how = {"mesh": manifest.mesh, "strategy": manifest.facts.strategy}
    return "", {"world_size": manifest.world_size, **how}


@dataclass(frozen=True)
class Leftover:
    """What a killed process has left of a checkpoint.

    Attributes:
        path: the partial folder; in an object store, the name of the checkpoint.
        nbytes: size of its files.
        age: seconds since it began, or, in a folder, since something was written last.
        kept: why it is not deleted by :func:`delete_leftovers` yet; empty if it is.
    """

    path: Place
    nbytes: int
    age: float
    kept: str = ""


def list_leftovers(path: Place) -> list[Leftover]:
    """List what killed processes have left in a run, or in a folder of checkpoints.

    Args:
        path: a run, or a folder of ``step-...`` folders; or the name of one in an object store.

    Raises:
        CheckpointError: the path does not exist.
        OSError: it cannot be read.
        StoreError: the object store does not answer.
    """
    return [each for root in _roots(path) for each in _leftovers_in(root)]


def _leftovers_in(root: Place) -> Iterator[Leftover]:
    now = time.time()
    if isinstance(root, Path):
        for partial, kept in leftovers(root):
            with contextlib.suppress(FileNotFoundError):
                yield Leftover(partial, size_of(partial), now - _written_last(partial), kept)
        return
    from shardwise.checkpoint.disk import store_commit  # of no use to folders

    for folder, nbytes, began in store_commit.leftovers(root):
        left = began + store_commit.LEFT.total_seconds() - now
        kept = f"may still be written, for {left / 60:.0f} more minutes" if left > 0 else ""
        yield Leftover(folder, nbytes, now - began, kept)


def _written_last(partial: Path) -> float:
    return max(each.lstat().st_mtime for each in (partial, *partial.iterdir()))


def delete_leftovers(path: Place) -> None:
    """Delete what killed processes have left, as the next save would; what may be in use stays.

    Args:
        path: as for :func:`list_leftovers`.

    Raises:
        CheckpointError: the path does not exist.
        OSError: something cannot be deleted.
        StoreError: the object store does not answer, or refuses.
    """
    for root in _roots(path):
        if isinstance(root, Path):
            clean(root)
        else:
            from shardwise.checkpoint.disk.store_commit import clean_now  # of no use to folders

            clean_now(root)


def _roots(path: Place) -> list[Place]:
    """The folders of a run in which checkpoints are written: itself, and ``checkpoints``."""
    inner = path / "checkpoints"
    if isinstance(path, Path):
        if not path.is_dir():
            raise CheckpointError(f"{path}: found no folder there, expected one of checkpoints")
        return [each for each in (path, inner) if isinstance(each, Path) and each.is_dir()]
    folders, files = path.listed()
    if not folders and not files:
        raise CheckpointError(f"{path}: found nothing there, expected a folder of checkpoints")
    return [path, *(each for each in folders if each == inner)]


def newer_incomplete(path: Place, checkpoint: Place) -> list[Listed]:
    """The incomplete checkpoints in ``path`` that are newer than ``checkpoint``.

    Leaves out checkpoints that are being written, or that a killed run was writing.
    """
    step = _step_of(checkpoint)
    if path == checkpoint or step is None:
        return []
    return [
        each
        for each in list_checkpoints(path)
        if each.problem and each.problem != UNFINISHED and (each.step or 0) > step
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


def _identity(path: Place) -> tuple[Any, ...] | None:
    """What distinguishes an entry from a later one of the same name; ``None`` if it is gone."""
    if not isinstance(path, Path):
        return (path / MANIFEST).find()
    try:
        status = os.lstat(path)
    except OSError:
        return None
    # Inode numbers are reused, so the time counts too, except while the entry is being written.
    changed = 0 if is_partial(path) else status.st_ctime_ns
    return status.st_dev, status.st_ino, changed


def _step_of(folder: Place) -> int | None:
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
            problem = UNFINISHED
        else:
            problem, found = _opened(path, form)
            saved |= found
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
    path: Place, *, buffer: int = DEFAULT_BUFFER, watch: Watch = unwatched
) -> Iterator[Damage]:
    """Read a checkpoint in Shardwise's format, and compare every checksum.

    Args:
        path: its folder, or its name in an object store.
        buffer: bytes of memory to use.
        watch: called with the number of bytes to read; the function that it returns is called with
            the bytes of each part that was read.

    Yields:
        Every damaged piece.

    Raises:
        CheckpointError: the manifest cannot be read, or the checkpoint is deleted meanwhile.
        ValueError: the buffer is too small.
    """

    def identity() -> tuple[Any, ...] | None:
        return _identity(path.resolve() if isinstance(path, Path) else path)

    at_first = identity()
    for damage in _damages(path, buffer, watch):
        if identity() != at_first:
            raise CheckpointError(f"{path}: was deleted while it was read; a run has newer ones")
        yield damage


def _damages(path: Place, buffer: int, watch: Watch) -> Iterator[Damage]:
    manifest = read_manifest(path)
    lost = lost_files(path, manifest)
    in_file: dict[str, list[TensorEntry]] = {file: [] for file in lost}
    for entry in manifest.tensors:
        for file in files_of([entry.pieces]) & lost.keys():
            in_file[file].append(entry)
    for file, reason in lost.items():
        entries = in_file[file]
        others = f" and {len(entries) - 1} others" if len(entries) > 1 else ""
        yield Damage(file, f"{entries[0].name}{others}" if entries else "none", "all", reason)

    # One file after the other, so that what is read ahead of a store is read once.
    def pieces() -> Iterator[tuple[StoredPiece, TensorEntry]]:
        return (each for each in in_files(manifest) if each[0].file not in lost)

    with PieceReader(path, manifest, buffer=max(buffer, LEAST_BUFFER)) as reader:
        progress = watch(sum(entry.nbytes for entry in manifest.tensors))
        reader.expect((replace(entry, pieces=(piece,)), piece.box) for piece, entry in pieces())
        for piece, entry in pieces():
            try:
                for chunk in reader.stream(entry, piece):
                    progress(chunk.nbytes)
            except StoreError:
                raise
            except CheckpointError as error:
                yield Damage(piece.file, entry.name, entry.key(piece), str(error))
