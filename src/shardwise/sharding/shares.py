"""What every rank holds of every group, told from the layouts alone: no process group, no memory.

    shares_of(model, units, world_size=128)     a model on the meta device will do

The answer is about the ranks that a mesh shards over. Where it replicates too, all copies are
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from torch import nn
from torch.distributed.tensor import Shard

from shardwise.sharding.layout import Layout


@dataclass(frozen=True)
class RankRange:
    """Ranks that follow each other and hold equally much.

    Attributes:
        first: the first rank.
        last: the last rank, inclusive.
        numel: elements that each of them holds.
    """

    first: int
    last: int
    numel: int


@dataclass(frozen=True)
class Shares:
    """How some parameters are dealt out: those of a group, or of a whole model.

    Attributes:
        fqn: name of the module whose group it is; empty for the model's own.
        layouts: how each parameter is cut, by its name in the model.
        world_size: number of ranks that they are sharded over.
    """

    fqn: str
    layouts: Mapping[str, Layout]
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of all parameters, whole."""
        return sum(layout.numel for layout in self.layouts.values())

    @property
    def padding(self) -> int:
        """Elements of the gathered buffers that belong to no parameter."""
        return self.padded_numel - self.numel

    @property
    def padded_numel(self) -> int:
        """Elements of the buffers that all parameters are gathered into."""
        return sum(layout.padded_numel for layout in self.layouts.values())

    def held_by(self, rank: int) -> int:
        """Elements that ``rank`` holds."""
        return sum(layout.shard_shape(rank).numel() for layout in self.layouts.values())

    def ranges(self) -> list[RankRange]:
        """All ranks, joined where neighbors hold equally much."""
        ranges = []
        for numel, ranks in groupby(range(self.world_size), key=self.held_by):
            first, *rest = ranks
            ranges.append(RankRange(first, rest[-1] if rest else first, numel))
        return ranges


def shares_of(
    model: nn.Module,
    units: Iterable[nn.Module],
    world_size: int,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
) -> list[Shares]:
    """What ``fully_shard`` would deal out if it were applied to the units, and then to the model.

    Args:
        model: the model, on any device.
        units: modules in it, inner ones before those that contain them.
        world_size: number of ranks to shard over.
        placement: what would be passed as ``shard_placement_fn``.

    Returns:
        One for each unit, in their order, and the last for what is left to the model. A parameter
        that is tied across units counts in the first.
    """
    names = {module: name for name, module in model.named_modules()}
    fqns = {param: name for name, param in model.named_parameters()}
    taken: set[nn.Parameter] = set()

    def own(unit: nn.Module) -> Iterator[tuple[str, Layout]]:
        for param in unit.parameters():
            if param not in taken:
                taken.add(param)
                cut = None if placement is None else placement(param)
                yield fqns[param], Layout.of(param.shape, world_size, 0 if cut is None else cut.dim)

    return [Shares(names[unit], dict(own(unit)), world_size) for unit in (*units, model)]


def together(shares: Iterable[Shares]) -> Shares:
    """All of them as one, named as the last: what a rank holds in all."""
    *first, last = shares
    layouts = {name: layout for each in (*first, last) for name, layout in each.layouts.items()}
    return Shares(last.fqn, layouts, last.world_size)
