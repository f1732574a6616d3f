"""A training on one rank from beginning to end, the same for every recipe."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise import devices
from shardwise.launch.errors import Stopped, UserError
from shardwise.launch.rank import StopSignals, connected
from shardwise.launch.world import World, launched_here
from shardwise.recipes.core import journal
from shardwise.recipes.core.begin import (
    check_alike,
    check_folder,
    decided,
    how_to_go_on_without,
    newest_step,
)
from shardwise.recipes.core.build import count, shard_bytes, transport_name
from shardwise.recipes.core.checkpointing import Checkpoints, on_rank_zero
from shardwise.recipes.core.config import (
    AUTO,
    Existing,
    OptionError,
    TrainConfig,
    resolve_sharding,
)
from shardwise.recipes.core.loop import Loop
from shardwise.recipes.core.position import Position
from shardwise.recipes.core.progress import make_display
from shardwise.recipes.core.recipe import Assemble, Inputs, Place, Task
from shardwise.recipes.core.replicas import ReplicaCheckpoints
from shardwise.recipes.core.rundir import RunDir, locked, write_text
from shardwise.transport.peers import Peers


@dataclass(frozen=True)
class _Run:
    """All parts of a training on one rank."""

    inputs: Inputs
    place: Place
    task: Task
    files: RunDir
    checkpoints: Checkpoints

    @property
    def per_step(self) -> int:
        """Examples of one step, over all ranks."""
        return self.inputs.train.examples_per_step(self.place.world.size)


def train(inputs: Inputs, assemble: Assemble, world: World, signals: StopSignals) -> None:
    """Train on this rank, as one of ``world``.

    Args:
        inputs: the checked configuration.
        assemble: builds the task.
        world: this rank among all.
        signals: who may ask to stop.

    Raises:
        UserError: what the user can put right.
        Stopped: a signal asked to stop, and the run is saved.
    """
    with contextlib.ExitStack() as held:
        if world.rank == 0:
            # Before anything is written; again under the lock, for what has ended meanwhile.
            check_folder(inputs)
            if not launched_here():
                held.enter_context(locked(RunDir(inputs.train.output.out)))
                check_folder(inputs)
        device = _choose_device(inputs.train.device, world)
        if device.type == "cpu":
            keep_freed_memory()
        backends = devices.backends_for(device)
        with connected(world, backends, inputs.train.peer_timeout):
            train_connected(inputs, assemble, place_for(inputs.train, world, device), signals)


def train_connected(inputs: Inputs, assemble: Assemble, place: Place, signals: StopSignals) -> None:
    """Train on this rank, which is a member of the default process group already.

    Raises:
        OptionError: hosts were started with different options.
    """
    world = place.world
    if world.hosts > 1:
        # Each host has a command line of its own.
        asked = {"recipe": inputs.recipe, **inputs.facts()}
        told = Peers().gather_objects(asked, "the comparison of what hosts were asked")
        check_alike(told[:: world.local_size])
    task = assemble(inputs, place)
    # From here on every rank has random numbers of its own, for dropout.
    torch.manual_seed(inputs.train.seed * world.size + world.rank)
    output = inputs.train.output
    files = RunDir(output.out)
    checkpoints = (
        Checkpoints(files.checkpoints, output.keep_last, task.position, device=place.device)
        if task.replicas is None
        else ReplicaCheckpoints(files.checkpoints, output.keep_last, place.mesh, task.position)
    )
    run = _Run(inputs, place, task, files, checkpoints)
    position = _resume(run)
    if world.rank == 0:
        _train_and_record(run, position, signals)
    else:
        _train(run, position, journal.NoJournal(), signals)


def place_for(config: TrainConfig, world: World, device: torch.device) -> Place:
    """Return where this rank trains; it is a member of the default process group."""
    plan = resolve_sharding(config.sharding, world.size, world.hosts)
    return Place(
        world=world,
        device=device,
        plan=plan,
        mesh=plan.make_mesh(device.type),
        display=make_display(world.rank),
    )


def _resume(run: _Run) -> Position:
    """Load the newest checkpoint, if the run goes on; return how far the run is."""
    newest = on_rank_zero(f"beginning in {run.files.root}", lambda: _take_folder(run))
    if newest is None:
        return Position()
    try:
        return run.checkpoints.load(newest, run.task.module, run.task.optimizer)
    except UserError as error:
        if "is damaged" not in str(error):  # other ranks get the text alone
            raise
        raise UserError(f"{error}; {_how_to_go_on_without(run, newest)}") from error


def _how_to_go_on_without(run: _Run, newest: int) -> str:
    """Return what to do about a damaged checkpoint: without it, every start would fail alike."""
    older = [step for step in run.checkpoints.steps() if step < newest]
    if not older:
        return "no older checkpoint is complete: --overwrite starts over"
    return how_to_go_on_without(run.checkpoints.path(newest), older[-1])


def _take_folder(run: _Run) -> int | None:
    """Prepare the folder; return the step to go on from, None for a new run.

    Raises:
        OptionError: it cannot be, or there is none.
    """
    asked = run.inputs.train.output
    output = decided(asked)
    resumes = output.existing is Existing.RESUME
    newest = newest_step(run.checkpoints, run.files) if resumes else None
    if asked.existing is not Existing.OVERWRITE and output.existing is Existing.OVERWRITE:
        run.place.display.say(
            f"resume     no checkpoint of the run in {asked.out} was committed; starting over"
        )
    run.files.begin(output)
    return newest


def _train_and_record(run: _Run, position: Position, signals: StopSignals) -> None:
    """Train on rank 0, and write the files of the run."""
    task, files, say = run.task, run.files, run.place.display.say
    facts = {"recipe": run.inputs.recipe, **run.inputs.facts()}
    facts["model"]["parameters"] = count(task.module.parameters())
    _introduce(run, position)
    record = journal.RunRecord(files, facts, _session(run, position))
    if task.model_config is not None:
        write_text(files.model_config, task.model_config)
    log = journal.FileJournal(
        files, task.unit, position.step, tensorboard=run.inputs.train.output.tensorboard
    )
    try:
        results = _train(run, position, log, signals)
    except BaseException as error:
        # The error matters more than a failure to record it.
        with contextlib.suppress(OSError, UserError):
            if isinstance(error, Stopped):
                record.end("stopped", signal=error.signum)
            else:
                record.end("failed", error=f"{type(error).__name__}: {error}"[:2000])
            journal.draw(files, task.title, task.loss_unit)
        raise
    finally:
        log.close()
    journal.draw(files, task.title, task.loss_unit)
    record.end("finished", **results)
    say(f"curve      {files.picture}")
    say(f"run        {files.root}")


def _train(
    run: _Run, position: Position, log: journal.Journal, signals: StopSignals
) -> Mapping[str, float]:
    loop = Loop(
        run.task,
        run.inputs.train,
        run.inputs.span,
        run.place,
        checkpoints=run.checkpoints,
        journal=log,
        signals=signals,
        how_to_resume=_how_to_resume(),
    )
    position, results = loop.run(position)
    return run.task.finish(run.checkpoints.path(position.step), results)


def _introduce(run: _Run, position: Position) -> None:
    """Print the first lines: model, sharding, precision, data, step."""
    task, place, config = run.task, run.place, run.inputs.train
    say, sharding, world = place.display.say, config.sharding, place.world
    parameters = list(task.module.parameters())
    mine = shard_bytes(task.module) / 2**20
    whole = sum(p.numel() * p.element_size() for p in parameters) / 2**20
    say(f"model      {task.model_name}, {count(parameters):,} parameters, {place.device.type}")
    say(
        f"sharding   {sharding.strategy.value} over {place.plan}, transport "
        f"{transport_name(task.module)}; {mine:.1f} of {whole:.1f} MiB of parameters on this rank"
    )
    say(
        f"precision  {sharding.param_dtype.value} compute, {sharding.reduce_dtype.value} "
        f"reduction, fp32 shards"
    )
    for label, text in task.introduction:
        say(f"{label:<11}{text}")
    ranks = f"{world.size} {'rank' if world.size == 1 else 'ranks'}"
    accumulate = f" x {config.accumulate} microbatches" if config.accumulate > 1 else ""
    units = run.per_step * task.units_per_example
    span = run.inputs.span
    steps = f"{span.steps_in_all(run.per_step):,} steps"
    epochs = f"{span.epochs} {'epoch' if span.epochs == 1 else 'epochs'}"
    length = steps if span.epochs is None else f"{epochs}, {steps}"
    say(
        f"step       {config.batch_size} {task.example}{accumulate} x "
        f"{ranks} = {units:,} {task.unit}; {length}"
    )
    if position.step:
        say(f"resume     after {span.shown(position)}")
        _warn_of_another_step(run)


def _warn_of_another_step(run: _Run) -> None:
    sessions = run.files.read().get("sessions", [])
    before = sessions[-1].get("examples_per_step") if sessions else None
    if before not in (None, run.per_step):
        run.place.display.say(
            f"warning    a step has {run.per_step} examples from here on, and had {before} before: "
            "results depend on it; see --nproc, --batch-size and --accumulate"
        )


def _session(run: _Run, position: Position) -> dict[str, Any]:
    plan = run.place.plan
    return {
        "from_step": position.step,
        "steps_asked_for": run.inputs.train.steps,
        "epochs_asked_for": run.inputs.train.epochs,
        "examples_per_step": run.per_step,
        "world_size": run.place.world.size,
        "hosts": run.place.world.hosts,
        "device": run.place.device.type,
        "mesh": dict(zip(plan.names, plan.shape, strict=True)),
        "transport": transport_name(run.task.module),
    }


def _how_to_resume() -> str:
    if not launched_here():
        return "To go on, start the same with --resume."
    if "--auto-resume" in sys.argv:
        return "To go on:\n  " + journal.command_line(sys.argv[1:])
    arguments = [a for a in sys.argv[1:] if a not in ("--overwrite", "--resume")]
    return "To go on:\n  " + journal.command_line([*arguments, "--resume"])


# -- the device and the memory of this rank --------------------------------------------------------


def _choose_device(wanted: str, world: World) -> torch.device:
    """Return the device of this rank, made current.

    ``auto`` takes accelerators where every rank of this host can have one of its own, else CPUs.

    Raises:
        OptionError: this process cannot compute on what is asked for, or there are too few.
    """
    found = devices.count()
    enough = found >= world.local_size
    if wanted == AUTO:
        wanted = devices.default_type() if enough else devices.CPU.type
    try:
        devices.check_type(wanted)
    except devices.UnusableError as error:
        raise OptionError("--device", error.found, error.expected) from None
    if wanted == devices.CPU.type:
        return devices.CPU
    if not enough:
        raise OptionError(
            "--device",
            f"{wanted}, of which this host has {found}",
            f"one for each of its {world.local_size} ranks, or --device cpu",
        )
    return devices.take(wanted, world.local_rank)


# Of mallopt(3): numbers of the two settings, and the largest value that the first one takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_IN_HEAP = 32 * 1024 * 1024
_NEVER = 2**31 - 1

#: Whoever has set one of these wants something else.
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have this process keep freed memory, except for allocations above 32 MiB.

    At the end of a step nearly all memory is freed: activations, full gradients. glibc then returns
    the top of its heap to the kernel, which has to clear and map each page again for the next step.
    Measured on 2 ranks with 2 cores, a Llama with 5 million parameters, 1,024 tokens per rank and
    step: 16,000 page faults per step and 4 to 9 % of its CPU time, against 190 faults. A process
    that trains reaches its peak in every step, so nobody gains from what it returns. glibc's own
    variables do the same for other programs (https://man7.org/linux/man-pages/man3/mallopt.3.html).

    Returns:
        Whether it does now: not where the C library is another, or the user has set one of
        ``VARIABLES``.
    """
    if any(name in os.environ for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # Setting either ends glibc's own adjustments, so both are needed.
    return bool(mallopt(_MMAP_THRESHOLD, _MOST_IN_HEAP)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
