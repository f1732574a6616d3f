"""``--dry-run``: what every rank would hold, shown without training, for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from rich.console import Console
from rich.table import Table

from shardwise.frontends.blocks import store_in
from shardwise.frontends.strategies import SHARD, ShardingPlan, WantedMesh
from shardwise.inspect.api import Blueprint, plan
from shardwise.inspect.report import GroupReport, Report
from shardwise.inspect.words import counted, fold, ranks_in_words
from shardwise.recipes.core.build import DTYPES
from shardwise.recipes.core.config import (
    AdamWConfig,
    Precision,
    SgdConfig,
    ShardingConfig,
    TrainConfig,
    resolve_sharding,
)

ITEMSIZE: Mapping[Precision, int] = {Precision.FP32: 4, Precision.BF16: 2}


@dataclass(frozen=True)
class AtRest:
    """The tensors of each parameter that a rank keeps between steps.

    Attributes:
        copies: how many there are in the dtype of the shards, the parameter among them.
        text: what they are.
        outer: how many more there are in fp32, of DiLoCo.
    """

    copies: int
    text: str
    outer: int = 0

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
        outer = 3 if config.diloco.error_feedback else 2
        return cls(copies, f"{text}, {outer} of DiLoCo", outer)


ADAMW = AtRest(4, "parameters, gradients and two states of AdamW")


@dataclass(frozen=True)
class Outlook:
    """What a training would hold.

    Attributes:
        report: the layout of one copy of the model.
        plan: the strategy, and how many copies there are.
        config: the dtypes.
        kept: what a rank keeps between steps.
        trained: the part of the parameters that is trained; the rest has neither gradients nor
            optimizer state.
    """

    report: Report
    plan: ShardingPlan
    config: ShardingConfig
    kept: AtRest = ADAMW
    trained: float = 1.0

    @classmethod
    def of(cls, blueprint: Blueprint, config: TrainConfig, world_size: int) -> Outlook:
        """Return what a training would hold in a world of this size."""
        sharding = resolve_sharding(config.sharding, world_size)
        store_in(blueprint.model, DTYPES[config.sharding.shard_dtype])
        report = plan(blueprint, WantedMesh((SHARD,), sharding.shape[-1:]))
        parameters = list(blueprint.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        share = trained / sum(p.numel() for p in parameters)
        return cls(report, sharding, config.sharding, AtRest.of(config), share)

    def at_rest(self, rank: int) -> int:
        """Return the bytes of the rank's parameters, gradients and optimizer state."""
        stored = self.report.totals[rank].parameters
        outer = stored // ITEMSIZE[self.config.shard_dtype] * ITEMSIZE[Precision.FP32]
        more = stored * (self.kept.copies - 1) + outer * self.kept.outer
        return stored + round(more * self.trained)

    @property
    def unsharded(self) -> int:
        """Peak bytes of full parameters, beside the shards.

        Two neighboring groups at most, one computing while the other is gathered, and the model's
        own group; or all groups, where they stay unsharded from forward to backward.
        """
        if not self.plan.reshard_after_forward:
            return self._full(self.report.groups)
        return self._largest_neighbors() + self._full(self._own)

    @property
    def gradients(self) -> int:
        """Peak bytes of full gradients: one group's are reduced while the next computes."""
        return round((self._largest_neighbors() + self._full(self._own)) * self.trained)

    @property
    def _own(self) -> list[GroupReport]:
        """The model's own group, if it has one."""
        return [group for group in self.report.groups if not group.name]

    def _largest_neighbors(self) -> int:
        inner = [group for group in self.report.groups if group.name]
        return max((self._full(two) for two in pairwise(inner)), default=self._full(inner))

    def _full(self, groups: Sequence[GroupReport]) -> int:
        numel = sum(each.numel + each.padding for each in groups)
        return numel * ITEMSIZE[self.config.compute_dtype]


def show(outlook: Outlook, console: Console | None = None) -> None:
    """Print the groups, and which rank holds how much; equal groups and ranks share a row."""
    # Wide enough that no figure is cut off in a narrow window.
    console = console or Console(width=max(Console().width, 120))
    report = outlook.report
    say = console.print
    say(
        f"model      {report.model}, {report.numel:,} parameters in "
        f"{counted(report.groups, 'group')}",
        highlight=False,
    )
    ranks = report.grid.size
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
    for name in ("count", "parameters", "padding", "ranks", "elements", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    report = outlook.report
    rows = fold(
        report.groups,
        name=lambda group: group.name,
        kind=lambda group: tuple(each.tiling for each in group.parameters),
    )
    own = "the rest" if len(report.groups) > 1 else "the model"
    for row in rows:
        _add(table, outlook, row.full_name or own, len(row.members), row.first)
    if len(report.groups) > 1:
        _add(table, outlook, "total", len(report.groups), GroupReport("", report.parameters))
    return table


def _add(table: Table, outlook: Outlook, name: str, count: int, group: GroupReport) -> None:
    """Add a group, with a row for the ranks that hold the same number of elements."""
    report, itemsize = outlook.report, ITEMSIZE[outlook.config.shard_dtype]
    facts = [name, str(count), f"{group.numel:,}", f"{group.padding:,}"]
    for numel, ranks in groupby(report.grid.ranks, key=group.numel_on):
        mib = f"{numel * itemsize / 2**20:,.2f}"
        table.add_row(*facts, ranks_in_words(list(ranks)), f"{numel:,}", mib)
        facts = [""] * len(facts)


def _memory(outlook: Outlook) -> list[str]:
    def size(nbytes: int) -> str:
        return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"

    # The first rank has no fewer rows of anything than any other, and the last has no more.
    first, last = outlook.at_rest(0), outlook.at_rest(outlook.report.grid.size - 1)
    least, most = size(last), size(first)
    rest = f"{most} a rank" if least == most else f"{least} to {most} a rank"
    dtype, stored = outlook.config.compute_dtype.value, outlook.config.shard_dtype.value
    part = "" if outlook.trained == 1 else f"; {outlook.trained:.2%} are trained"
    return [
        f"at rest    {rest}: {outlook.kept.text}, {stored}{part}",
        f"at peak    {size(outlook.unsharded)} of full parameters and "
        f"{size(outlook.gradients)} of full gradients more,",
        f"           {dtype}, and activations",
    ]
