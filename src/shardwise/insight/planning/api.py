"""Plan a training: its memory, traffic and time, in one process and without memory for it."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.base import devices
from shardwise.base.arguments import check_arguments
from shardwise.frontends.strategies import MOST_RANKS as MOST_SHOWN
from shardwise.frontends.strategies import MeshError, Runtime, WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.inspect import read as inspector
from shardwise.insight.planning import calibrate
from shardwise.insight.planning.clock import step_time
from shardwise.insight.planning.events import Log
from shardwise.insight.planning.fit import Measured, fit
from shardwise.insight.planning.machine import (
    FITTED,
    Device,
    Execution,
    Machine,
    MachineError,
    link_named,
)
from shardwise.insight.planning.memory import PROCESS_FACTOR, memory, reserved
from shardwise.insight.planning.models import find_model, load_object, of_module
from shardwise.insight.planning.presets import ModelError, longest_sequence
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.planning.report import Available, Plan, Traffic
from shardwise.insight.planning.settings import (
    MOST_PEERS,
    MOST_RANKS,
    ONE_HOST,
    OPTIMIZERS,
    MachineConfig,
    PlannedStep,
    Products,
    Settings,
    SettingsError,
)
from shardwise.insight.schema.sharding import StrategyConfig, TransportName
from shardwise.insight.schema.training import Logits

_log = logging.getLogger(__name__)

MOST_EVENTS = 20_000  # of a rehearsed step whose other kinds of ranks are rehearsed too
MOST_KINDS = 3  # of ranks
USUAL_SEQUENCE = 4096  # tokens of a sequence at most, unless its length is given
_AS_BUILT = StrategyConfig(shard_dtype=None)
_ONE_SAMPLE, _THIS_MACHINE = PlannedStep(), MachineConfig()


class Rehearsed(enum.Enum):
    """Which ranks a plan rehearses."""

    FIRST = "first"
    EACH_KIND = "each kind"


@dataclass(frozen=True, kw_only=True)
class ModelPlan(Plan):
    """A plan that can show itself: ``print`` it, or write it as a page.

    Attributes:
        blueprint: what was planned for.
    """

    blueprint: Blueprint = field(repr=False, compare=False)

    def __str__(self) -> str:
        from shardwise.insight.planning.text import as_text  # imports rich

        return as_text(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the plan, and who holds what, as one HTML page that loads nothing else.

        Args:
            path: the file to write.

        Returns:
            The path.

        Raises:
            OSError: the file cannot be written.
        """
        from shardwise.insight.planning.text import page

        path = Path(path)
        world = self.settings.world
        layout = inspector.plan(self.blueprint, world) if world.size <= MOST_SHOWN else None
        path.write_text(page(self, layout), encoding="utf-8")
        return path


def plan(
    model: nn.Module | Blueprint | str,
    mesh: str | Mapping[str, int] = "dp=8",
    *,
    sharding: StrategyConfig = _AS_BUILT,
    step: PlannedStep = _ONE_SAMPLE,
    machine: MachineConfig = _THIS_MACHINE,
    available: int | None = None,
    runtime: str | None = None,
) -> ModelPlan:
    """Plan a training that has not been started: memory, traffic and time of a step.

    The sharding runtime itself runs one step of one rank, on tensors without values and in a world
    that is only pretended. Nothing is allocated, and ``model`` is not changed.

        step = shardwise.PlannedStep(seq_length=8192)
        machine = shardwise.MachineConfig(device="h100")
        print(shardwise.plan("llama-8b", "dp=8", step=step, machine=machine))

    Args:
        model: any module, on any device, sharded by its repeated blocks; a
            :class:`~shardwise.insight.blueprint.Blueprint`, which says how to shard it; or a
            name, as for ``shardwise plan``.
        mesh: ranks by dimension: ``"dp=8"``, ``"dp_replicate=2,dp_shard=4"``, ``"dp=8,tp=2"``, or
            the same as a mapping.
        sharding: what is sharded, and in which dtypes; by default shards have those of the model.
        step: the batch, the optimizer and the loss.
        machine: what it runs on.
        available: bytes that a rank may use; by default the memory of the device.
        runtime: whose ``fully_shard`` runs the step: ``"shardwise"`` or ``"torch"``; ``None``: as
            ``step`` says.

    Returns:
        The plan: ``print`` it, or see :class:`~shardwise.Plan`.

    Raises:
        MeshError: the mesh does not fit the strategy or the model.
        SettingsError: a setting is impossible.
        RehearsalError: the model, or a function that was given, raises.
        ModelError: there is no such model.
        MachineError: the device or the link is not known.
        RuntimeError: this process has a default process group.
    """
    check_arguments(plan, locals())
    if available is not None and available < 1:
        raise SettingsError("available", available, "bytes, 1 or more")
    given: dict[str, Any] = {} if runtime is None else {"runtime": runtime}
    settings = with_functions(Settings.of(sharding, step, machine, mesh=_mesh(mesh), **given))
    found = find_machine(machine, settings.mesh.size)
    blueprint = find_model(model) if isinstance(model, str) else of_module(model)
    limit = None if available is None else Available(nbytes=available, source="as given")
    return make_plan(blueprint, settings, found, limit)


def with_functions(settings: Settings) -> Settings:
    """Return settings with the functions whose names they have.

    Raises:
        SettingsError: there is no such function.
    """
    found: dict[str, Any] = {}
    for name in ("optimizer", "batch", "step"):
        value = getattr(settings, name)
        if isinstance(value, str) and value not in OPTIMIZERS:
            try:
                found[name] = load_object(value)
            except ModelError as error:
                raise SettingsError(name, error.found, error.expected) from None
    return replace(settings, **found)


def make_plan(
    blueprint: Blueprint,
    settings: Settings,
    machine: Machine | None = None,
    available: Available | None = None,
    rehearsed: Rehearsed = Rehearsed.EACH_KIND,
) -> ModelPlan:
    """Plan for settings that were checked.

    Args:
        blueprint: the model, and how it is sharded.
        settings: what to plan for.
        machine: what it would run on; ``None``: no times.
        available: the memory of a rank; ``None``: that of the machine.
        rehearsed: the ranks that are rehearsed. A step of more than :data:`MOST_EVENTS` events is
            rehearsed on the first rank only, which holds no less of any parameter than another.

    Raises:
        MeshError: the model does not fit the mesh.
    """
    check_model(blueprint, settings.mesh)
    settings = on_machine(with_sequence(blueprint, settings), machine)
    log = rehearse(blueprint, settings)
    if rehearsed is Rehearsed.FIRST or len(log.events) > MOST_EVENTS:
        kinds = {0: settings.world.size}
    else:
        kinds = kinds_of_ranks(blueprint, settings)
    ranks = []
    for first, count in kinds.items():
        its_log = log if first == 0 else rehearse(blueprint, settings, first)
        ranks.append(replace(memory(its_log), ranks=count))
    parameters = {id(each): each for each in blueprint.model.parameters()}.values()
    is_torchs = settings.runtime is Runtime.TORCH  # whose streams the clock does not know
    return ModelPlan(
        model=blueprint.name,
        numel=sum(each.numel() for each in parameters),
        settings=settings,
        ranks=tuple(sorted(ranks, key=lambda rank: -rank.peak)),
        traffic=Traffic.of(log),
        step=None if machine is None or is_torchs else step_time(log, machine, settings),
        machine="" if machine is None else machine_in_words(machine, settings),
        observed=observed_error(machine, settings),
        available=available or memory_of(machine, settings),
        reserved=_reserved(log, settings),
        exchanged=log.exchanged,
        formulas=log.formulas,
        blueprint=blueprint,
    )


def kinds_of_ranks(blueprint: Blueprint, settings: Settings) -> dict[int, int]:
    """Return how many ranks hold equal parts of every parameter, by the first rank of each kind.

    Shards of unequal size make several kinds. Ranks that hold nearly the same are one kind if there
    would be more than :data:`MOST_KINDS`; the first of them holds the most.
    """
    shards = settings.sharding.shape[-1]
    size = settings.mesh.tensor_parallel
    ends = {shards}
    for param in blueprint.model.parameters():
        placed = blueprint.placement(param) if blueprint.placement else None
        dim = 0 if placed is None else placed.dim
        rows = param.shape[dim] if param.ndim else 0
        # Tensor parallelism cuts some of them first.
        for each in {rows, math.ceil(rows / size)} - {0}:
            chunk = math.ceil(each / shards)
            ends |= {min(each // chunk, shards), min(math.ceil(each / chunk), shards)}
    starts = [0, *sorted(ends - {0, shards})]
    while len(starts) > MOST_KINDS:  # merge the fewest ranks into those before them
        sizes = [b - a for a, b in pairwise([*starts, shards])]
        starts.pop(min(range(1, len(starts)), key=lambda i: sizes[i]))
    copies = settings.world.size // shards
    return {start * size: (end - start) * copies for start, end in pairwise([*starts, shards])}


def make_fit(
    blueprint: Blueprint, settings: Settings, machine: Machine, available: Available
) -> ModelPlan:
    """Plan for the fastest strategy, batch size, checkpointing and mesh that fit.

    Logits are computed in chunks where whole ones take much memory, as a training does by itself.

    Args:
        blueprint: the model, and how it is sharded.
        settings: everything else, and the number of ranks.
        machine: what it would run on.
        available: the memory of a rank.

    Raises:
        NothingFitsError: nothing fits.
        MeshError, SettingsError: as for :func:`make_plan`; or torch's own FSDP2 is planned for.
    """
    if settings.runtime is Runtime.TORCH:
        expected = "shardwise: no plan knows the time of a step of torch's, to say what is fastest"
        raise SettingsError("runtime", settings.runtime.value, expected)
    settings = on_machine(with_sequence(blueprint, settings), machine)
    if settings.logits is Logits.WHOLE:
        settings = replace(settings, logits=Logits.AUTO)
    plans: dict[Settings, ModelPlan] = {}

    def measure(model: Blueprint, settings: Settings) -> Measured:
        plan = make_plan(model, settings, machine, available, Rehearsed.FIRST)
        assert plan.step is not None
        if model is blueprint:
            plans[settings] = plan
        return Measured(peak=plan.needed, seconds=plan.step.seconds)

    best, alternatives = fit(blueprint, settings, available.nbytes, measure)
    plan = plans[best]
    if len(kinds_of_ranks(blueprint, best)) > 1:  # and the search rehearsed only one
        plan = make_plan(blueprint, best, machine, available)
    return replace(plan, alternatives=alternatives)


def check_model(blueprint: Blueprint, mesh: WantedMesh) -> None:
    """Check that a training could shard the model.

    Raises:
        MeshError: tensor parallelism does not divide it.
        SettingsError: an embedding has sparse gradients, which no rank can reduce.
    """
    for name, module in blueprint.model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.sparse and module.weight.requires_grad:
            found = f"module {name or 'of the model itself'!r} with sparse gradients"
            expected = "sparse=False: fully_shard reduces dense gradients only"
            raise SettingsError("model", found, expected)
    blueprint.check_mesh(mesh)


def with_sequence(blueprint: Blueprint, settings: Settings) -> Settings:
    """Return the settings with a length of sequences, if the model of transformers has them.

    Raises:
        SettingsError: sequences are longer than the model's, or the model has none, or no images.
    """
    model: Any = blueprint.model
    if settings.batch is not None:
        return settings
    takes = getattr(model, "main_input_name", "")
    if takes == "pixel_values" and settings.seq_length is not None:
        expected = f"none: {blueprint.name} takes images"
        raise SettingsError("seq_length", f"{settings.seq_length:,}", expected)
    if takes != "input_ids":
        return settings
    if settings.image_size is not None:
        expected = f"none: {blueprint.name} takes tokens"
        raise SettingsError("image_size", f"{settings.image_size:,}", expected)
    longest = longest_sequence(model.config.to_dict())
    if settings.seq_length is None:
        return replace(settings, seq_length=min(longest or USUAL_SEQUENCE, USUAL_SEQUENCE))
    if longest is not None and settings.seq_length > longest:
        expected = f"at most {longest:,}, the positions of {blueprint.name}"
        raise SettingsError("seq_length", f"{settings.seq_length:,}", expected)
    return settings


def on_machine(settings: Settings, machine: Machine | None) -> Settings:
    """Return the settings with what follows from the machine: device, backend, ranks of a host.

    Raises:
        SettingsError: the device does not have the transport.
    """
    kind, ranks = settings.device_type, settings.ranks_per_host
    if machine is not None:
        kind, ranks = _device_type(machine.device), ranks or machine.ranks_per_host
    settings = replace(settings, device_type=kind, ranks_per_host=ranks)
    if kind == devices.CPU.type:
        auto = settings.transport is TransportName.AUTO and settings.runtime is Runtime.SHARDWISE
        if auto and settings.world.size > MOST_PEERS:
            settings = replace(settings, transport=TransportName.COLLECTIVES)
        return settings
    if settings.transport is TransportName.SHM:
        name = kind if machine is None else machine.device.name
        expected = f"auto, c10d or collectives: {name} is no CPU"
        raise SettingsError("transport", settings.transport, expected)
    backend = settings.backend or dist.get_default_backend_for_device(kind)
    return replace(settings, backend=backend)


def _device_type(device: Device) -> str:
    """Return the type of a device as torch names it."""
    if device.execution is Execution.DIRECT:
        return devices.CPU.type
    return devices.default_type() if device.costs else devices.KNOWN


def memory_of(machine: Machine | None, settings: Settings) -> Available | None:
    """Return the memory of a rank on a machine; ``None`` if unknown.

    Ranks on CPUs share what is free on this host.
    """
    if machine is not None and machine.device.execution is Execution.QUEUED:
        return Available(nbytes=machine.device.memory, source=machine.device.name)
    free = devices.free_memory(devices.CPU)
    if not free:
        return None
    ranks = settings.on_host
    source = "free on this host" if ranks == 1 else f"free on this host, over {ranks} ranks"
    return Available(nbytes=free // ranks, source=source)


def _reserved(log: Log, settings: Settings) -> int | None:
    """Return what the allocator of a rank takes for its tensors; ``None`` if unknown."""
    if settings.device_type == devices.CPU.type:
        return round(PROCESS_FACTOR * memory(log).peak)
    return reserved(log) if settings.device_type == devices.KNOWN else None


def observed_error(machine: Machine | None, settings: Settings) -> str:
    """How far plans of this kind were from published trainings, if that was much.

    See "How accurate it is" in docs/plan.md.
    """
    if machine is None or machine.device.execution is Execution.DIRECT or machine.device.costs:
        return ""
    is_fitted = machine.device.name in FITTED and settings.products is not Products.FLOAT8
    if is_fitted or settings.mesh.tensor_parallel > 1:
        return ""
    return "published trainings were 12 to 32% slower than plans of this kind"


def machine_in_words(machine: Machine, settings: Settings) -> str:
    """Name the device, and the links that are used."""
    if settings.mesh.size == 1:
        return machine.device.name
    inside = f"{machine.device.name}, {machine.inside.name}"
    if settings.mesh.size <= settings.on_host:
        return inside
    hosts = math.ceil(settings.mesh.size / settings.on_host)
    return f"{inside} inside {hosts:,} hosts of {settings.on_host}, {machine.between.name} between"


def find_machine(config: MachineConfig, ranks: int = ONE_HOST) -> Machine | None:
    """Return the machine to plan for; ``None`` if it is not known.

    Args:
        config: which one. ``"cpu"``, or the type of this host's accelerator, is this machine, as
            ``shardwise calibrate`` measured it; so is none, if it was measured. The link between
            hosts is ``ib-400`` by default, and there are 8 ranks on each, or as a file says.
        ranks: ranks of the whole job.

    Raises:
        MachineError: a name is unknown, the file is no machine, or there are a device and a file.
    """
    device, link, ranks_per_host = config.device, config.link, config.ranks_per_host
    if config.device_file is not None:
        if device is not None:
            raise MachineError("--device", f"{device} with a --device-file", "one of the two")
        machine = Machine.from_file(config.device_file)
    elif device in (None, devices.default_type()):
        return _this_machine(device, link, ranks_per_host or min(ranks, ONE_HOST))
    else:
        machine = Machine.named(str(device))
    if link is not None:
        machine = replace(machine, between=link_named(link))
    if ranks_per_host is not None:
        machine = replace(machine, ranks_per_host=ranks_per_host)
    return machine


def _this_machine(device: str | None, link: str | None, ranks: int) -> Machine | None:
    try:
        found = calibrate.stored()
    except MachineError as error:
        if device is not None:
            raise
        # Damaged, or measured under another torch, and not asked for.
        _log.warning("%s; the plan goes on without predicted times", error)
        return None
    if found is not None:
        return found.machine(ranks, link)
    if device is not None:
        expected = "this machine to be measured first, by `shardwise calibrate`"
        raise MachineError("--device", device, expected)
    return None


def _mesh(mesh: str | Mapping[str, int]) -> WantedMesh:
    if not isinstance(mesh, str | Mapping):
        raise MeshError(str(mesh), "such as 'dp=8' or {'dp': 8}")
    if not isinstance(mesh, str):
        mesh = ",".join(f"{name}={size}" for name, size in mesh.items())
    return WantedMesh.parse(mesh, MOST_RANKS)
