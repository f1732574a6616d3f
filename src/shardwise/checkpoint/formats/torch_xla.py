"""Files of the ranks that PyTorch/XLA's own FSDP saved: where each parameter's elements are.

A shard is a rank's equal part of one parameter, or of several that ``flatten_parameters`` joined.
It is cut along rows, or, as here for 2 ranks, from the flat elements, with padding at the end:

    rank 0    a.weight a.weight a.weight a.bias
    rank 1    a.bias   b.weight padding  padding

``shard_metadata`` says what a shard is of: ``shard_info`` has its name and shape before it was cut,
by module; ``flatten_info`` the names, shapes and sizes of those that were joined; and
``buffer_info`` the dtypes that buffers had before they were cast.

Source: ``torch_xla.distributed.fsdp``, ``XlaFullyShardedDataParallel.get_shard_metadata``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.base.boxes import Box, boxes_of_span, row_major
from shardwise.base.errors import CheckpointError
from shardwise.base.strict import (
    MAX_DIMS,
    Fields,
    check_number,
    check_shape,
    check_text,
    refuse,
)
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo, dotted, dtype_name, torch_dtype
from shardwise.checkpoint.formats.rank_files import (
    RankSource,
    RankTree,
    in_order,
    metadata_in,
    plain_parts,
    world_in,
)
from shardwise.checkpoint.formats.source import Deferred, Extent, check_boxes
from shardwise.checkpoint.formats.torchfile import (
    StoredTensor,
    read_tree,
    versions_of,
)

_SHARD = "_fsdp_shard"  # what the last component of a shard's name begins with
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_fpw_module"})
_STEP = "step"  # a count, which is no shard even if it is as large as one


def is_of_xla(path: Path) -> bool:
    """Whether the file of a rank is one of PyTorch/XLA's.

    Raises:
        CheckpointError: it is damaged, hostile, or no such file.
    """
    fields = metadata_in(read_tree(path), path).all()
    return "format" not in fields and "flatten_info" in fields


@dataclass(frozen=True)
class Member:
    """A parameter in a shard.

    Attributes:
        name: its name in the model without wrappers.
        shape: its shape.
        first: index of its first element among the flat elements of all ranks.
    """

    name: str
    shape: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class Shard:
    """What the shards of one name are of.

    Attributes:
        name: the name in the model without wrappers.
        members: the parameters in it.
        shape: shape before it was cut.
        local: dtype and shape on each rank.
    """

    name: str
    members: tuple[Member, ...]
    shape: tuple[int, ...]
    local: TensorInfo

    @property
    def is_flat(self) -> bool:
        """Whether flat elements were cut, and not rows. With one dimension, both are the same."""
        return len(self.local.shape) == 1


class XlaFiles(RankSource):
    """The files that all ranks saved of a model that PyTorch/XLA's FSDP wraps.

    The state of the optimizer is taken apart by parameter. If the files do not say which parameter
    a state belongs to, ``left_out`` has the reason, and reading everything raises it; the model can
    be read. Buffers, and what else is not sharded, are those of the first rank.

    Args:
        files: paths of the files, in any order.

    Raises:
        CheckpointError: a file is missing, damaged, hostile, or of another checkpoint.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)
        self._ranks = in_order([_read(file) for file in files])
        self.where = self._ranks[0].path
        self._models = [_object(rank.tree["model"], f"{rank.path}, model") for rank in self._ranks]
        self._cast: dict[StatePath, torch.dtype] = {}
        self._shards = self._find_shards()
        self.tree = {"model": self._model()}
        self.versions = {_clean(name): n for name, n in versions_of(self._models[0]).items()}
        values: dict[StatePath, Any] = {}
        self._unknown = ""
        if all(isinstance(rank.tree.get("optimizer"), dict) for rank in self._ranks):
            tensors, names = dict(self.tensors), dict(self.by_name)
            try:
                self.tree["optimizer"] = self._optimizer()
            except _UnknownStateError as error:
                self.tensors, self.by_name = tensors, names
                self._unknown = self.left_out = f"{self.where}, optimizer: {error}"
                values["optimizer", "state"] = None
        self.hold_beside(self._ranks)
        values |= dict(plain_parts((), self.tree))
        self.values = Deferred(values, self._value)
        self._plain = values

    def _value(self, path: StatePath) -> Any:
        if self._unknown and path == ("optimizer", "state"):
            raise CheckpointError(f"{self._unknown}; the model alone can be read")
        return self._plain[path]

    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor; see :class:`.Source`. Buffers return in their first dtype."""
        if path in self._cast:
            stored = torch.empty(box.sizes, dtype=self._cast[path])
            super().read(path, box, stored)
            into.copy_(stored)
        else:
            super().read(path, box, into)

    # ---- the model ----

    def _find_shards(self) -> dict[str, Shard]:
        """What the shards in the model are of, by their names in the file, in order."""
        metadata = Fields(self._ranks[0].tree["shard_metadata"], f"{self.where}, shard_metadata")
        joined = {str(name): value for name, value in metadata.object("flatten_info").items()}
        found = {}
        for name, value in self._models[0].items():
            prefix, shard = _split(str(name))
            if shard:
                where = f"{self.where}, shard_metadata, {check_text(name, str(self.where))}"
                modules = Fields(metadata.object("shard_info"), where)
                info = Fields(Fields(modules.any(prefix), where).any(shard), where)
                shape = _sizes(info.any("_orig_size"), where)
                whole = f"{prefix}.{info.text('_orig_name')}".removeprefix(".")
                local = self._local(name, value)
                check_shape(shape, local.itemsize, where)
                members = (
                    _members(whole, joined[whole], shape, where)
                    if whole in joined
                    else (Member(_clean(whole), shape, 0),)
                )
                found[name] = Shard(_clean(whole), members, shape, local)
        return found

    def _local(self, name: str, first: Any) -> TensorInfo:
        """The dtype and shape of a shard, which are the same on all ranks."""
        for rank, model in zip(self._ranks, self._models, strict=True):
            each = model.get(name)
            if not isinstance(each, StoredTensor) or each.info != first.info:
                expected = first.info if isinstance(first, StoredTensor) else "a tensor"
                refuse(f"{rank.path}, {name}", each, f"{expected}, as on all ranks")
        info: TensorInfo = first.info
        return info

    def _model(self) -> dict[str, Any]:
        metadata = self._ranks[0].tree["shard_metadata"]
        where = f"{self.where}, shard_metadata, buffer_info"
        dtypes = {
            _clean(str(name)): Fields(value, where).any("_orig_dtype")
            for name, value in Fields(metadata.get("buffer_info", {}), where).all().items()
        }
        tree: dict[str, Any] = {}
        for name, value in self._models[0].items():
            if name in self._shards:
                stored = [model[name] for model in self._models]
                tree |= self._joined(("model",), (), self._shards[name], stored)
                continue
            short = _clean(check_text(name, f"{self.where}, model"))
            if short in tree:
                raise CheckpointError(f"{self.where}: found {short} twice, expected it once")
            path = ("model", short)
            if short in dtypes and isinstance(value, StoredTensor):
                self._cast[path] = torch_dtype(value.info.dtype)
                if not isinstance(dtypes[short], torch.dtype):
                    refuse(f"{where}, {short}", dtypes[short], "a dtype")
                tree[short] = self.whole(path, value, dtype_name(dtypes[short]), self.where)
            else:
                tree[short] = self.copied(path, value, self.where)
        return tree

    def _joined(
        self, path: StatePath, key: StatePath, shard: Shard, stored: Sequence[StoredTensor]
    ) -> dict[str, Any]:
        """Add the parameters of a shard, or one kind of their states.

        Args:
            path: what the tensors' paths begin with, before the names of parameters.
            key: and what they end with.
            shard: what the tensors are parts of.
            stored: those of all ranks.

        Returns:
            A placeholder for each, by the name of the parameter.
        """
        found = {}
        for member in shard.members:
            full = (*path, member.name, *key)
            extents = self._flat(member, stored) if shard.is_flat else self._rows(member, stored)
            info = TensorInfo(stored[0].info.dtype, member.shape)
            check_boxes(f"{self.where}, {dotted(full)}", info, [each.box for each in extents])
            found[member.name] = self.hold(full, info, extents)
        return found

    def _flat(self, member: Member, stored: Sequence[StoredTensor]) -> list[Extent]:
        """Where a parameter's elements are among the flat elements of all ranks."""
        found = []
        steps = row_major(member.shape)
        last = member.first + math.prod(member.shape)
        for rank, each in zip(self._ranks, stored, strict=True):
            (count,), (step,) = each.info.shape, each.strides
            begin = rank.rank * count
            first, end = max(begin, member.first), min(begin + count, last)
            for box in boxes_of_span(member.shape, first - member.first, end - member.first):
                at = member.first + box.span(member.shape)[0] - begin
                start = each.start + at * step * each.info.itemsize
                strides = tuple(step * n for n in steps)
                found.append(Extent(box, rank.path, start, strides, each.bits))
        return found

    def _rows(self, member: Member, stored: Sequence[StoredTensor]) -> list[Extent]:
        """Where a parameter's rows are that were cut without flattening them."""
        found = []
        for rank, each in zip(self._ranks, stored, strict=True):
            begin = rank.rank * each.info.shape[0]
            rows = min(each.info.shape[0], member.shape[0] - begin) if member.shape else 0
            box = Box((begin, *(0 for _ in each.info.shape[1:])), (rows, *each.info.shape[1:]))
            if rows > 0 and box.numel:
                found.append(Extent(box, rank.path, each.start, each.strides, each.bits))
        return found

    # ---- the optimizer ----

    def _optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict, by the names of the parameters before they were joined.

        Raises:
            _UnknownStateError: the files do not say which parameter each state belongs to.
        """
        trees = [rank.tree["optimizer"] for rank in self._ranks]
        groups = trees[0].get("param_groups")
        if not isinstance(groups, list) or not all(
            isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
        ):
            raise _UnknownStateError("found no param_groups, expected those of its state_dict()")
        shards = self._shards_of(groups)
        state: dict[str, Any] = {}
        first = trees[0].get("state")
        for number in first if isinstance(first, dict) else ():
            if number not in shards:
                raise _UnknownStateError(f"found state of {number!r}, which is in no group")
            values = [_state_of(tree, number) for tree in trees]
            for key in values[0]:
                found = self._state(shards[number], key, [each.get(key) for each in values])
                for name, value in found.items():
                    state.setdefault(name, {})[key] = value
        named = [
            {
                **self.copied(("optimizer", "param_groups", i), _without_params(group), self.where),
                "params": [m.name for n in group["params"] for m in shards[n].members],
            }
            for i, group in enumerate(groups)
        ]
        return {"state": state, "param_groups": named}

    def _shards_of(self, groups: list[dict[str, Any]]) -> dict[Any, Shard]:
        """The shard of each number in the groups of an optimizer.

        Names tell, if the optimizer was given any; or else the order, if all shards are in one
        group.
        """
        numbers = [number for group in groups for number in group["params"]]
        if not all(type(number) is int for number in numbers):
            raise _UnknownStateError("found parameters that are not numbers")
        names = [name for group in groups for name in _names(group)]
        if len(names) == len(numbers):
            known = {_clean(name): shard for name, shard in self._shards.items()}
            known |= {shard.name: shard for shard in self._shards.values()}
            found = [known.get(_clean(name)) for name in names]
            if None not in found:
                return {n: s for n, s in zip(numbers, found, strict=True) if s is not None}
        if len(groups) == 1 and len(numbers) == len(self._shards):
            return dict(zip(numbers, self._shards.values(), strict=True))
        raise _UnknownStateError(
            f"found {len(numbers)} parameters in {len(groups)} groups, without names, for "
            f"{len(self._shards)} shards in the model, so nothing tells which is which; expected "
            "one group with all of them, or an optimizer of model.named_parameters()"
        )

    def _state(self, shard: Shard, key: Any, found: list[Any]) -> dict[str, Any]:
        """The states of one kind of all parameters in a shard, by name."""
        check_text(key, f"{self.where}, optimizer") if isinstance(key, str) else None
        first, path = found[0], ("optimizer", "state")
        if not isinstance(first, StoredTensor):
            return {
                m.name: self.copied((*path, m.name, key), first, self.where) for m in shard.members
            }
        shapes = {each.info if isinstance(each, StoredTensor) else None for each in found}
        if len(shapes) == 1 and first.info.shape == shard.local.shape and key != _STEP:
            return self._joined(path, (key,), shard, found)
        if first.info.numel == 1:
            return {
                m.name: self.copied((*path, m.name, key), first, self.where) for m in shard.members
            }
        raise _UnknownStateError(
            f"found {key} of {first.info} for the shard {shard.name} of {shard.local}, expected a "
            "state like the shard, or a single number"
        )


class _UnknownStateError(Exception):
    """It is not known which parameter a state of the optimizer belongs to."""


def _read(path: Path) -> RankTree:
    tree = read_tree(path)
    fields = metadata_in(tree, path)
    fields.object("flatten_info")
    return RankTree(path, *world_in(fields), tree)


def _object(found: Any, where: str) -> dict[Any, Any]:
    """A dict with names as keys."""
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        refuse(where, found, "a state dict")
    return found


def _clean(name: str) -> str:
    """A name without the modules that wrap others."""
    return ".".join(each for each in name.split(".") if each not in _WRAPPERS)


def _split(name: str) -> tuple[str, str]:
    """The module that a shard belongs to, and the shard's own name; empty if it is no shard."""
    parts = name.split(".")
    at = next((i for i, each in enumerate(parts) if each.startswith(_SHARD)), len(parts))
    return ".".join(parts[:at]), ".".join(parts[at:])


def _sizes(found: Any, where: str) -> tuple[int, ...]:
    """A shape: saved as a list or a tuple."""
    if not isinstance(found, list | tuple) or len(found) > MAX_DIMS:
        refuse(where, found, f"a shape of at most {MAX_DIMS} dimensions")
    return tuple(check_number(size, f"{where}, shape") for size in found)


def _members(whole: str, found: Any, shape: tuple[int, ...], where: str) -> tuple[Member, ...]:
    """The parameters that were joined, one after the other."""
    if not isinstance(found, list | tuple) or len(found) != 3:
        refuse(where, found, "names, shapes and sizes")
    names, shapes, counts = found
    if not all(isinstance(each, list | tuple) and len(each) == len(names) for each in found):
        refuse(where, "names, shapes and sizes of different lengths", "equal lengths")
    module = whole.rpartition(".")[0]
    members, first = [], 0
    for name, sizes, count in zip(names, shapes, counts, strict=True):
        if not isinstance(name, str) or math.prod(_sizes(sizes, where)) != count:
            refuse(f"{where}, {name!r:.80}", count, "as many elements as its shape has")
        full = _clean(check_text(f"{module}.{name}", where))
        members.append(Member(full, _sizes(sizes, where), first))
        first += count
    if shape != (first,):
        refuse(where, f"{first} elements", f"those of {list(shape)}")
    return tuple(members)


def _names(group: Mapping[str, Any]) -> Iterator[str]:
    """The names of a group's parameters, if the optimizer was given any."""
    names = group.get("param_names")
    if isinstance(names, list):
        yield from (name for name in names if isinstance(name, str))


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _state_of(tree: Mapping[str, Any], number: Any) -> dict[Any, Any]:
    state = tree.get("state")
    values = state.get(number) if isinstance(state, dict) else None
    if not isinstance(values, dict):
        raise _UnknownStateError(f"found no state of parameter {number} on some ranks")
    return values
