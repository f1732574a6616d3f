"""States that are tensor subclasses, saved as the plain tensors that each shard consists of.

Torch's protocol for subclasses around other tensors (``__tensor_flatten__``,
``__tensor_unflatten__``) takes a shard apart into plain tensors and a context, and puts it together
again. What lies in those tensors is the subclass's own business, so they are saved shard by shard,
under the indices of the shard in the full state:

    state.up.weight.exp_avg.$shards.0:64,0:64.parts.codes     a tensor; also scale, qmap
    state.up.weight.exp_avg.$shards.0:64,0:64.class           "torchao...OptimState8bit"
    state.up.weight.exp_avg.$shards.0:64,0:64.context         [True, torch.float32]

Onto other shards, everything comes back exactly too, in one of three ways:

    the same shard                       as it was
    rows of saved shards                 by the subclass's own slices of rows, if it has them
    blocks that the new cut divides      as a plain tensor of the values that it stood for, in fp32

No class is imported because a checkpoint names it: the program has registered it before.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import dtensor
from shardwise.base.boxes import Box, is_tiling
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.entries import PathKey, StatePath

#: The key under which the shards of a state are.
SHARDS = "$shards"
_PARTS, _CLASS, _CONTEXT = "parts", "class", "context"
_VALUES = "values"  # the only part of a shard that is a plain tensor


def taken_apart(state: Tensor, *, plain_too: bool = False) -> dict[str, Any] | None:
    """Take this rank's shard of an optimizer's state apart.

    Args:
        state: the state; its shard may be a tensor subclass.
        plain_too: take plain shards apart too, since those of other ranks are subclasses.

    Returns:
        What to save in place of the state; ``None`` if it can be saved as it is.
    """
    local = dtensor.wait_tensor(dtensor.plain(state))
    flat = dtensor.flatten(local)
    if flat is None and not plain_too:
        return None
    if flat is None:
        shard: dict[str, Any] = {_CLASS: "", _CONTEXT: None, _PARTS: {_VALUES: local.detach()}}
    else:
        parts, context = flat
        detached = {name: part.detach() for name, part in parts.items()}
        shard = {_CLASS: _name(type(local)), _CONTEXT: _as_value(context), _PARTS: detached}
    return {SHARDS: {_key(Box(*dtensor.chunk_of(state))): shard}}


def whole_path(path: StatePath) -> StatePath | None:
    """Return the path of the state that a part belongs to; ``None`` if ``path`` is of no part."""
    return path[: path.index(SHARDS)] if SHARDS in path else None


def is_needed(path: StatePath, param: Tensor) -> bool:
    """Whether a part is of a shard that this rank's shard of ``param`` has elements of.

    Raises:
        CheckpointError: the path is no part of a shard.
    """
    at = path.index(SHARDS)
    if len(path) != at + 4 or path[at + 2] != _PARTS:
        raise CheckpointError(f"{path}: found another path, expected a part of a shard")
    box = _parsed(path[at + 1], path)
    return _checked(box, param, path).intersection(Box(*dtensor.chunk_of(param))) is not None


def put_together(tree: Mapping[str, Any], param: Tensor, where: str) -> Tensor:
    """Put the shard of a state together that this rank needs.

    Args:
        tree: what was read of the state: its shards, taken apart.
        param: the parameter that it is the state of, sharded as it is now.
        where: the state, for error messages.

    Returns:
        The state, sharded as the parameter.

    Raises:
        CheckpointError: the shards do not fit together, or cannot be cut like this one.
    """
    mine = Box(*dtensor.chunk_of(param))
    shards = tree[SHARDS].items()
    saved = {_checked(_parsed(key, where), param, where): each for key, each in shards}
    common = {box: both for box in saved if (both := mine.intersection(box)) is not None}
    here = [each.relative_to(mine.offsets) for each in common.values()]
    if len(saved) < len(shards) or not is_tiling(here, mine.sizes):
        raise CheckpointError(f"{where}: is damaged: its shards do not cover {_key(mine)}")
    found = [
        _SavedShard(box, common[box], str(saved[box].get(_CLASS)), _made(box, saved[box], where))
        for box in sorted(common, key=lambda box: box.offsets)
    ]
    local = _shard_at(mine, found, param, where).to(dtensor.plain(param).device)
    return dtensor.placed_as(param, local)


def _made(box: Box, saved: Mapping[str, Any], where: str) -> Tensor:
    """A saved shard, put together.

    Raises:
        CheckpointError: its class is not known, or does not accept what was saved.
    """
    name, parts = str(saved.get(_CLASS)), dict(saved.get(_PARTS, {}))
    if not name:
        made = parts.get(_VALUES)
    else:
        kind: Any = _class_named(name, where)
        try:
            made = kind.__tensor_unflatten__(
                parts, saved.get(_CONTEXT), torch.Size(box.sizes), None
            )
        except Exception as error:
            raise CheckpointError(
                f"{where}: {name} does not accept what was saved of it: {error}"
            ) from error
    if not isinstance(made, Tensor) or tuple(made.shape) != box.sizes:
        shape = list(made.shape) if isinstance(made, Tensor) else None
        raise CheckpointError(
            f"{where}: is damaged: found a shard of shape {shape}, expected {list(box.sizes)}"
        )
    return made


@dataclass(frozen=True)
class _SavedShard:
    """A saved shard that this rank needs some of.

    Attributes:
        box: where it is in the full state.
        common: which part of it this rank has, in indices of the full state.
        name: its class; empty of a plain tensor.
        tensor: its values.
    """

    box: Box
    common: Box
    name: str
    tensor: Tensor


def _shard_at(mine: Box, found: Sequence[_SavedShard], param: Tensor, where: str) -> Tensor:
    if not found:
        return torch.empty(mine.sizes, dtype=torch.float32)  # this rank has no elements
    if len(found) == 1 and found[0].box == mine:
        return found[0].tensor
    by_rows = all(
        (shard.box.offsets[1:], shard.box.sizes[1:]) == (mine.offsets[1:], mine.sizes[1:])
        for shard in found
    )
    if by_rows and found[0].name and len({shard.name for shard in found}) == 1:
        joined = _joined(found, mine)
        if joined is not None:
            return joined
    return _values(mine, found, param, where)


@dataclass(frozen=True)
class _Flat:
    """A tensor subclass, taken apart."""

    kind: Any
    parts: dict[str, Tensor]
    context: Any

    @classmethod
    def of(cls, tensor: Tensor) -> _Flat:
        """Take a tensor apart."""
        flat = dtensor.flatten(tensor)
        assert flat is not None
        return cls(type(tensor), flat[0], _as_value(flat[1]))

    def is_equal(self, other: _Flat) -> bool:
        """Whether both are the same, bit for bit."""
        return (
            (self.kind, self.context) == (other.kind, other.context)
            and self.parts.keys() == other.parts.keys()
            and all(_is_equal(part, other.parts[name]) for name, part in self.parts.items())
        )

    def grown(
        self, common: Set[str], pieces: Sequence[_Flat], rows: int, shape: tuple[int, ...]
    ) -> Tensor | None:
        """Put a tensor together from the parts of several; ``None`` if its class refuses.

        Args:
            common: the parts that all have in common. The others are appended to each other.
            pieces: the tensors, of which this is the first.
            rows: how many rows this one has.
            shape: of the result.
        """
        context = _with_shape(self.context, (rows, *shape[1:]), shape)
        try:
            parts = {
                name: part.clone()
                if name in common
                else torch.cat([each.parts[name] for each in pieces])
                for name, part in self.parts.items()
            }
            made: Tensor = self.kind.__tensor_unflatten__(parts, context, torch.Size(shape), None)
        except Exception:  # which one depends on the subclass
            return None
        return made if tuple(made.shape) == shape else None


def _joined(found: Sequence[_SavedShard], mine: Box) -> Tensor | None:
    """Join rows of tensor subclasses, if the subclass can be sliced by rows.

    Which of its parts follow the rows, and which are common to all, is not known. So it is guessed,
    and the guess is tested: slices of the result have to be what it was joined from, bit for bit.

    Returns:
        The result; ``None`` if there is none, because a block would be divided, say.
    """
    pieces = []
    for shard in found:
        first, height = shard.common.offsets[0] - shard.box.offsets[0], shard.common.sizes[0]
        piece = _rows_of(shard.tensor, first, first + height)
        if piece is None:
            return None
        pieces.append(_Flat.of(piece))
    heights = [shard.common.sizes[0] for shard in found]
    names = list(pieces[0].parts)
    guesses = itertools.product(
        *(
            (True, False)
            if all(_is_equal(pieces[0].parts[name], each.parts[name]) for each in pieces)
            else (False,)
            for name in names
        )
    )
    for guess in guesses:
        common = {name for name, is_common in zip(names, guess, strict=True) if is_common}
        made = pieces[0].grown(common, pieces, heights[0], mine.sizes)
        if made is not None and _consists_of(made, pieces, heights):
            return made
    return None


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors are the same, bit for bit, in any dtype."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    mine, its = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(mine, its)


def _rows_of(tensor: Tensor, first: int, end: int) -> Tensor | None:
    """Return rows of a tensor subclass; ``None`` if it cannot be sliced there."""
    try:
        return tensor.narrow(0, first, end - first)
    except Exception:  # which one depends on the subclass
        return None


def _consists_of(whole: Tensor, pieces: Sequence[_Flat], heights: Sequence[int]) -> bool:
    """Whether ``pieces`` are the slices of a tensor, from its first row to its last."""
    ends = itertools.accumulate(heights)
    slices = (_rows_of(whole, end - height, end) for height, end in zip(heights, ends, strict=True))
    return all(
        each is not None and _Flat.of(each).is_equal(piece)
        for each, piece in zip(slices, pieces, strict=True)
    )


def _values(mine: Box, found: Sequence[_SavedShard], param: Tensor, where: str) -> Tensor:
    """Return the values that shards stand for.

    Raises:
        CheckpointError: they cannot be computed, or the optimizer would round them.
    """
    kinds = {shard.name for shard in found}
    dtype = torch.float32 if any(kinds) else found[0].tensor.dtype
    if param.dtype != dtype and any(kinds):
        raise CheckpointError(
            f"{where}: was saved as {' and '.join(filter(None, sorted(kinds)))} in shards "
            f"{', '.join(_key(shard.box) for shard in found[:3])}, and this rank's shard "
            f"{_key(mine)} divides a block. Its values need float32, and optimizers keep states in "
            f"the dtype of the parameter, {param.dtype}. Load it on a mesh that cuts between "
            "blocks, as the one that saved it does"
        )
    made = torch.empty(mine.sizes, dtype=dtype)
    for shard in found:
        try:
            values = torch.empty(shard.box.sizes, dtype=dtype).copy_(shard.tensor)
        except Exception as error:
            raise CheckpointError(
                f"{where}: {shard.name} cannot be cut as this rank's shard {_key(mine)}, and has "
                f"no values that can be copied to a plain tensor ({error}); load it on the mesh "
                "that saved it"
            ) from error
        from shardwise.base.boxes import narrow

        source = narrow(values, shard.common.relative_to(shard.box.offsets))
        narrow(made, shard.common.relative_to(mine.offsets)).copy_(source)
    return made


def _key(box: Box) -> str:
    """The name of a shard: ``"0:64,0:32"``; ``"all"`` for a tensor without dimensions."""
    return box.indices or "all"


def _parsed(key: PathKey, where: object) -> Box:
    """The box that :func:`_key` named.

    Raises:
        CheckpointError: it is no such name.
    """
    if key == "all":
        return Box((), ())
    try:
        spans = [[int(bound) for bound in span.split(":")] for span in str(key).split(",")]
        return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    except ValueError:
        raise CheckpointError(f"{where}: found shard {key!r}, expected indices") from None


def _checked(box: Box, param: Tensor, where: object) -> Box:
    if not box.is_inside(tuple(param.shape)):
        raise CheckpointError(
            f"{where}: found shard {_key(box)}, expected one of shape {list(param.shape)}"
        )
    return box


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_named(name: str, where: str) -> type[Tensor]:
    """Find the tensor subclass of a name among those that the program has registered.

    Raises:
        CheckpointError: there is none.
    """
    for each in torch.serialization.get_safe_globals():
        kind = each[0] if isinstance(each, tuple) else each
        if isinstance(kind, type) and issubclass(kind, Tensor) and _name(kind) == name:
            return kind
    raise CheckpointError(
        f"{where}: found a shard of {name}, which this program does not know; import its library "
        "first, and if that does not do it, call torch.serialization.add_safe_globals([...]) with "
        "the class"
    )


def _as_value(context: Any) -> Any:
    """Return a context with tuples in place of shapes, so that it is a plain value."""
    if isinstance(context, tuple):
        return tuple(_as_value(each) for each in context)
    return [_as_value(each) for each in context] if type(context) is list else context


def _with_shape(context: Any, before: Sequence[int], after: Sequence[int]) -> Any:
    """Return a context with one shape in place of another."""
    if isinstance(context, tuple) and context == tuple(before):
        return tuple(after)
    if isinstance(context, tuple | list):
        return type(context)([_with_shape(each, before, after) for each in context])
    return context
