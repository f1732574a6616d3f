"""The files of all ranks of an XLA-style checkpoint, read as one checkpoint.

See :mod:`..ranks.xla` for the format. Ranks' parts of a tensor become extents of the full tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.boxes import Box, full_box
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo, dotted
from shardwise.checkpoint.disk.strict import Fields, check_shape, check_text, refuse, shorten
from shardwise.checkpoint.formats.source import (
    Extent,
    ExtentSource,
    check_boxes,
)
from shardwise.checkpoint.formats.torchfile import StoredShard, StoredTensor, read_tree
from shardwise.checkpoint.formats.torchwrite import Placeholder

FORMAT = "shardwise.rank"
VERSION = 1

_MAX_RANKS = 10**6


@dataclass(frozen=True)
class TensorSlice:
    """Where a rank's part of a tensor is in the full tensor.

    Attributes:
        shape: shape of the full tensor.
        box: the part.
    """

    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class RankFile:
    """The file of one rank.

    Attributes:
        path: path of the file.
        rank: the rank that wrote it.
        world_size: number of ranks.
        tree: its contents, with a :class:`.StoredTensor` for every tensor.
        parts: the rank's part of each parameter, by name.
        optimizer_parts: the rank's part of each tensor of the optimizer's state, by dotted path.
        alike: the part that all parameters of one shape and local sizes have in common; ``None`` if
            they differ.
    """

    path: Path
    rank: int
    world_size: int
    tree: Mapping[str, Any]
    parts: Mapping[str, TensorSlice]
    optimizer_parts: Mapping[str, TensorSlice]
    alike: Mapping[str, TensorSlice | None]


class RankFiles(ExtentSource):
    """The files of all ranks as a source.

    Args:
        files: paths of the files, in any order.

    Attributes:
        tree: ``{"model": ..., "optimizer": ...}`` with a :class:`.Placeholder` for every tensor.
        by_name: the paths of tensors, by the names of their placeholders.

    Raises:
        CheckpointError: a file is missing, damaged, hostile, or of another checkpoint; or the parts
            of a tensor do not cover it.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files[0])
        self._ranks = _in_order([read_rank_file(file) for file in files])
        self._extents: dict[StatePath, list[Extent]] = {}
        self._placeholders: dict[str, Placeholder] = {}
        self.tensors: dict[StatePath, TensorInfo] = {}
        self.values: dict[StatePath, Any] = {}
        self.by_name: dict[str, StatePath] = {}
        self.tree = {
            section: self._merge((section,), [rank.tree[section] for rank in self._ranks])
            for section in ("model", "optimizer")
            if all(section in rank.tree for rank in self._ranks)
        }

    @property
    def nbytes(self) -> int:
        """Total bytes of all full tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def _extents_of(self, path: StatePath) -> list[Extent]:
        return self._extents[path]

    def _merge(self, path: StatePath, found: list[Any]) -> Any:
        """Combine what all ranks have at one path; if it is not a tensor, take the first rank's."""
        first = found[0]
        if isinstance(first, dict):
            for rank, each in zip(self._ranks, found, strict=True):
                if not isinstance(each, dict) or each.keys() != first.keys():
                    raise CheckpointError(
                        f"{rank.path}: found other keys in {dotted(path)} than in "
                        f"{self._ranks[0].path}"
                    )
            for key in first:
                if isinstance(key, str):
                    check_text(key, f"{self.where}, {dotted(path)}")
            return {key: self._merge((*path, key), [e[key] for e in found]) for key in first}
        if isinstance(first, list | tuple):
            if not all(isinstance(each, type(first)) and len(each) == len(first) for each in found):
                raise CheckpointError(
                    f"{self.where}: {dotted(path)} differs in length between ranks"
                )
            return type(first)(
                self._merge((*path, i), list(items))
                for i, items in enumerate(zip(*found, strict=True))
            )
        if isinstance(first, StoredTensor | StoredShard):
            return self._join(path, found)
        return first

    def _join(self, path: StatePath, found: list[Any]) -> Placeholder:
        """Combine the parts that all ranks have of a tensor; tied tensors get one placeholder."""
        name = dotted(path)
        for rank, each in zip(self._ranks, found, strict=True):
            if not isinstance(each, StoredTensor | StoredShard):
                refuse(f"{rank.path}, {name}", type(each).__name__, "a tensor, as on other ranks")
        parts = [_part(rank, path, each) for rank, each in zip(self._ranks, found, strict=True)]
        stored = [each.local if isinstance(each, StoredShard) else each for each in found]
        if parts[0] is None:  # every rank has the full tensor
            del stored[1:]
            parts = [TensorSlice(stored[0].info.shape, full_box(stored[0].info.shape))]
        # A string, because thousands of numbers could have the same hash.
        key = str([(each.start, each.info, p) for each, p in zip(stored, parts, strict=True)])
        if key in self._placeholders and stored[0].info.numel:
            return self._placeholders[key]
        assert parts[0] is not None
        info = TensorInfo(stored[0].info.dtype, parts[0].shape)
        self._extents[path] = self._merged(name, info, parts, stored)
        self.tensors[path] = info
        if self.by_name.setdefault(name, path) != path:
            raise CheckpointError(f"{self.where}: found {name} twice, expected it once")
        self._placeholders[key] = Placeholder(name, info)
        return self._placeholders[key]

    def _merged(
        self,
        name: str,
        info: TensorInfo,
        parts: list[TensorSlice | None],
        stored: list[StoredTensor],
    ) -> list[Extent]:
        """The extents that the parts of all ranks are; a part that several have comes once."""
        extents: dict[str, Extent] = {}
        for rank, part, local in zip(self._ranks, parts, stored, strict=False):
            where = f"{rank.path}, {name}"
            if part is None or part.shape != info.shape:
                refuse(where, part, f"a part of {list(info.shape)}, as on other ranks")
            if local.info != TensorInfo(info.dtype, part.box.sizes):
                refuse(where, local.info, f"{info.dtype} with sizes {list(part.box.sizes)}")
            extent = Extent(part.box, rank.path, local.start, local.strides)
            extents.setdefault(str(part.box), extent)
        found = [extent for extent in extents.values() if extent.box.numel]
        check_boxes(f"{self._ranks[0].path}, {name}", info, [extent.box for extent in found])
        return found


def _part(rank: RankFile, path: StatePath, found: StoredTensor | StoredShard) -> TensorSlice | None:
    """A rank's part of a tensor; ``None`` if the rank has the full tensor."""
    name = dotted(path[1:])
    if path[0] == "model":
        part = rank.parts.get(name)
    else:
        part = rank.optimizer_parts.get(name) or _like_parameter(rank, path, found)
    if part is None and isinstance(found, StoredShard):
        refuse(
            f"{rank.path}, {dotted(path)}",
            "a rank's part, and nothing that says where it is in the full tensor",
            "shard_metadata of the same model, or a file of save_rank_checkpoint",
        )
    return part


def _like_parameter(
    rank: RankFile, path: StatePath, found: StoredTensor | StoredShard
) -> TensorSlice | None:
    """The part of an optimizer's state that is sharded like its parameter.

    The parameter is found by name. An optimizer's own ``state_dict()`` has numbers instead; then
    all parameters of this shape have to be sharded in the same way.
    """
    local = found.local if isinstance(found, StoredShard) else found
    own = rank.parts.get(str(path[2])) if len(path) > 2 else None
    if own is not None and own.box.sizes == local.info.shape:
        return own
    if not isinstance(found, StoredShard):
        return None
    return rank.alike.get(_cut(found.shape, local.info.shape))


def _cut(shape: Sequence[int], sizes: Sequence[int]) -> str:
    return f"{shape} {sizes}"


def _alike(parts: Mapping[str, TensorSlice]) -> dict[str, TensorSlice | None]:
    """The part that all parameters of one shape and sizes have; ``None`` if they differ."""
    found: dict[str, TensorSlice | None] = {}
    for part in parts.values():
        cut = _cut(part.shape, part.box.sizes)
        found[cut] = part if found.setdefault(cut, part) == part else None
    return found


def read_rank_file(path: Path) -> RankFile:
    """Read the file of one rank, with a :class:`.StoredTensor` for every tensor.

    Args:
        path: path of the file.

    Raises:
        CheckpointError: it is damaged, hostile, or not such a file.
    """
    tree = read_tree(path)
    if not isinstance(tree, dict) or not {"model", "shard_metadata"} <= tree.keys():
        refuse(str(path), "something else", "a dict with model and shard_metadata")
    fields = Fields(tree["shard_metadata"], f"{path}, shard_metadata")
    if fields.any("format") != FORMAT or fields.any("version") != VERSION:
        refuse(
            fields.where,
            f"{shorten(fields.any('format'))} {shorten(fields.any('version'))}",
            f"{FORMAT} {VERSION}, which get_shard_metadata makes",
        )
    world_size = fields.number("world_size", least=1, most=_MAX_RANKS)
    parts = _parts(fields.object("shard_info"), f"{fields.where}, shard_info")
    return RankFile(
        path,
        fields.number("rank", most=world_size - 1),
        world_size,
        tree,
        parts,
        _parts(fields.all().get("optimizer_info", {}), f"{fields.where}, optimizer_info"),
        _alike(parts),
    )


def _parts(found: Any, where: str) -> dict[str, TensorSlice]:
    parts = {}
    for name, value in Fields(found, where).all().items():
        fields = Fields(value, f"{where}, {name}")
        shape = fields.numbers("shape")
        check_shape(shape, 1, fields.where)
        box = Box(fields.numbers("offsets"), fields.numbers("sizes"))
        if len(box.offsets) != len(box.sizes) or not box.is_inside(shape):
            refuse(fields.where, f"{box.offsets} + {box.sizes}", f"a part of {list(shape)}")
        parts[name] = TensorSlice(shape, box)
    return parts


def _in_order(ranks: list[RankFile]) -> list[RankFile]:
    """Sort the files by rank, and check that there is one of every rank of one world.

    Raises:
        CheckpointError: there is not.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    world_size = ranks[0].world_size
    for expected, rank in enumerate(ranks):
        if rank.world_size != world_size:
            refuse(str(rank.path), f"a world of {rank.world_size} ranks", f"{world_size}")
        if rank.rank != expected:
            raise CheckpointError(
                f"{rank.path}: found rank {rank.rank}, expected the file of rank {expected} of "
                f"{world_size}; there must be exactly one file of each rank"
            )
    if len(ranks) != world_size:
        raise CheckpointError(
            f"{ranks[0].path}: found files of {len(ranks)} ranks, expected {world_size}; the file "
            f"of rank {len(ranks)} is missing"
        )
    return ranks
