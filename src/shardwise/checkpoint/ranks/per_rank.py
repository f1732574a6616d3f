"""Values of ``extra`` that each rank has its own of: random states, positions in the data.

They are saved under one key, by the ranks that saved them:

    extra.random.$ranks.0     the first rank's
    extra.random.$ranks.1     the second's
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.values import RANKS


@dataclass(frozen=True)
class PerRank:
    """What each rank saved under one key of ``extra``, as :func:`.load` returns it.

    It can be saved again as it is.

    Attributes:
        key: the key, with those that lead to it: ``"random"``, ``"data.position"``.
        values: the values of all ranks that saved, in their order.
    """

    key: str
    values: tuple[Any, ...]

    def local(self, group: dist.ProcessGroup | None = None) -> Any:
        """Return this rank's value.

        Args:
            group: the ranks that load; the default process group if ``None``.

        Returns:
            What this rank passed to :func:`per_rank`.

        Raises:
            CheckpointError: another number of ranks saved it. ``values`` has what they saved.
        """
        joined = dist.is_initialized()
        size = dist.get_world_size(group) if joined else 1
        if size != len(self.values):
            raise CheckpointError(
                f"extra.{self.key}: found the values of {len(self.values)} ranks, expected {size}, "
                "one for each rank that loads; .values has all that were saved"
            )
        return self.values[dist.get_rank(group) if joined else 0]


@dataclass(frozen=True)
class LocalValue:
    """This rank's value; what :func:`per_rank` returns.

    Attributes:
        value: tensors and plain values.
    """

    value: Any


def per_rank(value: Any) -> LocalValue:
    """Have each rank's own value saved under a key of ``extra``.

    ::

        extra = {"step": step, "random": checkpoint.per_rank(torch.get_rng_state())}
        checkpoint.save(path, model, optimizer, extra)
        extra = checkpoint.load(path, model, optimizer)
        torch.set_rng_state(extra["random"].local())

    Every rank passes one under the same key. :func:`load` returns a ``PerRank`` of all of them
    there, on any number of ranks.

    Args:
        value: tensors and plain values, as for :func:`save`.

    Returns:
        What to put into ``extra``.
    """
    return LocalValue(value)


def by_rank(leaf: LocalValue | PerRank, rank: int) -> dict[str, Any]:
    """What to save in place of a value that differs by rank.

    Args:
        leaf: the value of this rank, or those of all ranks.
        rank: this rank, among those that save.
    """
    values = {rank: leaf.value} if isinstance(leaf, LocalValue) else dict(enumerate(leaf.values))
    return {RANKS: {str(each): value for each, value in values.items()}}


def restored(extra: Any, prefix: str = "") -> Any:
    """Return ``extra`` with a :class:`PerRank` wherever ranks saved values of their own.

    Raises:
        CheckpointError: values of some ranks are missing.
    """
    if not isinstance(extra, dict) or not all(type(key) is str for key in extra):
        return extra
    if extra.keys() != {RANKS}:
        return {
            key: restored(each, f"{prefix}.{key}" if prefix else str(key))
            for key, each in extra.items()
        }
    found = extra[RANKS]
    numbers = [str(number) for number in range(len(found))] if isinstance(found, dict) else []
    if not numbers or set(numbers) != found.keys():
        raise CheckpointError(f"extra.{prefix}: is damaged: found {RANKS} without all its ranks")
    return PerRank(prefix, tuple(found[number] for number in numbers))
