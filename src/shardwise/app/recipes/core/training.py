"""A training on one rank from beginning to end, the same for every recipe."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.app.recipes.core import journal
from shardwise.app.recipes.core.begin import (
    agreed_options,
    check_alike,
    check_folder,
    decided,
    how_to_go_on_without,
    newest_step,
)
from shardwise.app.recipes.core.build import count, shard_bytes, transport_name
from shardwise.app.recipes.core.checkpointing import Best, Checkpoints, on_rank_zero
from shardwise.app.recipes.core.loop import Loop
from shardwise.app.recipes.core.position import Position, TrainingSpan
from shardwise.app.recipes.core.progress import make_display
from shardwise.app.recipes.core.recipe import (
    PLAN_FILE,
    Assemble,
    Inputs,
    Task,
    TrainContext,
    run_dir,
)
from shardwise.app.recipes.core.rundir import RunDir, locked, write_text
from shardwise.base import devices
from shardwise.base.errors import UserError
from shardwise.base.units import counted, printable
from shardwise.checkpoint.ranks.moving import Departure, transfer
from shardwise.elastic.connect import connected
from shardwise.elastic.errors import Stopped
from shardwise.elastic.rank import StopSignals
from shardwise.elastic.world import LOCKED, ReplicaWorld, World, find_replica
from shardwise.insight.schema.option import OptionError, naming, require
from shardwise.insight.schema.sharding import resolve_sharding
from shardwise.insight.schema.training import (
    AUTO,
    Existing,
    LogName,
    TrainConfig,
    steps_to_record,
)
from shardwise.runs.metrics_file import read_metrics
from shardwise.transport.peers import Peers

if TYPE_CHECKING:
    from shardwise.app.recipes.core.memory import RunInMemory
    from shardwise.app.recipes.core.sinks import Sink
    from shardwise.app.recipes.core.timeline_of_run import TimelineOfRun


@dataclass(frozen=True)
class _Run:
    """All parts of a training on one rank."""

    inputs: Inputs
    place: TrainContext
    task: Task
    files: RunDir
    checkpoints: Checkpoints
    options: str
    host_names: Sequence[str]
    memory: RunInMemory | None

    @property
    def per_step(self) -> int:
        """Examples of one step, over all ranks."""
        return self.inputs.train.examples_per_step(self.place.readers.size)

    @property
    def span(self) -> TrainingSpan:
        """How long the training is."""
        return self.task.span or self.inputs.span


def train(
    inputs: Inputs,
    assemble: Assemble,
    world: World,
    signals: StopSignals,
    options: str = "",
    before: Departure | None = None,
) -> None:
    """Train on this rank, as one of ``world``.

    Args:
        inputs: the checked configuration.
        assemble: builds the task.
        world: this rank among all.
        signals: who may ask to stop.
        options: the file that repeats the command, for the folder of the run; empty: none.
        before: what this rank has of the training from the world before.

    Raises:
        UserError: what the user can put right.
        Stopped: a signal asked to stop, and the run is saved.
        MovedOn: the training goes on in another world.
    """
    replica = find_replica()
    with contextlib.ExitStack() as held:
        if world.rank == 0 and replica is None:  # else the launcher has done all this
            # Before anything is written; again under the lock, for what has ended meanwhile.
            check_folder(inputs)
            if LOCKED not in os.environ:
                held.enter_context(locked(inputs.config.files))
                check_folder(inputs)
        among = world if replica is None else replica.among_all(world)
        device = _choose_device(inputs.train.device, among)
        sharding = inputs.train.sharding
        activations = sharding.place_of_activations
        on_cpu = device.type == devices.CPU.type
        expected = "disk:FOLDER, a folder of a local disk: on CPUs, inputs are on the host already"
        require(not (on_cpu and activations == "host"), "--offload-activations", "host", expected)
        if on_cpu and sharding.offload is sharding.offload_parameters is activations:
            devices.keep_freed_memory()
        elif on_cpu:
            devices.return_freed_memory()  # who offloads is short of it
        backends = devices.backends_for(device)
        with connected(world, backends, inputs.train.peer_timeout):
            place = place_for(inputs.train, world, device, replica)
            # Passed on, not kept: what it holds is freed before the ranks disconnect.
            begin_and_train(build_run(inputs, assemble, place, options), before, signals)


def build_run(inputs: Inputs, assemble: Assemble, place: TrainContext, options: str) -> _Run:
    """Build all parts of the training, as a member of the default process group.

    Raises:
        OptionError: hosts were started with different options.
    """
    world = place.world
    host_names = [platform.node()]
    if world.hosts > 1:
        # Each host has a command line of its own.
        asked = {"recipe": inputs.recipe, **inputs.facts()}
        own = (asked, host_names[0])
        found = Peers().gather_objects(own, "the comparison of what hosts were asked")
        check_alike([each for each, _ in found[:: world.local_size]], agreed_options(inputs.config))
        host_names = [name for _, name in found[:: world.local_size]]
    task = assemble(inputs, place)
    # From here on every rank has random numbers of its own, for dropout.
    readers = place.readers
    torch.manual_seed(inputs.train.seed * readers.size + readers.rank)
    output = inputs.train.output
    files = run_dir(output.out)
    folder, keep = files.place_of_checkpoints, output.keep_last
    if task.replicas is None or place.replica is not None:
        checkpoints = Checkpoints(folder, keep, task.position, device=place.device, base=task.base)
    else:
        from shardwise.app.recipes.core.replicas import ReplicaCheckpoints

        checkpoints = ReplicaCheckpoints(folder, keep, place.mesh, task.position)
    checkpoints.store = files.store
    memory, every = None, output.replicate_every
    if every:
        from shardwise.app.recipes.core.memory import RunInMemory

        memory = RunInMemory(every, checkpoints, place.display.say)
    return _Run(inputs, place, task, files, checkpoints, options, host_names, memory)


def begin_and_train(run: _Run, before: Departure | None, signals: StopSignals) -> None:
    """Begin the training, or go on with it, and train to the end."""
    moves = any(Peers().gather_objects(before is not None, "the look for a training in memory"))
    position = _take_over(run, before) if moves else _recover(run) or _joined(run, _resume(run))
    if run.place.world.rank == 0:
        _train_and_record(run, position, signals)
    else:
        _train(run, position, journal.Journal(), signals)


def place_for(
    config: TrainConfig, world: World, device: torch.device, replica: ReplicaWorld | None = None
) -> TrainContext:
    """Return where this rank trains; it is a member of the default process group."""
    sharding = config.sharding
    if replica is not None:
        sharding = dataclasses.replace(sharding, mesh=None, replicas=1)
    plan = resolve_sharding(sharding, world.size, world.hosts)
    return TrainContext(
        world=world,
        readers=world if replica is None else replica.among_all(world),
        replica=replica,
        device=device,
        plan=plan,
        mesh=plan.make_mesh(device.type),
        display=make_display(world.rank),
    )


def _resume(run: _Run) -> Position:
    """Load the newest checkpoint, if the run goes on; return how far the run is."""
    newest = on_rank_zero(f"beginning in {run.files.place}", lambda: _take_folder(run))
    if newest is None:
        return Position()
    _find_best(run, newest)
    try:
        return run.checkpoints.load(newest, run.task.module, run.task.optimizer)
    except UserError as error:
        if "is damaged" not in str(error):  # other ranks get the text alone
            raise
        raise UserError(f"{error}; {_how_to_go_on_without(run, newest)}") from error


def _take_over(run: _Run, before: Departure | None) -> Position:
    """Take over what the ranks of the world before have in memory; return how far the run is."""
    _keep_folder(run)
    extra = transfer(before, (run.task.module, run.task.optimizer))
    position = run.checkpoints.go_on(extra, run.files.place)
    _find_best(run, position.step)
    return position


def _recover(run: _Run) -> Position | None:
    """Go on from what hosts keep in memory; return how far the run is, None: they keep nothing."""
    if run.memory is None:
        return None
    found = run.memory.recover(run.task.module, run.task.optimizer, run.files)
    if found is not None:
        _keep_folder(run)
        _find_best(run, found.step)
    return found


def _keep_folder(run: _Run) -> None:
    """Go on in the folder of the run, whether or not it has a checkpoint."""
    resumed = dataclasses.replace(run.inputs.train.output, existing=Existing.RESUME)
    on_rank_zero(f"going on in {run.files.place}", lambda: run.files.begin(resumed))


def _find_best(run: _Run, newest: int) -> None:
    """Find the best checkpoint up to the one that the run goes on from, if the best is kept."""

    def best() -> Best | None:
        if not run.files.metrics.exists():
            return None
        steps = [step for step in run.checkpoints.steps() if step <= newest]
        return Best.among(read_metrics(run.files.metrics, newest), steps)

    if run.inputs.train.output.keep_best:
        run.checkpoints.best = on_rank_zero("finding the best checkpoint", best)


def _how_to_go_on_without(run: _Run, newest: int) -> str:
    """Return what to do about a damaged checkpoint: without it, every start would fail alike."""
    older = [step for step in run.checkpoints.steps() if step < newest]
    if not older:
        return "no older checkpoint is complete: --overwrite starts over"
    return how_to_go_on_without(run.checkpoints.path(newest), older[-1])


def _joined(run: _Run, position: Position) -> Position:
    """Join the other replicas, if there are any that train apart; return how far this one is."""
    replicas = run.task.replicas
    if replicas is None:
        return position
    replicas.diloco.join()
    step = replicas.reached(position.step)
    return Position(step, position.examples + (step - position.step) * run.per_step)


def _take_folder(run: _Run) -> int | None:
    """Prepare the folder; return the step to go on from, None for a new run.

    Raises:
        OptionError: it cannot be, or there is none.
    """
    asked = run.inputs.train.output
    if run.place.replica is not None:
        # The launcher has looked at the folder. What is in it may be of an earlier start.
        run.files.make()
        saved, replicas = run.checkpoints.steps(), run.task.replicas
        if replicas is not None and replicas.diloco.has_peers:  # further than any checkpoint
            return None
        return saved[-1] if saved else None
    if run.files.store is not None:
        run.files.store.claim()  # before the look at what others have saved
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
    # Here, and not before: other ranks have no use for them.
    from shardwise.insight.inspect.page import page as inspect_page
    from shardwise.insight.inspect.read import inspect

    task, files, say = run.task, run.files, run.place.display.say
    facts = {"recipe": run.inputs.recipe, **run.inputs.facts()}
    facts["model"]["parameters"] = count(task.module.parameters())
    _introduce(run, position)
    _keep_earlier_options(run)
    record = journal.RunRecord(files, facts, _session(run, position))
    planned = os.environ.get(PLAN_FILE)
    for file, text in (
        (files.options, run.options),
        (files.plan, Path(planned).read_text(encoding="utf-8") if planned else None),
        (files.model_config, task.model_config),
        (files.generation_config, task.generation_config),
    ):
        if text:
            write_text(file, text)
    if task.save_tokenizer is not None:
        files.keep_tokenizer(task.save_tokenizer)
    if (best := run.checkpoints.best) is not None:
        record.best(best)
    log: journal.FileJournal | None = None
    try:
        sinks: Sequence[Sink] = ()
        if (logs := run.inputs.train.output.logs) - {LogName.JSONL}:
            from shardwise.app.recipes.core.sinks import open_sinks

            config = facts["config"]
            sinks = open_sinks(logs, files.root, position.step, record.identity, config)
        log = journal.FileJournal(files, record, task.unit, position.step, sinks)
        write_text(files.layout, inspect_page(inspect(task.module, name=task.model_name)))
        files.publish()
        output = run.inputs.train.output
        with journal.report_under_way(files) if output.page else contextlib.nullcontext():
            results = _train(run, position, log, signals)
    except BaseException as error:
        # The error matters more than a failure to record it.
        with contextlib.suppress(OSError, UserError):
            if isinstance(error, Stopped):
                record.end("stopped", signal=error.signum)
            else:
                record.failed(error)
        if log is not None:
            log.close(error)
        journal.write_report(files)
        if files.store is not None:
            files.store.leave()
        raise
    log.close()
    record.end("finished", **results)
    if journal.write_report(files):
        say(f"report     {files.report}")
    files.publish()
    say(f"run        {files.place}")


def _train(
    run: _Run, position: Position, log: journal.Journal, signals: StopSignals
) -> Mapping[str, float]:
    loop = Loop(
        task=run.task,
        config=run.inputs.train,
        span=run.span,
        place=run.place,
        checkpoints=run.checkpoints,
        journal=log,
        signals=signals,
        timeline=_timeline(run, position),
        memory=run.memory,
    )
    position, results = loop.run(position)
    return run.task.finish(run.checkpoints.path(position.step), results)


def _timeline(run: _Run, position: Position) -> TimelineOfRun | None:
    asked, say = run.inputs.train.output.timeline, run.place.display.say
    if asked is None:
        return None
    from shardwise.app.recipes.core.timeline_of_run import TimelineOfRun, read_prediction

    left = run.span.left(position, run.per_step)
    steps = steps_to_record(asked, position.step, left)
    here = range(position.step + 1, position.step + left + 1)
    if not (steps and steps[-1] in here):
        found = f"steps {here[0]} to {here[-1]}" if here else "no step"
        say(f"warning    --timeline {asked}: this session makes {found}")
    return TimelineOfRun(steps, run.files.timeline, say, read_prediction() if steps else None)


def _introduce(run: _Run, position: Position) -> None:
    """Print the first lines: model, sharding, precision, data, step."""
    task, place, config = run.task, run.place, run.inputs.train
    say, sharding = place.display.say, config.sharding
    parameters = list(task.module.parameters())
    mine = shard_bytes(task.module) / 2**20
    whole = sum(p.numel() * p.element_size() for p in parameters) / 2**20
    say(f"model      {task.model_name}, {count(parameters):,} parameters, {place.device.type}")
    if (found := devices.count()) and place.device == devices.CPU and config.device == AUTO:
        ranks = counted(place.world.local_size, "rank")
        idle = counted(found, f"{devices.default_type()} device")
        say(
            f"warning    {ranks} on this host train on CPUs, as it has {idle}; --nproc {found} "
            "trains there"
        )
    say(
        f"sharding   {sharding.strategy.value} over {place.plan}, transport "
        f"{transport_name(task.module)}; {mine:.1f} of {whole:.1f} MiB of parameters on this rank"
    )
    say(
        f"precision  {sharding.compute_dtype} compute, {sharding.reduce_dtype} "
        f"reduction, {sharding.shard_dtype} shards"
    )
    for label, text in task.introduction:
        say(f"{label:<11}{text}")
    ranks = counted(place.readers.size, "rank")
    accumulate = f" x {config.accumulate} microbatches" if config.accumulate > 1 else ""
    units = run.per_step * task.units_per_example
    span = run.span
    steps = f"{span.steps_in_all(run.per_step):,} steps"
    length = steps if span.epochs is None else f"{counted(span.epochs, 'epoch')}, {steps}"
    say(
        f"step       {config.batch_size} {task.example}{accumulate} x "
        f"{ranks} = {units:,} {task.unit}; {length}"
    )
    if position.step:
        say(f"resume     after {span.shown(position)}")
        for option, (old, new) in _changes(run, position).items():
            say(f"change     {option}: {_shown(old)} before, {_shown(new)} from here on")
        if warning := _other_step(run) or _other_schedule(run, position):
            say(f"warning    {warning}")


def _changes(run: _Run, position: Position) -> dict[str, tuple[Any, Any]]:
    """Return what is asked for in another way than the run was before, if it goes on."""
    return run.inputs.changes(run.files.read()) if position.step else {}


def _shown(value: Any) -> str:
    return "none" if value in (None, []) else printable(str(value))


def _keep_earlier_options(run: _Run) -> None:
    """Keep the options of the sessions before, if this one has others."""
    files = run.files
    if not run.options or not files.options.is_file():
        return
    if files.options.read_text(encoding="utf-8", errors="replace") == run.options:
        return
    files.earlier_options.mkdir(exist_ok=True)
    number = len(files.read().get("sessions", []))
    files.options.rename(files.earlier_options / f"session-{number}.yaml")


def _other_step(run: _Run) -> str:
    """Return what to say if a step had another number of examples before; else nothing."""
    sessions = run.files.read().get("sessions", [])
    before = sessions[-1].get("examples_per_step") if sessions else None
    if before in (None, run.per_step):
        return ""
    return (
        f"a step has {run.per_step} examples from here on, and had {before} before: "
        "results depend on it; see --nproc, --batch-size and --accumulate"
    )


def _other_schedule(run: _Run, position: Position) -> str:
    """Return what to say if what is asked for now gives other learning rates to steps before."""
    if not _changes(run, position) or not run.files.metrics.is_file():
        return ""
    for found in read_metrics(run.files.metrics, position.step):
        step, was = found.get("step"), found.get("lr")
        if isinstance(step, int) and isinstance(was, float):
            now = run.task.schedule(Position(step, step * run.per_step))
            if not math.isclose(was, now, rel_tol=1e-6):
                return (
                    f"step {step} had a learning rate of {was:.2e}, and would have {now:.2e} now: "
                    "losses differ from those of a run with these options from the start"
                )
    return ""


def _session(run: _Run, position: Position) -> dict[str, Any]:
    plan = run.place.plan
    return {
        "from_step": position.step,
        "changes": _changes(run, position),
        "steps_asked_for": run.inputs.train.steps,
        "epochs_asked_for": run.inputs.train.epochs,
        "examples_per_step": run.per_step,
        "world_size": run.place.world.size,
        "hosts": run.place.world.hosts,
        "local_size": run.place.world.local_size,
        "host_names": run.host_names,
        "device": run.place.device.type,
        "mesh": dict(zip(plan.names, plan.shape, strict=True)),
        "transport": transport_name(run.task.module),
    }


# -- the device and the memory of this rank --------------------------------------------------------


def _choose_device(wanted: str, world: World) -> torch.device:
    """Return the device of this rank, made current.

    ``auto`` takes accelerators where every rank of this host can have one of its own, else CPUs.

    Raises:
        OptionError: this process cannot compute on what is asked for, or there are too few.
    """
    if wanted == AUTO:
        wanted = devices.type_for(world.local_size)
    with naming("--device"):
        devices.check_type(wanted)
    if wanted == devices.CPU.type:
        return devices.CPU
    if (found := devices.count()) < world.local_size:
        raise OptionError(
            "--device",
            f"{wanted}, of which this host has {found}",
            f"one for each of its {world.local_size} ranks, or --device cpu",
        )
    return devices.take(wanted, world.local_rank)
