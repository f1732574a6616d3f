"""The native format as a source, and written from a source of any format."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from shardwise.base.boxes import Box
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.companions import Folder, write_beside
from shardwise.checkpoint.disk.entries import (
    MANIFEST,
    Manifest,
    StatePath,
    StoredPiece,
    TensorEntry,
    Value,
    dotted,
    shard_name,
)
from shardwise.checkpoint.disk.manifest import (
    manifest_bytes,
    read_manifest,
    writer_versions,
)
from shardwise.checkpoint.disk.pieces import PieceReader, read_box
from shardwise.checkpoint.disk.place import Place
from shardwise.checkpoint.disk.safetensors import BLOCK, PieceData, write_shard
from shardwise.checkpoint.formats.source import ReadWindow, Source


class ShardwiseSource(Source):
    """A checkpoint in the native format. Everything that is read from it is verified.

    Args:
        where: its folder, or its name in an object store.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """

    def __init__(self, where: Place) -> None:
        self.where = where
        self.manifest = read_manifest(where)
        self._entries = {entry.path: entry for entry in self.manifest.tensors}
        self._reader = PieceReader(where, self.manifest)
        self.tensors = {path: entry.info for path, entry in self._entries.items()}
        self.placements = {path: entry.placements for path, entry in self._entries.items()}
        self.about = _about(self.manifest)
        self.tied = self.manifest.facts.tied
        self.config = self.manifest.facts.config
        self.versions = None
        self.values = {value.path: value.value for value in self.manifest.values}

    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor; see :class:`.Source`."""
        entry = self._entries[path]
        self._reader.expect([(entry, box)])
        read_box(self._reader, entry, box, into)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()


def _about(manifest: Manifest) -> list[str]:
    saved = f"saved by {manifest.world_size} rank{'' if manifest.world_size == 1 else 's'}"
    mesh = manifest.mesh and f"mesh {manifest.mesh}"
    how = [each for each in (mesh, manifest.facts.strategy) if each]
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    return [", ".join([saved, *how]), f"with {versions}"]


def write_shardwise(folder: Folder, source: Source, window: ReadWindow) -> None:
    """Write everything that a source contains in the native format, as one rank would.

    Args:
        folder: an empty folder, or a checkpoint that is being written to an object store.
        source: the checkpoint to write.
        window: the buffer to use; pieces are no larger than it.

    Raises:
        CheckpointError: the source is damaged, or contains values that the format cannot store.
        OSError: a file cannot be written.
    """
    file = folder / shard_name(0, 1)
    pieces = [
        PieceData(dotted(path), info, box, functools.partial(window.read, source, path, box))
        for path, info in source.tensors.items()
        for box in window.boxes(info)
    ]
    stored: dict[str, list[StoredPiece]] = {}
    for piece, place in zip(pieces, write_shard(file, pieces), strict=True):
        stored.setdefault(piece.fqn, []).append(place)
    if isinstance(folder, Path):
        size = (folder / file.name).stat().st_size
    else:
        size = folder.size(file.name)
    manifest = Manifest(
        tensors=tuple(
            TensorEntry(path, info.shape, info.dtype, "", "", tuple(stored.get(dotted(path), ())))
            for path, info in source.tensors.items()
        ),
        values=tuple(Value(path, value) for path, value in source.values.items()),
        files={file.name: size},
        block=BLOCK,
        world_size=1,
        versions=writer_versions(),
    )
    try:
        write_beside(folder, MANIFEST, manifest_bytes(manifest))
    except TypeError as error:
        raise CheckpointError(f"{source.where}: {error}") from None
