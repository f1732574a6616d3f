"""Checkpoints of one file per rank: which files belong together, and the parts that ranks have.

    lm_rank-00000000-of-00000002.pth      {"model": ..., "shard_metadata": ..., "optimizer": ...}
    lm_rank-00000001-of-00000002.pth

Any file of a set stands for all of it. Ours are read here; those of PyTorch/XLA have the same keys,
and say where shards are in other words, which :mod:`.torch_xla` reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.base.boxes import Box, full_box
from shardwise.base.errors import CheckpointError
from shardwise.base.strict import Fields, check_shape, check_text, refuse, shorten
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo, dotted
from shardwise.checkpoint.disk.values import RANKS, held_in, path_of_items
from shardwise.checkpoint.formats.source import Extent, ExtentSource, check_boxes
from shardwise.checkpoint.formats.torchfile import (
    Placeholder,
    StoredShard,
    StoredTensor,
    read_tree,
)

FORMAT = "shardwise.rank"
VERSION = 1
_MAX_RANKS = 10**6
_SECTIONS = ("model", "optimizer", "shard_metadata")


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
class RankTree:
    """The file of one rank, whoever wrote it.

    Attributes:
        path: path of the file.
        rank: the rank that wrote it.
        world_size: number of ranks.
        tree: its contents, with a :class:`.StoredTensor` for every tensor.
    """

    path: Path
    rank: int
    world_size: int
    tree: Mapping[str, Any]


@dataclass(frozen=True)
class RankFile(RankTree):
    """The file of one rank, with the parts that it has.

    Attributes:
        parts: the rank's part of each parameter, by name.
        optimizer_parts: the rank's part of each tensor of the optimizer's state, by dotted path.
    """

    parts: Mapping[str, TensorSlice]
    optimizer_parts: Mapping[str, TensorSlice]

    @functools.cached_property
    def alike(self) -> Mapping[str, TensorSlice | None]:
        """The part of all parameters of one shape and local sizes; ``None`` if they differ."""
        found: dict[str, TensorSlice | None] = {}
        for part in self.parts.values():
            cut = f"{part.shape} {part.box.sizes}"
            found[cut] = part if found.setdefault(cut, part) == part else None
        return found


class RankSource(ExtentSource):
    """The files of all ranks as a source.

    Args:
        files: paths of the files.

    Attributes:
        tree: ``{"model": ..., "optimizer": ..., "extra": ...}``, with a :class:`.Placeholder` for
            every tensor. What ranks do not have alike in ``extra`` is there by rank.
        by_name: the paths of tensors, by the names of their placeholders.
    """

    where: Path
    tree: dict[str, Any]

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files[0])
        self._extents: dict[StatePath, list[Extent]] = {}
        self.tensors: dict[StatePath, TensorInfo] = {}
        self.by_name: dict[str, StatePath] = {}

    @property
    def nbytes(self) -> int:
        """Total bytes of all full tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def _extents_of(self, path: StatePath) -> list[Extent]:
        return self._extents[path]

    def hold(self, path: StatePath, info: TensorInfo, extents: list[Extent]) -> Placeholder:
        """Add a tensor that consists of extents.

        Raises:
            CheckpointError: there is one of the same name.
        """
        name = dotted(path)
        if self.by_name.setdefault(name, path) != path or path in self.tensors:
            raise CheckpointError(f"{self.where}: found {name} twice, expected it once")
        self._extents[path] = extents
        self.tensors[path] = info
        return Placeholder(name, info)

    def copied(self, path: StatePath, tree: Any, file: Path) -> Any:
        """Add the tensors of a tree as they are in one file."""
        if isinstance(tree, StoredShard):
            refuse(f"{file}, {dotted(path)}", "a DTensor", "a tensor of one rank")
        if isinstance(tree, StoredTensor):
            return self.whole(path, tree, tree.info.dtype, file)
        if isinstance(tree, dict):
            return {key: self.copied((*path, key), item, file) for key, item in tree.items()}
        if isinstance(tree, list | tuple):
            below = path_of_items(path, tree)
            return type(tree)(self.copied((*below, i), e, file) for i, e in enumerate(tree))
        return tree

    def whole(self, path: StatePath, stored: StoredTensor, dtype: str, file: Path) -> Placeholder:
        """Add a tensor of one file, to be read in a dtype."""
        box = full_box(stored.info.shape)
        extent = Extent(box, file, stored.start, stored.strides, stored.bits)
        return self.hold(path, TensorInfo(dtype, stored.info.shape), [extent] if box.numel else [])

    def hold_beside(self, ranks: Sequence[RankTree]) -> None:
        """Add what files have beside the model and the optimizer: the user's own, as ``extra``.

        What is no plain value is left out.
        """
        found: dict[str, list[Any]] = {}
        for place, rank in enumerate(ranks):
            for key, value in _beside(rank.tree):
                found.setdefault(key, [None] * len(ranks))[place] = value
        extra, refused = {}, []
        for key, values in found.items():
            held = [each for value in values for each in held_in(value)]
            if not all(isinstance(each, _PLAIN | StoredTensor) for each in held):
                refused.append(key)
            elif values == values[:1] * len(values) and not any(
                isinstance(each, StoredTensor) for each in held
            ):
                extra[key] = values[0]
            else:
                path = ("extra", key, RANKS)
                extra[key] = {
                    RANKS: {
                        str(rank.rank): self.copied((*path, str(rank.rank)), value, rank.path)
                        for rank, value in zip(ranks, values, strict=True)
                    }
                }
        if refused:
            what = f"{self.where}: found no plain values under {', '.join(map(repr, refused))}"
            self.left_out = "; ".join(each for each in (self.left_out, what) if each)
        if extra:
            self.tree["extra"] = extra


_PLAIN = bool | int | float | str | bytes | torch.dtype | None


def _beside(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """What a rank's file has beside what it has to have, by key."""
    for key, value in tree.items():
        if key == "extra" and isinstance(value, dict):
            yield from ((str(inner), each) for inner, each in value.items())
        elif key not in _SECTIONS:
            yield check_text(str(key), "extra"), value


def plain_parts(path: StatePath, tree: Any) -> Iterator[tuple[StatePath, Any]]:
    """The largest parts of a tree that hold no tensors, by path."""
    if len(path) > 1 and not any(isinstance(each, Placeholder) for each in held_in(tree)):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        below = path if isinstance(tree, Mapping) else path_of_items(path, tree)
        for key, item in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from plain_parts((*below, key), item)


class RankFiles(RankSource):
    """The files that all ranks saved with ``save_rank_checkpoint``.

    Args:
        files: paths of the files, in any order.

    Raises:
        CheckpointError: a file is missing, damaged, hostile, or of another checkpoint; or the parts
            of a tensor do not cover it.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)
        self._ranks = in_order([read_rank_file(file) for file in files])
        self._placeholders: dict[str, Placeholder] = {}
        trees = [rank.tree for rank in self._ranks]
        self.tree = {"model": self._merge(("model",), [tree["model"] for tree in trees])}
        optimizers = [each for tree in trees if isinstance(each := tree.get("optimizer"), dict)]
        if len(optimizers) == len(trees):
            with_states = [{"state": {}, **each} for each in optimizers]
            self.tree["optimizer"] = self._merge(("optimizer",), with_states)
        self.hold_beside(self._ranks)
        self.values = dict(plain_parts((), self.tree))

    def _merge(self, path: StatePath, found: list[Any], ranks: Sequence[RankFile] = ()) -> Any:
        """Combine what ranks have at one path; if it is not a tensor, take the first one's.

        Args:
            path: the path.
            found: what each has.
            ranks: these ranks; all by default.
        """
        ranks, first = ranks or self._ranks, found[0]
        if isinstance(first, dict):
            # With optimizers of ``whole``, states of a parameter are on one rank.
            differs = path == ("optimizer", "state")
            for rank, each in zip(ranks, found, strict=True):
                if not isinstance(each, dict) or (each.keys() != first.keys() and not differs):
                    raise CheckpointError(
                        f"{rank.path}: found other keys in {dotted(path)} than in {ranks[0].path}"
                    )
            keys = dict.fromkeys(key for each in found for key in each)
            merged = {}
            for key in keys:
                if isinstance(key, str):
                    check_text(key, f"{self.where}, {dotted(path)}")
                own = [(e[key], r) for e, r in zip(found, ranks, strict=True) if key in e]
                merged[key] = self._merge((*path, key), *map(list, zip(*own, strict=True)))
            return merged
        if isinstance(first, list | tuple):
            if not all(isinstance(each, type(first)) and len(each) == len(first) for each in found):
                raise CheckpointError(
                    f"{self.where}: {dotted(path)} differs in length between ranks"
                )
            below = path_of_items(path, first)
            return type(first)(
                self._merge((*below, i), list(items), ranks)
                for i, items in enumerate(zip(*found, strict=True))
            )
        if isinstance(first, StoredTensor | StoredShard):
            return self._join(path, found, ranks)
        return first

    def _join(self, path: StatePath, found: list[Any], ranks: Sequence[RankFile]) -> Placeholder:
        """Combine the parts that ranks have of a tensor; tied tensors get one placeholder."""
        name = dotted(path)
        for rank, each in zip(ranks, found, strict=True):
            if not isinstance(each, StoredTensor | StoredShard):
                refuse(f"{rank.path}, {name}", type(each).__name__, "a tensor, as on other ranks")
        parts = [_part(rank, path, each) for rank, each in zip(ranks, found, strict=True)]
        stored = [each.local if isinstance(each, StoredShard) else each for each in found]
        if parts[0] is None:  # every rank has the full tensor
            del stored[1:]
            parts = [TensorSlice(stored[0].info.shape, full_box(stored[0].info.shape))]
        # A string, because thousands of numbers could have the same hash.
        key = str(
            [(each.start, each.info, each.bits, p) for each, p in zip(stored, parts, strict=True)]
        )
        if key in self._placeholders and stored[0].info.numel:
            return self._placeholders[key]
        assert parts[0] is not None
        info = TensorInfo(stored[0].info.dtype, parts[0].shape)
        merged = self._merged(name, info, ranks, parts, stored)
        self._placeholders[key] = self.hold(path, info, merged)
        return self._placeholders[key]

    def _merged(
        self,
        name: str,
        info: TensorInfo,
        ranks: Sequence[RankFile],
        parts: list[TensorSlice | None],
        stored: list[StoredTensor],
    ) -> list[Extent]:
        """The extents that the parts of all ranks are; a part that several have comes once."""
        extents: dict[str, Extent] = {}
        for rank, part, local in zip(ranks, parts, stored, strict=False):
            where = f"{rank.path}, {name}"
            if part is None or part.shape != info.shape:
                refuse(where, part, f"a part of {list(info.shape)}, as on other ranks")
            if local.info != TensorInfo(info.dtype, part.box.sizes):
                refuse(where, local.info, f"{info.dtype} with sizes {list(part.box.sizes)}")
            extent = Extent(part.box, rank.path, local.start, local.strides, local.bits)
            extents.setdefault(str(part.box), extent)
        found = [extent for extent in extents.values() if extent.box.numel]
        check_boxes(f"{ranks[0].path}, {name}", info, [extent.box for extent in found])
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
    return rank.alike.get(f"{found.shape} {local.info.shape}")


def metadata_in(tree: Any, path: Path) -> Fields:
    """What a rank's file says about its shards.

    Raises:
        CheckpointError: it is not such a file.
    """
    if not isinstance(tree, dict) or not {"model", "shard_metadata"} <= tree.keys():
        refuse(str(path), "something else", "a dict with model and shard_metadata")
    return Fields(tree["shard_metadata"], f"{path}, shard_metadata")


def world_in(fields: Fields) -> tuple[int, int]:
    """The rank that wrote a file, and the number of ranks."""
    world_size = fields.number("world_size", least=1, most=_MAX_RANKS)
    return fields.number("rank", most=world_size - 1), world_size


def read_rank_file(path: Path) -> RankFile:
    """Read the file of one rank, with a :class:`.StoredTensor` for every tensor.

    Raises:
        CheckpointError: it is damaged, hostile, or not such a file.
    """
    tree = read_tree(path)
    fields = metadata_in(tree, path)
    if "format" not in fields.all() and "flatten_info" in fields.all():
        raise CheckpointError(f"{path}: PyTorch/XLA's FSDP saved it; consolidate the files to load")
    if fields.any("format") != FORMAT or fields.any("version") != VERSION:
        refuse(
            fields.where,
            f"{shorten(fields.any('format'))} {shorten(fields.any('version'))}",
            f"{FORMAT} {VERSION}, which get_shard_metadata makes",
        )
    return RankFile(
        path,
        *world_in(fields),
        tree,
        _parts(fields.object("shard_info"), f"{fields.where}, shard_info"),
        _parts(fields.all().get("optimizer_info", {}), f"{fields.where}, optimizer_info"),
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


_Ranks = TypeVar("_Ranks", bound=RankTree)


def in_order(ranks: list[_Ranks]) -> list[_Ranks]:
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
