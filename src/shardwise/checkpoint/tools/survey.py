"""Looking at checkpoints: which there are, and whether what they hold is what was written."""

from __future__ import annotations

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

    Complete or not is told by manifests and the sizes of files; the files are not read.

    Args:
        path: a run, a folder of ``step-...`` folders, or a checkpoint of any format.

    Raises:
        CheckpointError: there is nothing.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: found nothing there, expected a folder of checkpoints")
    root = steps_root(path)
    folders = [each for each in root.iterdir() if each.is_dir()] if root.is_dir() else []
    found = [_look(each) for each in folders if _is_listed(each)]
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


def _is_listed(folder: Path) -> bool:
    partial = folder.name.startswith(".") and folder.name.endswith(".partial")
    return partial or _step_of(folder) is not None or format_of(folder) is not None


def _step_of(folder: Path) -> int | None:
    name = folder.name.removeprefix(".").removesuffix(".partial")
    digits = name.removeprefix("step-")
    if not digits.isdecimal() or step_folder(folder.parent, int(digits)).name != name:
        return None
    return int(digits)


def _look(path: Path) -> Listed:
    form = format_of(path)
    step, nbytes = _step_of(path), _size(path)
    if path.name.startswith(".") and path.name.endswith(".partial"):
        return Listed(path, step, form, nbytes, "is being written, or was left by a killed process")
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
    return sum(each.stat().st_size for each in path.iterdir() if each.is_file())


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
        CheckpointError: its manifest cannot be read.
        ValueError: the buffer is too small.
    """
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
