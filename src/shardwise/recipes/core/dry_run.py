"""What a training would hold on every rank, shown without training: for any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from shardwise.frontends.strategies import ShardingPlan
from shardwise.recipes.core.config import Precision, ShardingConfig
from shardwise.sharding.shares import RankRange, Shares, together

STORED = 4  # bytes of an element of parameters, gradients and states at rest: fp32
COPIES = 4  # parameters, gradients, and the two states of AdamW
ITEMSIZE: Mapping[Precision, int] = {Precision.FP32: 4, Precision.BF16: 2}


@dataclass(frozen=True)
class Outlook:
    """What a training would hold.

    Attributes:
        model_name: for the first line.
        groups: what every rank holds of each group, the model's own group last.
        plan: over how many ranks.
        config: in which dtypes.
    """

    model_name: str
    groups: Sequence[Shares]
    plan: ShardingPlan
    config: ShardingConfig

    @property
    def whole(self) -> Shares:
        """What every rank holds of the model."""
        return together(self.groups)

    def at_rest(self, rank: int) -> int:
        """Bytes of the rank's parameters, gradients and optimizer state."""
        return self.whole.held_by(rank) * STORED * COPIES

    @property
    def unsharded(self) -> int:
        """Bytes of full parameters at the peak, which are alive beside the shards.

        Those of the largest two neighbours, of which one computes while the other is gathered, and
        the model's own; or of all groups, where they are kept from forward to backward.
        """
        if not self.plan.reshard_after_forward:
            return self._full(self.groups)
        return self._largest_neighbours() + self._full(self.groups[-1:])

    @property
    def gradients(self) -> int:
        """Bytes of full gradients at the peak: one group's are reduced while the next computes."""
        return self._largest_neighbours() + self._full(self.groups[-1:])

    def _largest_neighbours(self) -> int:
        inner = self.groups[:-1]
        return max((self._full(two) for two in pairwise(inner)), default=self._full(inner))

    def _full(self, groups: Sequence[Shares]) -> int:
        return sum(each.padded_numel for each in groups) * ITEMSIZE[self.config.param_dtype]


def show(outlook: Outlook, console: Console) -> None:
    """Print the groups, and who holds how much of them; equal groups and ranks share a row."""
    whole = outlook.whole
    say = console.print
    count = len(outlook.groups)
    say(
        f"model      {outlook.model_name}, {whole.numel:,} parameters in {count} "
        f"{'group' if count == 1 else 'groups'}",
        highlight=False,
    )
    ranks = whole.world_size
    cut = f"every parameter is cut into {ranks} {'shard' if ranks == 1 else 'shards'}"
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
        _add(table, "what is left" if last else name or "the model", len(alike), alike[0])
    if len(outlook.groups) > 1:
        _add(table, "together", len(outlook.groups), outlook.whole)
    return table


def _add(table: Table, name: str, count: int, shares: Shares) -> None:
    facts = [name, str(count), f"{shares.numel:,}", f"{shares.padding:,}"]
    for each in shares.ranges():
        mib = f"{each.numel * STORED / 2**20:,.2f}"
        table.add_row(*facts, _ranks(each), f"{each.numel:,}", mib)
        facts = [""] * len(facts)


def _alike(groups: Sequence[Shares]) -> list[list[Shares]]:
    """Groups that differ by a number in their names only, as the blocks of a transformer."""
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
    first, last = outlook.at_rest(0), outlook.at_rest(outlook.whole.world_size - 1)
    least, most = size(last), size(first)
    rest = f"{most} a rank" if least == most else f"{least} to {most} a rank"
    dtype = outlook.config.param_dtype.value
    return [
        f"at rest    {rest}: parameters, gradients and two states of AdamW, fp32",
        f"at peak    {size(outlook.unsharded)} of full parameters, {size(outlook.gradients)} of "
        "full gradients beside it,",
        f"           {dtype}, and activations",
    ]
