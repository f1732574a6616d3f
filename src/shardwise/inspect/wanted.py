"""A mesh as people write it: ``dp=2,tp=4``. No torch here: the command line asks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.frontends.strategies import REPLICATE, SHARD, MeshError

DATA, TENSOR = "dp", "tp"
MOST_RANKS = 16_384

_ORDER = (REPLICATE, DATA, SHARD, TENSOR)


@dataclass(frozen=True)
class WantedMesh:
    """A mesh that need not be there.

    Attributes:
        names: of its dimensions: ``dp_replicate``, ``dp`` or ``dp_shard``, ``tp``, in this order.
        shape: ranks along each.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many ranks it takes."""
        return math.prod(self.shape)

    @property
    def tensor_parallel(self) -> int:
        """Over how many ranks tensor parallelism cuts."""
        return dict(zip(self.names, self.shape, strict=True)).get(TENSOR, 1)

    @property
    def data_parallel(self) -> tuple[str, ...]:
        """The dimensions that ``fully_shard`` gets."""
        return tuple(name for name in self.names if name != TENSOR)

    @classmethod
    def parse(cls, text: str) -> WantedMesh:
        """Read ``dp=2,tp=4`` or ``dp_replicate=2,dp_shard=4,tp=2``.

        Raises:
            MeshError: a name that is unknown, given twice or in another order than these, a size
                that is no positive number, or more than 16,384 ranks.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if name not in _ORDER:
                raise MeshError(f"{name!r} in {text!r}", f"one of {', '.join(_ORDER)}")
            if name in sizes:
                raise MeshError(f"{name} twice in {text!r}", "each dimension once")
            if not equals or not size.isdecimal() or not int(size):
                raise MeshError(f"{part.strip()!r} in {text!r}", f"{name}=N, N a number from 1")
            sizes[name] = int(size)
        _check(text, sizes)
        if REPLICATE in sizes and not {DATA, SHARD} & sizes.keys():
            place = list(sizes).index(REPLICATE) + 1
            items = [*sizes.items()]
            sizes = dict([*items[:place], (SHARD, 1), *items[place:]])
        return cls(tuple(sizes), tuple(sizes.values()))


def _check(text: str, sizes: dict[str, int]) -> None:
    if DATA in sizes and SHARD in sizes:
        raise MeshError(f"both {DATA} and {SHARD} in {text!r}", "one of them: they mean the same")
    ordered = sorted(sizes, key=_ORDER.index)
    if list(sizes) != ordered:
        right = ",".join(f"{name}={sizes[name]}" for name in ordered)
        raise MeshError(text, f"{right}: replicas outermost, tensor parallelism innermost")
    ranks = math.prod(sizes.values())
    if ranks > MOST_RANKS:
        raise MeshError(f"{text}, {ranks:,} ranks", f"at most {MOST_RANKS:,}")
