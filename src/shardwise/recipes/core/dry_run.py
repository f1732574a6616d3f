"""``--dry-run``: what every rank would hold, shown without training, for any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import Shard

from shardwise.frontends.strategies import ShardingPlan
from shardwise.recipes.core.config import (
    AdamWConfig,
    Precision,
    SgdConfig,
    ShardingConfig,
    TrainConfig,
    resolve_sharding,
)
from shardwise.sharding.shares import RankRange, Shares, shares_of, together

STORED = 4  # bytes per element of parameters, gradients and optimizer state at rest: fp32
ITEMSIZE: Mapping[Precision, int] = {Precision.FP32: 4, Precision.BF16: 2}


@dataclass(frozen=True)
class Blueprint:
    """A model without memory, and how it will be sharded.

    Attributes:
        name: what the model is called.
        model: on the meta device.
        units: the modules that become groups of their own, inner ones first; the rest is one group.
        placement: the dimension that a parameter is sharded along; None: the first.
    """

    name: str
    model: nn.Module
    units: Sequence[nn.Module]
    placement: Callable[[nn.Parameter], Shard | None] | None = None

    def shares(self, ranks: int) -> list[Shares]:
        """Return what every rank holds of each group, the model's own group last."""
        return shares_of(self.model, self.units, ranks, self.placement)


@dataclass(frozen=True)
class AtRest:
    """The fp32 tensors of each parameter that a rank keeps between steps.

    Attributes:
        copies: how many there are, the parameter among them.
        text: what they are.
    """

    copies: int
    text: str

    @classmethod
    def of(cls, config: TrainConfig) -> AtRest:
        """Return what a training keeps."""
        match config.optimizer:
            case AdamWConfig():
                copies, text = 4, "parameters, gradients and two states of AdamW"
            case SgdConfig(momentum=0):
                copies, text = 2, "parameters and gradients"
            case SgdConfig():
                copies, text = 3, "parameters, gradients and the momentum of SGD"
        if config.diloco is None:
            return cls(copies, text)
        extra = 3 if config.diloco.error_feedback else 2
        return cls(copies + extra, f"{text}, {extra} of DiLoCo")


ADAMW = AtRest(4, "parameters, gradients and two states of AdamW")


@dataclass(frozen=True)
class Outlook:
    """What a training would hold.

    Attributes:
        model_name: for the first line.
        groups: what every rank holds of each group, the model's own group last.
        plan: over how many ranks.
        config: in which dtypes.
        kept: what a rank keeps between steps.
    """

    model_name: str
    groups: Sequence[Shares]
    plan: ShardingPlan
    config: ShardingConfig
    kept: AtRest = ADAMW

    @classmethod
    def of(cls, blueprint: Blueprint, config: TrainConfig, world_size: int) -> Outlook:
        """Return what a training would hold in a world of this size."""
        plan = resolve_sharding(config.sharding, world_size)
        groups = blueprint.shares(plan.shape[-1])
        return cls(blueprint.name, groups, plan, config.sharding, AtRest.of(config))

    @property
    def full(self) -> Shares:
        """What every rank holds of the model."""
        return together(self.groups)

    def at_rest(self, rank: int) -> int:
        """Return the bytes of the rank's parameters, gradients and optimizer state."""
        return self.full.held_by(rank) * STORED * self.kept.copies

    @property
    def unsharded(self) -> int:
        """Peak bytes of full parameters, beside the shards.

        Two neighboring groups at most, one computing while the other is gathered, and the model's
        own group; or all groups, where they stay unsharded from forward to backward.
        """
        if not self.plan.reshard_after_forward:
            return self._full(self.groups)
        return self._largest_neighbors() + self._full(self.groups[-1:])

    @property
    def gradients(self) -> int:
        """Peak bytes of full gradients: one group's are reduced while the next computes."""
        return self._largest_neighbors() + self._full(self.groups[-1:])

    def _largest_neighbors(self) -> int:
        inner = self.groups[:-1]
        return max((self._full(two) for two in pairwise(inner)), default=self._full(inner))

    def _full(self, groups: Sequence[Shares]) -> int:
        return sum(each.padded_numel for each in groups) * ITEMSIZE[self.config.param_dtype]


def show(outlook: Outlook, console: Console | None = None) -> None:
    """Print the groups, and which rank holds how much; equal groups and ranks share a row."""
    # Wide enough that no figure is cut off in a narrow window.
    console = console or Console(width=max(Console().width, 120))
    full = outlook.full
    say = console.print
    count = len(outlook.groups)
    say(
        f"model      {outlook.model_name}, {full.numel:,} parameters in {count} "
        f"{'group' if count == 1 else 'groups'}",
        highlight=False,
    )
    ranks = full.world_size
    cut = f"every parameter is split into {ranks} {'shard' if ranks == 1 else 'shards'}"
    over = f"sharding   {outlook.config.strategy.value} over {outlook.plan}"
    replicas = outlook.plan.shape[0] if len(outlook.plan.shape) == 2 else 1
    say(f"{over}: {cut}" if replicas == 1 else over, highlight=False)
    if replicas > 1:
        say(f"           {cut}; {replicas} copies of the model", highlight=False)
    say(_table(outlook), highlight=False)
    for text in _memory(outlook):
        say(text, highlight=False)


def _table(outlook: Outlook) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("group", no_wrap=True)
    for name in ("groups", "parameters", "padding", "ranks", "elements", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for alike in _alike(outlook.groups):
        name = _pattern(alike[0].fqn) if len(alike) > 1 else alike[0].fqn
        last = alike[0] is outlook.groups[-1] and len(outlook.groups) > 1
        _add(table, "the rest" if last else name or "the model", len(alike), alike[0])
    if len(outlook.groups) > 1:
        _add(table, "total", len(outlook.groups), outlook.full)
    return table


def _add(table: Table, name: str, count: int, shares: Shares) -> None:
    facts = [name, str(count), f"{shares.numel:,}", f"{shares.padding:,}"]
    for each in shares.ranges():
        mib = f"{each.numel * STORED / 2**20:,.2f}"
        table.add_row(*facts, _ranks(each), f"{each.numel:,}", mib)
        facts = [""] * len(facts)


def _alike(groups: Sequence[Shares]) -> list[list[Shares]]:
    """Collect groups whose names differ by a number only, as the blocks of a transformer."""
    found: dict[object, list[Shares]] = {}
    for each in groups:
        # Blocks of one name but other shapes have a row each.
        found.setdefault((_pattern(each.fqn), tuple(each.layouts.values())), []).append(each)
    return list(found.values())


def _pattern(fqn: str) -> str:
    return re.sub(r"\b\d+\b", "*", fqn)


def _ranks(each: RankRange) -> str:
    return f"{each.first}" if each.first == each.last else f"{each.first}-{each.last}"


def _memory(outlook: Outlook) -> list[str]:
    def size(nbytes: int) -> str:
        return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"

    # The first rank has no fewer rows of anything than any other, and the last has no more.
    first, last = outlook.at_rest(0), outlook.at_rest(outlook.full.world_size - 1)
    least, most = size(last), size(first)
    rest = f"{most} a rank" if least == most else f"{least} to {most} a rank"
    dtype = outlook.config.param_dtype.value
    return [
        f"at rest    {rest}: {outlook.kept.text}, fp32",
        f"at peak    {size(outlook.unsharded)} of full parameters and "
        f"{size(outlook.gradients)} of full gradients more,",
        f"           {dtype}, and activations",
    ]
