"""The native format as storage for ``torch.distributed.checkpoint``: one reader and one writer.

Torch's planners decide which rank writes or reads which part of a tensor. :mod:`.ranks` saves with
the writer. Plain ``dcp.save`` and ``dcp.load`` can use both, for states that consist of tensors.
Anything else would be pickled there, and is refused.

Source: ``torch.distributed.checkpoint.StorageReader`` and ``StorageWriter``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.base.boxes import Box
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.columns import files_of
from shardwise.checkpoint.disk.commit import Commit
from shardwise.checkpoint.disk.entries import (
    SECTIONS,
    Manifest,
    ModelFacts,
    Origin,
    StoredPiece,
    TensorEntry,
    TensorInfo,
    Value,
    dtype_name,
)
from shardwise.checkpoint.disk.manifest import read_manifest, writer_versions
from shardwise.checkpoint.disk.place import StrPath, place_of
from shardwise.checkpoint.disk.safetensors import BLOCK, PieceData, write_shard

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.store_commit import StoreCommit

__all__ = ["Reader", "Writer"]


class Reader(StorageReader):
    """A reader of one checkpoint, for ``dcp.load(..., storage_reader=...)``.

    Args:
        path: the checkpoint's folder, or its URL in an object store.
    """

    def __init__(self, path: StrPath) -> None:
        self._path = place_of(path)
        self._manifest: Manifest | None = None
        self._entries: dict[str, TensorEntry] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin with another checkpoint, if a path is given."""
        if checkpoint_id is not None and place_of(checkpoint_id) != self._path:
            self._path, self._manifest = place_of(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest, in the form that torch's planners understand.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        from shardwise.checkpoint.formats.dcp import tensor_metadata  # of no use to a save

        manifest = self._read_manifest()
        return Metadata(
            state_dict_metadata={
                entry.fqn: tensor_metadata(entry.info, (piece.box for piece in entry.pieces))
                for entry in manifest.tensors
            },
            planner_data={entry.fqn: entry.path for entry in manifest.tensors},
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Index the manifest by name."""
        self._entries = {entry.fqn: entry for entry in self._read_manifest().tensors}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Sort the plan by file and offset, so that files are read front to back.

        Raises:
            TypeError: the plan reads something that is not a tensor.
        """
        return replace(plan, items=sorted(plan.items, key=self._place))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged, since every rank reads on its own."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan into the tensor that the planner has for it.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        from shardwise.checkpoint.disk.pieces import PieceReader

        with PieceReader(self._path, self._read_manifest()) as reader:
            reader.expect(
                (self._find(item.storage_index)[0], self._box(item)) for item in plan.items
            )
            for item in plan.items:
                entry, piece = self._find(item.storage_index)
                target = planner.resolve_tensor(item)
                reader.read_into(entry, piece, self._box(item), target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = read_manifest(self._path)
        return self._manifest

    def _find(self, index: MetadataIndex) -> tuple[TensorEntry, StoredPiece]:
        entry = self._entries[index.fqn]
        assert index.index is not None
        return entry, entry.pieces[index.index]

    def _box(self, item: ReadItem) -> Box:
        """The part of a tensor that an item reads."""
        _, piece = self._find(item.storage_index)
        offsets = zip(item.storage_offsets, piece.box.offsets, strict=True)
        return Box(tuple(a + b for a, b in offsets), tuple(item.lengths))

    def _place(self, item: ReadItem) -> tuple[str, int]:
        if item.type != LoadItemType.TENSOR:
            raise TypeError(
                f"{item.dest_index.fqn}: found a plain value to load from {self._path}, "
                "expected a tensor; load plain values with shardwise.checkpoint.load"
            )
        _, piece = self._find(item.storage_index)
        return piece.file, piece.offset

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can be the path of a checkpoint."""
        return bool(str(checkpoint_id))


class Writer(StorageWriter):
    """A writer of one checkpoint, for ``dcp.save(..., storage_writer=...)``.

    Args:
        path: path of the checkpoint, which must not exist, or its URL in an object store.
        facts: what to record about the model.
    """

    def __init__(self, path: StrPath, *, facts: ModelFacts | None = None) -> None:
        self._path = place_of(path)
        self._origins: dict[str, Origin] = {}
        self._values: list[Value] = []
        self._facts = facts or ModelFacts()
        self._world_size = 1
        self._commit: Commit | StoreCommit | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint, at a new path if one is given."""
        if checkpoint_id is not None:
            self._path = place_of(checkpoint_id)
        self._commit = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to prepare before there is a plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged, if it can be written.

        Raises:
            TypeError: the plan contains something that is not a tensor.
            ValueError: the planner means the plan of an earlier save.
        """
        if not plan.usable:  # it names the files of that save
            raise ValueError(
                "found a plan of an earlier save, expected a new one: use a planner without "
                "enable_plan_caching"
            )
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(
                    f"{item.index.fqn}: is not a tensor; save plain values with "
                    "shardwise.checkpoint.save, which pickles nothing"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, and assign a file to each rank. Only the coordinator calls this.

        Raises:
            CheckpointError: the path exists, or another process is writing to it.
            ValueError: a tensor is not in a section of the state.
        """
        origins = dict(self._origins)
        for plan in reversed(plans):  # if ranks differ, the first counts
            # Where torch's planner found tensors in a nested state.
            mappings = plan.planner_data if isinstance(plan.planner_data, dict) else {}
            origins |= {fqn: Origin(tuple(path)) for fqn, path in mappings.items() if len(path) > 1}
        names = {item.index.fqn: None for plan in plans for item in plan.items}
        found = {name: origins.get(name, Origin(("",))) for name in names}
        files = self.begin(found, (), len(plans))
        return [replace(plan, storage_data=file) for plan, file in zip(plans, files, strict=True)]

    def begin(
        self, origins: Mapping[str, Origin], values: Sequence[Value], world_size: int
    ) -> list[str]:
        """Make the folder. Only the coordinator calls this.

        Returns:
            The path of the file of each rank, or its URL.
        """
        for name, origin in origins.items():
            if origin.path[0] not in SECTIONS:
                raise ValueError(
                    f"{name}: expected state under {', '.join(SECTIONS)}, such as "
                    '{"model": model.state_dict()}'
                )
        self._origins, self._values = dict(origins), list(values)
        self._world_size = world_size
        commit = self._commit = self._begin()
        return [str(commit.file(rank, world_size)) for rank in range(world_size)]

    def _begin(self) -> Commit | StoreCommit:
        if isinstance(self._path, Path):
            return Commit(self._path)
        from shardwise.checkpoint.disk.store_commit import StoreCommit

        return StoreCommit(self._path)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, and wait until it is on the disk.

        Raises:
            OSError: it cannot be written, because the disk is full for instance.
        """
        path = place_of(plan.storage_data)
        results: Future[list[WriteResult]] = Future()
        items = [item for item in plan.items if _chunk(item).sizes.numel()]
        pieces = {item.index: _piece_data(item, planner) for item in items}
        stored = write_shard(path, list(pieces.values())) if pieces else []
        results.set_result(
            [
                WriteResult(index, piece.own_info.nbytes, place)
                for (index, piece), place in zip(pieces.items(), stored, strict=True)
            ]
        )
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and commit. The coordinator calls this when all files are on the disk.

        Raises:
            CheckpointError: the result would not be a valid checkpoint.
            OSError: the manifest cannot be written, or the folder cannot be renamed.
        """
        pieces: dict[str, list[StoredPiece]] = {}
        for result in (each for of_rank in results for each in of_rank):
            pieces.setdefault(result.index.fqn, []).append(result.storage_data)
        infos = {}
        for fqn, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata)
            infos[fqn] = TensorInfo(dtype_name(found.properties.dtype), tuple(found.size))
        self.commit(infos, pieces)

    def commit(
        self, infos: Mapping[str, TensorInfo], pieces: Mapping[str, Sequence[StoredPiece]]
    ) -> None:
        """Write the manifest and commit, once all files are there. The coordinator calls it."""
        assert self._commit is not None
        entries = tuple(self._entry(fqn, info, pieces.get(fqn, ())) for fqn, info in infos.items())
        files = sorted(files_of(pieces.values()))
        manifest = Manifest(
            tensors=entries,
            values=tuple(self._values),
            files={name: self._commit.size(name) for name in files},
            block=BLOCK,
            world_size=self._world_size,
            mesh=next((entry.mesh for entry in entries if entry.mesh), ""),
            facts=self._facts_of(entries),
            versions=writer_versions(),
        )
        self._commit.finish(manifest)
        self._commit = None

    def _facts_of(self, entries: Sequence[TensorEntry]) -> ModelFacts:
        """The facts about tensors that were saved: hooks may have renamed or changed others."""
        model = {
            entry.name: (entry.dtype, entry.shape) for entry in entries if entry.section == "model"
        }
        tied = {
            name: other
            for name, other in self._facts.tied.items()
            if name in model and model[name] == model.get(other)
        }
        return replace(self._facts, tied=tied)

    def abandon(self) -> None:
        """Delete what was written, if this rank made the folder."""
        if self._commit is not None:
            self._commit.abandon()
            self._commit = None

    def _entry(self, fqn: str, info: TensorInfo, pieces: Sequence[StoredPiece]) -> TensorEntry:
        origin = self._origins[fqn]
        return TensorEntry(
            path=origin.path,
            shape=info.shape,
            dtype=info.dtype,
            placements=origin.placements,
            mesh=origin.mesh,
            pieces=pieces,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can be the path of a checkpoint."""
        return bool(str(checkpoint_id))


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _piece_data(item: WriteItem, planner: SavePlanner) -> PieceData:
    """The shard that an item of a plan stands for, as a piece to write."""
    data = item.tensor_data
    assert data is not None

    def load() -> Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        if tuple(tensor.shape) != tuple(data.chunk.sizes):
            raise CheckpointError(
                f"{item.index.fqn}: found a shard of {list(tensor.shape)}, expected "
                f"{list(data.chunk.sizes)}"
            )
        return tensor

    info = TensorInfo(dtype_name(data.properties.dtype), tuple(data.size))
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return PieceData(item.index.fqn, info, box, load)
