"""``--plan`` and ``--dry-run``: what a training needs, before it is started.

The plan rehearses the step of the recipe itself: its model, sharded as it will be, its batches and
its loss. A dry run adds who would hold what, as the inspector says it. What this host has does not
matter then: the ranks may be meant for others.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from shardwise.app.recipes.core.recipe import PLAN_FILE, PREDICTION, Example
from shardwise.base import devices, plain
from shardwise.base.errors import UserError
from shardwise.base.units import binary_size, counted
from shardwise.elastic.world import World, environment
from shardwise.frontends.strategies import SHARD, MeshError, WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.inspect.read import plan as layout_of
from shardwise.insight.inspect.report import GroupReport, Report
from shardwise.insight.inspect.text import Cells, rendered
from shardwise.insight.inspect.words import fold, ranks_in_words
from shardwise.insight.planning.api import ModelPlan, Rehearsed, find_machine, make_plan
from shardwise.insight.planning.fit import nearest
from shardwise.insight.planning.machine import Machine, MachineError, device_reported_as
from shardwise.insight.planning.rehearsal import program_of
from shardwise.insight.planning.report import Available
from shardwise.insight.planning.settings import (
    MachineConfig,
    RehearsalError,
    Settings,
    SettingsError,
    UntraceableError,
)
from shardwise.insight.planning.text import needs, verdict
from shardwise.insight.schema.sharding import Gathers, resolve_sharding
from shardwise.insight.schema.training import AUTO, TrainConfig


def plan_training(
    blueprint: Blueprint,
    config: TrainConfig,
    example: Example,
    world: World,
    rehearsed: Rehearsed = Rehearsed.EACH_KIND,
) -> ModelPlan:
    """Plan a training.

    Args:
        blueprint: its model.
        config: what it is asked for.
        example: its batches and its loss.
        world: of how many ranks, and hosts.
        rehearsed: the ranks to plan for.

    Raises:
        RehearsalError, UntraceableError: the training cannot be rehearsed.
        UserError: a pattern of ``--param-group`` does not fit the model.
    """
    device, machine = _machine_for(config, world)
    settings = settings_for(config, example, world)
    free = devices.free_memory(device)
    if device.type == devices.CPU.type:
        free //= world.local_size
    reshards = settings.sharding.reshard_after_forward
    settings = replace(settings, gathers=example.gathers(blueprint.model, reshards, free))
    if reshards and settings.gathers is Gathers.EVERY_STEP:
        settings = replace(settings, reshard_after_forward=False)
    available = None
    if machine is None and device.type != devices.CPU.type:
        # No times are known, but the device is here: it says what is free.
        settings = replace(settings, device_type=device.type)
        available = Available(nbytes=free, source=devices.name(device))
    return make_plan(blueprint, settings, machine, available, rehearsed)


@contextmanager
def reporting(option: str, otherwise: str) -> Iterator[None]:
    """Report a training that cannot be rehearsed as a mistake of the user.

    Args:
        option: what asked for the plan.
        otherwise: what to do without it.

    Raises:
        UserError: the training cannot be rehearsed.
    """
    try:
        yield
    except (MachineError, MeshError, RehearsalError, SettingsError, UntraceableError) as error:
        raise UserError(f"{option}: {error}; {otherwise}") from error


def settings_for(config: TrainConfig, example: Example, world: World) -> Settings:
    """Return what a training is, as a plan sees it."""
    sharding = config.sharding
    plan = resolve_sharding(sharding, world.size, world.hosts)
    return Settings.of(
        sharding,
        config,
        mesh=WantedMesh(plan.names, plan.shape),
        seq_length=example.seq_length,
        param_dtype=sharding.compute_dtype,
        clip_grad=config.max_norm,
        ranks_per_host=world.local_size,
        batch=example.batch,
        step=example.loss,
        after_step=example.after_step,
        replicate_every=config.output.replicate_every,
    )


def _machine_for(config: TrainConfig, world: World) -> tuple[torch.device, Machine | None]:
    """Return the device that ranks will compute on, and the machine if its speed is known."""
    kind, on_host = config.device, MachineConfig(ranks_per_host=world.local_size)
    if kind == AUTO:
        kind = devices.type_for(world.local_size)
    if kind == devices.CPU.type:
        return devices.CPU, find_machine(on_host, world.size)
    device = torch.device(kind)
    found = device_reported_as(devices.name(device))
    return device, None if found is None else find_machine(replace(on_host, device=found.name))


def check_fits(plan: ModelPlan) -> None:
    """Check that a training fits into the memory of its ranks.

    Raises:
        UserError: it does not; the message says what would.
    """
    if plan.fits is not False:
        return
    found: dict[Settings, ModelPlan] = {}

    def fits(settings: Settings) -> bool:
        # Two microbatches need as much memory as many.
        few = replace(settings, accumulate=min(settings.accumulate, 2))
        found[settings] = make_plan(plan.blueprint, few, None, plan.available)
        return bool(found[settings].fits)

    other = nearest(plan.settings, fits)
    if other is None:
        advice = "more ranks, or shorter sequences or smaller images"
    else:
        peak = binary_size(found[other].peak)
        advice = f"{' '.join(_changes(plan.settings, other))}, which needs {peak}"
    raise UserError(f"--plan: found {verdict(plan)}; expected {advice}")


def _changes(before: Settings, after: Settings) -> Iterator[str]:
    """The options that lead from one to another."""
    if after.activation_checkpointing is not before.activation_checkpointing:
        yield f"--activation-checkpointing {after.activation_checkpointing.value}"
    if after.strategy is not before.strategy:
        yield f"--strategy {after.strategy.value}"
    if after.batch_size != before.batch_size:
        yield f"--batch-size {after.batch_size} --accumulate {after.accumulate}"


@contextmanager
def kept_for_the_run(plan: ModelPlan) -> Iterator[None]:
    """Hand a plan to the rank that makes the folder of the run, in a file."""
    with tempfile.TemporaryDirectory(prefix="shardwise-plan-") as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(plan.to_json()), encoding="utf-8")
        if plan.step is not None:
            path.with_name(PREDICTION).write_bytes(plain.written(plan.step))
        with environment(**{PLAN_FILE: str(path)}):
            yield


# -- --dry-run ------------------------------------------------------------------------------------


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
    # Who holds what of one copy of the model, in the dtype that it is kept in.
    program_of(blueprint, plan.settings).prepare()
    layout = layout_of(blueprint, WantedMesh((SHARD,), plan.settings.sharding.shape[-1:]))
    return rendered([Text(_head(plan, layout)), _groups(layout), Text(), *needs(plan)])


def _head(plan: ModelPlan, layout: Report) -> str:
    sharding = plan.settings.sharding
    shards = layout.grid.size
    cut = f"every parameter is split into {counted(shards, 'shard')}"
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
    folded = fold(
        layout.groups,
        name=lambda group: group.name,
        kind=lambda group: tuple(each.tiling for each in group.parameters),
    )
    own = "the rest" if len(layout.groups) > 1 else "the model"
    rows = [
        cells
        for row in folded
        for cells in _rows(layout, row.full_name or own, len(row.members), row.first)
    ]
    if len(layout.groups) > 1:
        whole = GroupReport("", layout.parameters)
        rows += _rows(layout, "total", len(layout.groups), whole)
    heads = ("group", "count", "parameters", "padding", "ranks", "elements", "MiB")
    return Cells(heads, rows).for_terminal()


def _rows(layout: Report, name: str, count: int, group: GroupReport) -> Iterator[list[str]]:
    """Cells of a group: a row for the ranks that hold the same number of elements."""
    facts = [name, str(count), f"{group.numel:,}", f"{group.padding:,}"]
    for numel, ranks in groupby(layout.grid.ranks, key=group.numel_on):
        held = list(ranks)
        mib = f"{group.nbytes_on(held[0]) / 2**20:,.2f}"
        yield [*facts, ranks_in_words(held), f"{numel:,}", mib]
        facts = [""] * len(facts)
