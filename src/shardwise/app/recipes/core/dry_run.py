"""``--dry-run``: who would hold what, and what a step needs, for any number of ranks.

The table of groups comes from the inspector, and the memory of a step from the plan. What this host
has does not matter: the ranks may be meant for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.table import Table
from rich.text import Text

from shardwise.app.recipes.core.build import DTYPES
from shardwise.app.recipes.core.plan import plan_training
from shardwise.app.recipes.core.recipe import Example
from shardwise.elastic.world import World
from shardwise.frontends.blocks import store_in
from shardwise.frontends.strategies import SHARD, WantedMesh
from shardwise.insight.inspect.api import Blueprint
from shardwise.insight.inspect.api import plan as layout_of
from shardwise.insight.inspect.report import GroupReport, Report
from shardwise.insight.inspect.text import add_figures, plain_table, rendered
from shardwise.insight.inspect.words import counted, fold, ranks_in_words
from shardwise.insight.planning.api import ModelPlan, Rehearsed
from shardwise.insight.planning.text import needs
from shardwise.insight.schema.training import TrainConfig


def describe(blueprint: Blueprint, config: TrainConfig, example: Example, world: World) -> str:
    """Describe what a training would hold, without a newline at the end.

    Args:
        blueprint: its model.
        config: what it is asked for.
        example: its batches and its loss.
        world: of how many ranks.

    Raises:
        RehearsalError, UntraceableError: the training cannot be rehearsed.
    """
    plan = plan_training(blueprint, config, example, world, Rehearsed.FIRST)
    layout = layout_for(blueprint, config, plan)
    return rendered([Text(_head(plan, layout)), _groups(layout), Text(), *needs(plan)])


def layout_for(blueprint: Blueprint, config: TrainConfig, plan: ModelPlan) -> Report:
    """Return who holds what of one copy of the model, in the dtype that it is kept in."""
    store_in(blueprint.model, DTYPES[config.sharding.shard_dtype])
    return layout_of(blueprint, WantedMesh((SHARD,), plan.settings.sharding.shape[-1:]))


def _head(plan: ModelPlan, layout: Report) -> str:
    sharding = plan.settings.sharding
    shards = layout.grid.size
    cut = f"every parameter is split into {shards} {'shard' if shards == 1 else 'shards'}"
    over = f"sharding   {plan.settings.strategy.value} over {sharding}"
    replicas = sharding.shape[0] if len(sharding.shape) == 2 else 1
    copies = f"{over}\n           {cut}; {replicas} copies of the model"
    groups = counted(layout.groups, "group")
    return (
        f"model      {layout.model}, {layout.numel:,} parameters in {groups}\n"
        f"{over + ': ' + cut if replicas == 1 else copies}"
    )


def _groups(layout: Report) -> Table:
    """The groups; equal ones share a row, and so do ranks that hold the same of one."""
    table = plain_table("group")
    add_figures(table, "count", "parameters", "padding", "ranks", "elements", "MiB")
    rows = fold(
        layout.groups,
        name=lambda group: group.name,
        kind=lambda group: tuple(each.tiling for each in group.parameters),
    )
    own = "the rest" if len(layout.groups) > 1 else "the model"
    for row in rows:
        for cells in _rows(layout, row.full_name or own, len(row.members), row.first):
            table.add_row(*map(Text, cells))
    if len(layout.groups) > 1:
        whole = GroupReport("", layout.parameters)
        for cells in _rows(layout, "total", len(layout.groups), whole):
            table.add_row(*map(Text, cells))
    return table


def _rows(layout: Report, name: str, count: int, group: GroupReport) -> Iterator[list[str]]:
    """Cells of a group: a row for the ranks that hold the same number of elements."""
    facts = [name, str(count), f"{group.numel:,}", f"{group.padding:,}"]
    for numel, ranks in groupby(layout.grid.ranks, key=group.numel_on):
        held = list(ranks)
        mib = f"{group.nbytes_on(held[0]) / 2**20:,.2f}"
        yield [*facts, ranks_in_words(held), f"{numel:,}", mib]
        facts = [""] * len(facts)
