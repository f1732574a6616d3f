"""Full parameters that stay in memory although shards may change: are they those of the shards?

Two kinds do: those of a small group, from forward to backward, and those that stay unsharded, or
kept on fewer ranks, beyond a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise import _torch
from shardwise.sharding.param import ShardedParam


@dataclass(frozen=True)
class Leftover:
    """Of which shards full parameters were made that were left in memory.

    Attributes:
        versions: numbers that change when a shard is written to, as a ``DTensor`` or as what is in
            it.
        may_be_stepped: whether an optimizer may have written to them in another way.
    """

    versions: list[int]
    may_be_stepped: bool = False

    @classmethod
    def of(cls, params: Sequence[ShardedParam], *, evaluated: bool = False) -> Leftover:
        """What is left of ``params`` now.

        Args:
            params: of one group.
            evaluated: an evaluation left them, after which an optimizer may step. It writes to
                shards past autograd's sight, where there are gradients.
        """
        stepped = evaluated and any(param.sharded.grad is not None for param in params)
        return cls(_versions(params), stepped)

    def is_stale(self, params: Sequence[ShardedParam]) -> bool:
        """Whether the shards of ``params`` may have changed since."""
        return self.may_be_stepped or self.versions != _versions(params)


def _versions(params: Sequence[ShardedParam]) -> list[int]:
    return [
        _torch.version_of(tensor) for param in params for tensor in (param.sharded, param.local)
    ]
