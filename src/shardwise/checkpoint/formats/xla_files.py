"""The files of all ranks of an XLA-style checkpoint, read as one: see :mod:`..ranks.xla`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.disk.boxes import Box, full_box
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo, dotted
from shardwise.checkpoint.disk.strict import Fields, check_shape, check_text, refuse, shorten
from shardwise.checkpoint.formats.source import (
    BaseSource,
    Extent,
    ExtentReader,
    Window,
    check_extents,
)
from shardwise.checkpoint.formats.torchfile import StoredShard, StoredTensor, read_tree
from shardwise.checkpoint.formats.torchwrite import Placeholder
from shardwise.errors import CheckpointError
from shardwise.sharding.state_dict import FORMAT, VERSION

_MAX_DIMS = 64
_MAX_RANKS = 10**6


@dataclass(frozen=True)
class Part:
    """Where a rank's part of a tensor lies in the whole.

    Attributes:
        shape: of the whole.
        box: the part.
    """

    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class RankFile:
    """The file of one rank.

    Attributes:
        path: the file.
        rank: whose it is.
        world_size: of how many.
        tree: what is in it.
        parts: by the name of a parameter, what the rank has of it.
        optimizer_parts: the same for the optimizer's state, by the keys that lead to it.
        alike: what the rank has of all parameters of a shape, and of sizes, where that is the same.
    """

    path: Path
    rank: int
    world_size: int
    tree: Mapping[str, Any]
    parts: Mapping[str, Part]
    optimizer_parts: Mapping[str, Part]
    alike: Mapping[str, Part | None]


class RankFiles(BaseSource):
    """The files of all ranks.

    Args:
        files: in any order.

    Raises:
        CheckpointError: one is missing, damaged, of another checkpoint, or there is code in it;
            or the parts of a tensor do not make a whole.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.where = files[0]
        self._reader = ExtentReader()
        self._ranks = _in_order([read_rank_file(file) for file in files])
        self._extents: dict[StatePath, list[Extent]] = {}
        self._holes: dict[str, Placeholder] = {}
        self.tensors: dict[StatePath, TensorInfo] = {}
        self.values: dict[StatePath, Any] = {}
        self.by_name: dict[str, StatePath] = {}
        self._tree = {
            section: self._merge((section,), [rank.tree[section] for rank in self._ranks])
            for section in ("model", "optimizer")
            if all(section in rank.tree for rank in self._ranks)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all full tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def tree(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ...}`` with holes for the tensors."""
        return self._tree

    def chunks(self, window: Window) -> Callable[[str], Iterator[memoryview]]:
        """The bytes of a tensor, by the name of its hole."""
        return lambda name: window.chunks(self, self.by_name[name])

    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor; see :class:`.Source`."""
        self._reader.read(self._extents[path], box, into)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def _merge(self, path: StatePath, found: list[Any]) -> Any:
        """What all ranks have at one place, as one thing; the first's if it is no tensor."""
        first = found[0]
        if isinstance(first, dict):
            for rank, each in zip(self._ranks, found, strict=True):
                if not isinstance(each, dict) or each.keys() != first.keys():
                    raise CheckpointError(
                        f"{rank.path}: {dotted(path)} has other keys than in {self._ranks[0].path}"
                    )
            for key in first:
                if isinstance(key, str):
                    check_text(key, f"{self.where}, {dotted(path)}")
            return {key: self._merge((*path, key), [e[key] for e in found]) for key in first}
        if isinstance(first, list | tuple):
            if not all(isinstance(each, type(first)) and len(each) == len(first) for each in found):
                raise CheckpointError(
                    f"{self.where}: {dotted(path)} has other items on other ranks"
                )
            return type(first)(
                self._merge((*path, i), list(items))
                for i, items in enumerate(zip(*found, strict=True))
            )
        if isinstance(first, StoredTensor | StoredShard):
            return self._join(path, found)
        return first

    def _join(self, path: StatePath, found: list[Any]) -> Placeholder:
        """A tensor made of the parts of all ranks; tied tensors are one."""
        name = dotted(path)
        for rank, each in zip(self._ranks, found, strict=True):
            if not isinstance(each, StoredTensor | StoredShard):
                refuse(f"{rank.path}, {name}", type(each).__name__, "a tensor, as on other ranks")
        parts = [_part(rank, path, each) for rank, each in zip(self._ranks, found, strict=True)]
        locals_ = [each.local if isinstance(each, StoredShard) else each for each in found]
        if parts[0] is None:  # every rank has the whole of it
            del locals_[1:]
            parts = [Part(locals_[0].info.shape, full_box(locals_[0].info.shape))]
        # A string, since thousands of numbers could be made to have one hash.
        key = str([(each.start, each.info, p) for each, p in zip(locals_, parts, strict=True)])
        if key in self._holes and locals_[0].info.numel:
            return self._holes[key]
        assert parts[0] is not None
        info = TensorInfo(locals_[0].info.dtype, parts[0].shape)
        extents: dict[str, Extent] = {}
        for rank, part, local in zip(self._ranks, parts, locals_, strict=False):
            where = f"{rank.path}, {name}"
            if part is None or part.shape != info.shape:
                refuse(where, part, f"a part of {list(info.shape)}, as on other ranks")
            if local.info != TensorInfo(info.dtype, part.box.sizes):
                refuse(where, local.info, f"{info.dtype} of sizes {list(part.box.sizes)}")
            extent = Extent(part.box, rank.path, local.start, local.strides)
            extents.setdefault(str(part.box), extent)
        filled = [extent for extent in extents.values() if extent.box.numel]
        check_extents(f"{self._ranks[0].path}, {name}", info, filled)
        self.tensors[path] = info
        if self.by_name.setdefault(name, path) != path:
            raise CheckpointError(f"{self.where}: holds {name} twice, expected it once")
        self._extents[path] = filled
        self._holes[key] = Placeholder(name, info)
        return self._holes[key]


def _part(rank: RankFile, path: StatePath, found: StoredTensor | StoredShard) -> Part | None:
    """What a rank has of a tensor; ``None`` if that is the whole."""
    name = dotted(path[1:])
    if path[0] == "model":
        part = rank.parts.get(name)
    else:
        part = rank.optimizer_parts.get(name) or _like_parameter(rank, path, found)
    if part is None and isinstance(found, StoredShard):
        refuse(
            f"{rank.path}, {dotted(path)}",
            "a rank's part, and nothing that says where it lies in the whole",
            "shard_metadata of the same model, or a file of save_rank_checkpoint",
        )
    return part


def _like_parameter(
    rank: RankFile, path: StatePath, found: StoredTensor | StoredShard
) -> Part | None:
    """The part that state of the optimizer is, where its parameter has the same shape.

    State is found by the parameter's name. Where there are numbers instead, as an optimizer's own
    ``state_dict()`` has them, every parameter of this shape has to be cut in the same way.
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


def _alike(parts: Mapping[str, Part]) -> dict[str, Part | None]:
    """The part that all tensors of a shape and sizes are; ``None`` where they differ."""
    found: dict[str, Part | None] = {}
    for part in parts.values():
        cut = _cut(part.shape, part.box.sizes)
        found[cut] = part if found.setdefault(cut, part) == part else None
    return found


def read_rank_file(path: Path) -> RankFile:
    """What the file of one rank says, with a :class:`.StoredTensor` for every tensor.

    Raises:
        CheckpointError: it is damaged, of another kind, or there is code in it.
    """
    tree = read_tree(path)
    if not isinstance(tree, dict) or not {"model", "shard_metadata"} <= tree.keys():
        refuse(str(path), "other things", "a dict with model and shard_metadata")
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


def _parts(found: Any, where: str) -> dict[str, Part]:
    parts = {}
    for name, value in Fields(found, where).all().items():
        fields = Fields(value, f"{where}, {name}")
        shape = fields.numbers("shape", _MAX_DIMS)
        check_shape(shape, 1, fields.where)
        box = Box(fields.numbers("offsets", _MAX_DIMS), fields.numbers("sizes", _MAX_DIMS))
        if len(box.offsets) != len(box.sizes) or not box.is_inside(shape):
            refuse(fields.where, f"{box.offsets} + {box.sizes}", f"a part of {list(shape)}")
        parts[name] = Part(shape, box)
    return parts


def _in_order(ranks: list[RankFile]) -> list[RankFile]:
    """The files by rank, if they are all there, and all of one world.

    Raises:
        CheckpointError: they are not.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    world_size = ranks[0].world_size
    for expected, rank in enumerate(ranks):
        if rank.world_size != world_size:
            refuse(str(rank.path), f"a world of {rank.world_size} ranks", f"{world_size}")
        if rank.rank != expected:
            raise CheckpointError(
                f"{rank.path}: found rank {rank.rank}, expected the file of rank {expected} of "
                f"{world_size}; there has to be one file of each rank, and no others"
            )
    if len(ranks) != world_size:
        raise CheckpointError(
            f"{ranks[0].path}: found files of {len(ranks)} ranks, expected {world_size}; that of "
            f"rank {len(ranks)} is missing"
        )
    return ranks
