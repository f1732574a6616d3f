"""Loading a checkpoint as ``torch.distributed.checkpoint`` does: our files, under its plans.

Torch's planners decide who needs which part of what was written. It works under plain ``dcp.load``
as well.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardwise.checkpoint.disk.boxes import Box
from shardwise.checkpoint.disk.dtypes import torch_dtype
from shardwise.checkpoint.disk.entries import (
    Manifest,
    Piece,
    TensorEntry,
)
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.disk.pieces import CHUNK, PieceReader


class Reader(StorageReader):
    """Reads one checkpoint.

    Args:
        path: its folder.
        manifest: what is in it, where that is known already.
        buffer: bytes that reading may hold beside what is read into.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        manifest: Manifest | None = None,
        *,
        buffer: int = CHUNK,
    ) -> None:
        self._path = Path(path)
        self._manifest = manifest
        self._buffer = buffer
        self._entries: dict[str, TensorEntry] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin with another checkpoint."""
        if checkpoint_id is not None and Path(checkpoint_id) != self._path:
            self._path, self._manifest = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest, as torch's planners understand it.

        Raises:
            CheckpointError: it is damaged.
        """
        manifest = self._read_manifest()
        return Metadata(
            state_dict_metadata={entry.fqn: _metadata(entry) for entry in manifest.tensors},
            planner_data={entry.fqn: entry.path for entry in manifest.tensors},
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Find entries by name."""
        self._entries = {entry.fqn: entry for entry in self._read_manifest().tensors}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read in the order of files, as far as nothing speaks against it."""
        return replace(plan, items=sorted(plan.items, key=self._place))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads by itself."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan says into where the planner says.

        Raises:
            CheckpointError: a file is damaged.
        """
        with PieceReader(self._path, self._read_manifest(), buffer=self._buffer) as reader:
            for item in plan.items:
                entry, piece = self._find(item.storage_index)
                target = planner.resolve_tensor(item)
                offsets = zip(item.storage_offsets, piece.box.offsets, strict=True)
                box = Box(tuple(a + b for a, b in offsets), tuple(item.lengths))
                reader.read_into(entry, piece, box, target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = read_manifest(self._path)
        return self._manifest

    def _find(self, index: MetadataIndex) -> tuple[TensorEntry, Piece]:
        entry = self._entries[index.fqn]
        assert index.index is not None
        return entry, entry.pieces[index.index]

    def _place(self, item: ReadItem) -> tuple[str, int]:
        if item.type != LoadItemType.TENSOR:
            raise TypeError(f"{item.dest_index.fqn}: is not a tensor in {self._path}")
        _, piece = self._find(item.storage_index)
        return piece.file, piece.offset

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could be a path."""
        return bool(str(checkpoint_id))


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=torch_dtype(entry.dtype)),
        torch.Size(entry.shape),
        [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in (piece.box for piece in entry.pieces)
        ],
    )
