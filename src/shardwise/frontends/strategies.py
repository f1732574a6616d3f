"""Sharding strategies and meshes by name, resolved to a mesh and arguments of ``fully_shard``.

No code below this file asks which strategy is in use. It does not import torch, so the command line
can check its options with it.

    strategy            mesh (replicate, shard)   reshard_after_forward   ZeRO
    FULL_SHARD          (N,)                      True                    3
    SHARD_GRAD_OP       (N,)                      False                   2
    ZERO1               (N,)                      False                   1
    NO_SHARD            (N, 1)                    False                   0
    HYBRID_SHARD        (R, N / R)                True                    3 inside, 0 across
    HYBRID_SHARD_ZERO2  (R, N / R)                False                   2 inside, 0 across
    DILOCO              (R, N / R), shard only    True                    3 inside, separate across

DILOCO shards over the second dimension only. Across the first, replicas train separately and
synchronize once in many steps (:mod:`shardwise.diloco`).

ZERO1 differs from SHARD_GRAD_OP only under gradient accumulation: gradients are kept in full
between microbatches and reduced once per step.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.base.errors import NotPossibleError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import ShardingStrategy


REPLICATE = "dp_replicate"
SHARD = "dp_shard"
DATA, TENSOR = "dp", "tp"
MOST_RANKS = 4_096  # of a mesh that need not exist
_MOST_DIGITS = 18  # of the size of a dimension

_ORDER = (REPLICATE, DATA, SHARD, TENSOR)


class Checkpointing(enum.Enum):
    """Which activations of a block are recomputed in backward."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"  # all but the results of matrix products, convolutions and attention
    OPERATOR = "op"  # the same, and every second of these products
    OFFLOAD = "offload"  # all, from inputs that are kept on the host or a disk


class Runtime(enum.Enum):
    """Whose ``fully_shard`` shards a model."""

    SHARDWISE = "shardwise"
    TORCH = "torch"  # torch.distributed.fsdp's


class Strategy(enum.Enum):
    """How parameters, gradients and optimizer state are distributed over ranks.

    The values are the names on the command line. Beside torch's ``ShardingStrategy``, which
    :meth:`of` converts, there are ZeRO-1 and DiLoCo.
    """

    FULL_SHARD = "full"
    SHARD_GRAD_OP = "grad-op"
    NO_SHARD = "no-shard"
    HYBRID_SHARD = "hybrid"
    HYBRID_SHARD_ZERO2 = "hybrid-zero2"
    ZERO1 = "zero1"
    DILOCO = "diloco"

    @classmethod
    def of(cls, strategy: ShardingStrategy) -> Strategy:
        """Convert torch's ``ShardingStrategy``.

        Raises:
            TypeError: ``strategy`` is something else.
        """
        name = getattr(strategy, "name", "").lstrip("_")
        if type(strategy).__name__ != "ShardingStrategy" or name not in cls.__members__:
            raise TypeError(
                f"sharding_strategy: found {strategy!r}, expected a ShardingStrategy; import it "
                "from shardwise"
            )
        return cls[name]

    @property
    def is_hybrid(self) -> bool:
        """Whether the number of replicas has to be given."""
        return self in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2, Strategy.DILOCO)


class MeshError(NotPossibleError):
    """A mesh, or a strategy with a number of replicas, that is impossible in this world."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__("", found, expected)


@dataclass(frozen=True)
class ShardingPlan:
    """A mesh and arguments of ``fully_shard``.

    Attributes:
        shape: number of ranks along each mesh dimension.
        names: names of the mesh dimensions.
        reshard_after_forward: free the full parameters between forward and backward; a number:
            keep them cut over this many consecutive ranks meanwhile.
        apart: replicas train separately: ``fully_shard`` does not get their mesh dimension.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    reshard_after_forward: bool | int
    apart: bool = False

    def make_mesh(self, device_type: str) -> DeviceMesh:
        """Create the mesh over all ranks of the default process group."""
        from shardwise.frontends.device_mesh import make_mesh

        return make_mesh(device_type, self.shape, self.names)

    def sharding_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The submesh that ``fully_shard`` gets."""
        return mesh[SHARD] if self.apart else mesh

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in zip(self.names, self.shape, strict=True))


def resolve(
    strategy: Strategy, world_size: int, *, replicas: int | None = None, hosts: int = 1
) -> ShardingPlan:
    """Resolve a strategy to a mesh shape and arguments of ``fully_shard``.

    Args:
        strategy: the strategy.
        world_size: number of ranks.
        replicas: number of copies of the model, for hybrid strategies and DiLoCo; ``None`` for one
            per host, if there are several hosts.
        hosts: number of hosts.

    Raises:
        MeshError: the arguments contradict each other.
    """
    reshard = strategy in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD, Strategy.DILOCO)
    if strategy is Strategy.NO_SHARD:
        _require_replicas(strategy, replicas, world_size)
        return ShardingPlan((world_size, 1), (REPLICATE, SHARD), reshard)
    if not strategy.is_hybrid:
        _require_replicas(strategy, replicas, 1)
        return ShardingPlan((world_size,), (SHARD,), reshard)
    if replicas is None:
        if hosts == 1:
            raise MeshError(
                f"{strategy.value} on one host without a number of replicas",
                f"one that divides the {world_size} ranks",
            )
        replicas = hosts
    if replicas < 1 or world_size % replicas:
        raise MeshError(f"{replicas}", f"a number that divides the {world_size} ranks")
    shape = (replicas, world_size // replicas)
    return ShardingPlan(shape, (REPLICATE, SHARD), reshard, apart=strategy is Strategy.DILOCO)


#: A value of ``--reshard-after-forward``.
HOST = "host"


def reshard_over(plan: ShardingPlan, asked: str | int, ranks_per_host: int) -> bool | int:
    """Read ``--reshard-after-forward``: where backward gathers parameters from.

    Args:
        plan: what the strategy says.
        asked: ``host``, or a number of ranks; ``True`` and ``False`` are what ``fully_shard`` gets.
        ranks_per_host: how many consecutive ranks of the sharding dimension share a host.

    Returns:
        ``reshard_after_forward`` of ``fully_shard``.

    Raises:
        MeshError: parameters cannot be kept over that number of ranks.
    """
    if isinstance(asked, bool):
        return asked
    asked = str(asked)
    if not plan.reshard_after_forward:
        raise MeshError(
            f"{asked} with a strategy that keeps full parameters for backward",
            "full, hybrid or diloco, or none given",
        )
    ranks = plan.shape[-1]
    if asked == HOST:
        size = min(ranks_per_host, ranks)
        found = f"{HOST}, {size} of {ranks} ranks"
    else:
        size = int(asked) if asked.isdecimal() and len(asked) <= _MOST_DIGITS else 0
        found = asked
    if size < 2 or ranks % size:
        raise MeshError(
            found, f"{HOST} or a number from 2 that divides the {ranks} ranks that share parameters"
        )
    return True if size == ranks else size


def _require_replicas(strategy: Strategy, found: int | None, expected: int) -> None:
    if found not in (None, expected):
        hybrid = " or a hybrid strategy" if expected == 1 else ""
        raise MeshError(
            f"{found} with strategy {strategy.value}", f"{expected}, or none given{hybrid}"
        )


def _sizes(text: str) -> dict[str, int]:
    """Read ``dp_replicate=2,dp_shard=4``.

    Args:
        text: the mesh.

    Returns:
        Number of ranks by dimension name, in the given order.

    Raises:
        MeshError: a name is unknown or given twice, or a size is no positive number.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if name not in _ORDER:
            found = repr(text) if part == text else f"{part.strip()!r} in {text!r}"
            raise MeshError(found, f"NAME=N with a name among {', '.join(_ORDER)}")
        if name in sizes:
            raise MeshError(f"{name} twice in {text!r}", "each dimension once")
        # Python reads 4,300 digits at most, and raises a ValueError of its own beyond them.
        if not equals or not size.isdecimal() or len(size) > _MOST_DIGITS or not int(size):
            where = "" if part == text else f" in {text!r}"
            raise MeshError(f"{part.strip()!r}{where}", f"{name}=N, N a number from 1")
        sizes[name] = int(size)
    return sizes


@dataclass(frozen=True)
class WantedMesh:
    """The names and sizes of a mesh that need not exist.

    Attributes:
        names: its dimensions: ``dp_replicate``, ``dp`` or ``dp_shard``, ``tp``, in this order.
        shape: number of ranks along each dimension.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def tensor_parallel(self) -> int:
        """Number of ranks along the tensor parallel dimension."""
        return dict(zip(self.names, self.shape, strict=True)).get(TENSOR, 1)

    @property
    def data_parallel(self) -> tuple[str, ...]:
        """The names of the dimensions that ``fully_shard`` gets."""
        return tuple(name for name in self.names if name != TENSOR)

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.shape, strict=True))

    @classmethod
    def parse(cls, text: str, most_ranks: int = MOST_RANKS) -> WantedMesh:
        """Read ``dp=2,tp=4`` or ``dp_replicate=2,dp_shard=4,tp=2``.

        Args:
            text: the mesh.
            most_ranks: how many ranks it may have.

        Raises:
            MeshError: a name is unknown, given twice or in the wrong order, a size is no positive
                number, or there are more than ``most_ranks`` ranks.
        """
        sizes = _sizes(text)
        _check(text, sizes, most_ranks)
        if REPLICATE in sizes and not {DATA, SHARD} & sizes.keys():
            place = list(sizes).index(REPLICATE) + 1
            items = [*sizes.items()]
            sizes = dict([*items[:place], (SHARD, 1), *items[place:]])
        return cls(tuple(sizes), tuple(sizes.values()))


def _check(text: str, sizes: dict[str, int], most_ranks: int) -> None:
    if DATA in sizes and SHARD in sizes:
        raise MeshError(f"both {DATA} and {SHARD} in {text!r}", "one of them: they mean the same")
    ordered = sorted(sizes, key=_ORDER.index)
    if list(sizes) != ordered:
        right = ",".join(f"{name}={sizes[name]}" for name in ordered)
        raise MeshError(text, f"{right}: replicas outermost, tensor parallelism innermost")
    ranks = math.prod(sizes.values())
    if ranks > most_ranks:
        raise MeshError(f"{text}, {ranks:,} ranks", f"at most {most_ranks:,}")
