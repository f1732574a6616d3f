"""What several ranks hold, and should hold alike: where it differs.

Buffers, replicated parameters, options of an optimizer, and the keys of ``extra`` are saved once.
Ranks compare digests of tensors, and plain values themselves, before they choose whose to save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise._torch.dtensor import plain
from shardwise.base.errors import CheckpointError
from shardwise.base.strict import shorten
from shardwise.checkpoint.disk.entries import StatePath, Value, dotted
from shardwise.checkpoint.disk.safetensors import digest_of
from shardwise.checkpoint.disk.values import RANKS


@dataclass(frozen=True)
class RankState:
    """What one rank holds.

    Attributes:
        tensors: the paths of all its tensors.
        values: everything else.
        digests: of tensors to compare, by path and offsets of the part that is here.
    """

    tensors: Sequence[StatePath]
    values: Sequence[Value]
    digests: Mapping[tuple[StatePath, tuple[int, ...]], str]


def digests_of(tensors: Mapping[str, Tensor], names: Set[str]) -> dict[str, str]:
    """Digests of this rank's parts of some tensors, by name."""
    return {name: digest_of(plain(each)) for name, each in tensors.items() if name in names}


@dataclass(frozen=True)
class _Mismatch:
    path: StatePath
    ranks: tuple[int, int]
    found: tuple[str, str]

    def __str__(self) -> str:
        one, other = self.ranks
        if self.found[0] == self.found[1]:
            return f"found {self.found[0]} that differs between rank {one} and rank {other}"
        return f"found {self.found[0]} on rank {one} and {self.found[1]} on rank {other}"


def check_alike(held: Sequence[RankState], names: Sequence[int]) -> str:
    """Check that ranks hold alike what they should.

    Args:
        held: what each rank holds.
        names: their numbers, for messages.

    Returns:
        What differs in the model or the optimizer; empty if nothing does.

    Raises:
        CheckpointError: something in ``extra`` differs, or a rank has no value where others have
            values of their own.
    """
    others: dict[StatePath, _Mismatch] = {}
    for each in _mismatches(held, names):
        if each.path[0] == "extra":
            raise CheckpointError(
                f"{dotted(each.path)}: {each}, expected the same on all ranks; keep each rank's "
                "with shardwise.checkpoint.per_rank(...)"
            )
        others.setdefault(each.path, each)
    _check_every_rank(held, names)
    if not others:
        return ""
    first = next(iter(others.values()))
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return (
        f"{dotted(first.path)}{more}: {first}. Of what ranks should have in common, the first "
        "rank's is saved. Without synchronization, statistics of BatchNorm always differ"
    )


def _mismatches(held: Sequence[RankState], names: Sequence[int]) -> Iterator[_Mismatch]:
    """Yield where a rank has something else than the first one that has anything there."""
    first: dict[Any, tuple[int, Any]] = {}
    for rank, each in enumerate(held):
        for key, path, found in _comparable(each):
            before, known = first.setdefault((key, path), (rank, found))
            if known != found and repr(known) != repr(found):  # NaN is not equal to itself
                shown = (_shown(known), _shown(found))
                yield _Mismatch(path, (names[before], names[rank]), shown)


def _comparable(held: RankState) -> Iterator[tuple[Any, StatePath, Any]]:
    """What to compare with other ranks, each with a key and its path."""
    for path, found in _structure(held).items():
        yield "kind", path, found
    for value in held.values:
        yield "value", value.path, value
    for (path, offsets), digest in held.digests.items():
        yield offsets, path, _Digest(digest)


@dataclass(frozen=True)
class _Digest:
    text: str


def _structure(held: RankState) -> dict[StatePath, str]:
    """What is at each path of ``extra``: a tensor, a value, a dict, or a list and its length."""
    found: dict[StatePath, str] = {}
    lengths: dict[StatePath, int] = {}
    leaves = [(path, "a tensor") for path in held.tensors]
    leaves += [(value.path, "a value") for value in held.values]
    for path, kind in leaves:
        if path[0] != "extra":
            continue
        found[path] = kind
        for at in range(1, len(path)):
            found[path[:at]] = "a dict"
            if isinstance(path[at], int):
                lengths[path[:at]] = max(lengths.get(path[:at], 0), int(path[at]) + 1)
    return found | {path: f"a list of {length}" for path, length in lengths.items()}


def _shown(found: Any) -> str:
    if isinstance(found, Value):
        return shorten(found.value)
    return "a tensor" if isinstance(found, _Digest) else str(found)


def _check_every_rank(held: Sequence[RankState], names: Sequence[int]) -> None:
    """Check that all ranks have a value where one has a value of its own.

    Raises:
        CheckpointError: one has none.
    """
    own: list[Set[StatePath]] = []
    for each in held:
        paths = (*each.tensors, *(value.path for value in each.values))
        own.append({p[: p.index(RANKS)] for p in paths if p[0] == "extra" and RANKS in p})
    for path in sorted(set().union(*own), key=dotted):
        for rank, mine in enumerate(own):
            if path not in mine:
                raise CheckpointError(
                    f"{dotted(path)}: found no value on rank {names[rank]}, expected one on every "
                    "rank: others passed shardwise.checkpoint.per_rank(...)"
                )
