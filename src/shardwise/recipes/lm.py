"""A language model learns from text: everything that happens on one rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise import FSDPModule
from shardwise.frontends.strategies import ShardingPlan
from shardwise.launch.errors import Stopped
from shardwise.launch.rank import connected
from shardwise.launch.signals import StopSignals
from shardwise.launch.world import World, launched_here
from shardwise.recipes import journal
from shardwise.recipes.checkpointing import Checkpoints, Position
from shardwise.recipes.config import resolve_sharding
from shardwise.recipes.data import SEPARATOR, VOCAB_SIZE, decode
from shardwise.recipes.device import backend_for, choose_device
from shardwise.recipes.lm_config import LmConfig, LmInputs, check_folder
from shardwise.recipes.loop import Loop, Task
from shardwise.recipes.model import (
    build,
    config_json,
    next_token_loss,
    shard,
    shard_bytes,
    transport_name,
)
from shardwise.recipes.optim import count, make_adamw, warmup_cosine
from shardwise.recipes.progress import Display, brief, make_display, printable
from shardwise.recipes.rundir import write_text
from shardwise.recipes.sample import sample_tokens
from shardwise.recipes.text import TextBatches, ValidationLoss


@dataclass(frozen=True)
class _Run:
    """One rank's parts, once everything stands."""

    config: LmConfig
    inputs: LmInputs
    world: World
    device: torch.device
    plan: ShardingPlan
    model: Any  # PreTrainedModel and FSDPModule at once, which no type can say
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints
    display: Display


def train_lm(config: LmConfig, inputs: LmInputs, world: World, signals: StopSignals) -> None:
    """Train on this rank, as one of ``world``.

    Raises:
        UserError: what the user can put right.
        Stopped: a signal asked to stop, and the run is saved.
    """
    if world.rank == 0:
        # Before anything is written, and again for those whom no launcher of ours started.
        check_folder(config, inputs)
    device = choose_device(config.train.device, world)
    with connected(world, backend_for(device)):
        train_connected(config, inputs, world, device, signals)


def train_connected(
    config: LmConfig, inputs: LmInputs, world: World, device: torch.device, signals: StopSignals
) -> None:
    """As :func:`train_lm`, as a member of the default process group already."""
    run = _assemble(config, inputs, world, device)
    position = _resume(run)
    if world.rank == 0:
        _train_and_record(run, position, signals)
    else:
        _train(run, position, journal.NoJournal(), signals)


def _assemble(config: LmConfig, inputs: LmInputs, world: World, device: torch.device) -> _Run:
    plan = resolve_sharding(config.train.sharding, world.size, world.hosts)
    mesh = plan.make_mesh(device.type)
    model = build(inputs.settings, VOCAB_SIZE, SEPARATOR)
    shard(model, config.train.sharding, plan, mesh, config.train.seed)
    # From here on every rank has random numbers of its own, for dropout.
    torch.manual_seed(config.train.seed * world.size + world.rank)
    return _Run(
        config=config,
        inputs=inputs,
        world=world,
        device=device,
        plan=plan,
        model=model,
        optimizer=make_adamw(model, config.train.optimizer),
        checkpoints=Checkpoints(config.files.checkpoints, config.train.output.keep_last),
        display=make_display(world.rank),
    )


def _resume(run: _Run) -> Position:
    """Begin anew, or load the newest checkpoint."""
    # Rank 0 looks, so that no two ranks can see different ones.
    newest = torch.zeros(1, dtype=torch.int64)
    output = run.config.train.output
    if run.world.rank == 0:
        if output.resume:
            newest += run.checkpoints.steps()[-1]
        run.config.files.begin(output)
    dist.broadcast(newest, src=0)
    if not newest:
        return Position()
    return run.checkpoints.load(int(newest), run.model, run.optimizer)


def _train_and_record(run: _Run, position: Position, signals: StopSignals) -> None:
    """Rank 0: train, and keep the run's files."""
    files = run.config.files
    facts = run.inputs.facts(run.config)
    facts["model"]["parameters"] = count(run.model.parameters())
    record = journal.RunRecord(files, facts, _session(run, position))
    write_text(files.model_config, config_json(run.model))
    log = journal.FileJournal(
        files, "tokens", position.step, tensorboard=run.config.train.output.tensorboard
    )
    _introduce(run, position)
    try:
        results = _train(run, position, log, signals)
    except BaseException as error:
        # What went wrong is worth more than what goes wrong while it is written down.
        with contextlib.suppress(OSError):
            if isinstance(error, Stopped):
                record.end("stopped", signal=error.signum)
            else:
                record.end("failed", error=f"{type(error).__name__}: {error}"[:2000])
            journal.draw(files, _title(run))
        raise
    finally:
        log.close()
    journal.draw(files, _title(run))
    record.end("finished", **results)
    run.display.say(f"curve      {files.picture}")
    run.display.say(f"everything {files.root}")


def _train(
    run: _Run, position: Position, log: journal.Journal, signals: StopSignals
) -> Mapping[str, float]:
    config = run.config
    task = Task(
        model=run.model,
        optimizer=run.optimizer,
        schedule=warmup_cosine(config.train.optimizer, config.train.steps),
        data=TextBatches(run.inputs.text, config, run.device),
        loss=next_token_loss,
        evaluate=ValidationLoss(
            run.model, run.inputs.text.validation, config, run.world, run.device
        ),
        unit="tokens",
        units_per_example=config.seq_length,
    )
    loop = Loop(
        task,
        config.train,
        run.world,
        run.device,
        checkpoints=run.checkpoints,
        journal=log,
        display=run.display,
        signals=signals,
        how_to_resume=_how_to_resume(),
    )
    results = loop.run(position)
    if config.sample_tokens:
        _write_sample(run)
    return results


def _write_sample(run: _Run) -> None:
    config = run.config
    prompt = [SEPARATOR, *config.prompt_text.encode()]
    assert isinstance(run.model, FSDPModule)
    tokens = sample_tokens(
        run.model,
        prompt,
        config.sample_tokens,
        vocab_size=SEPARATOR,
        temperature=config.temperature,
        window=config.seq_length,
        seed=config.train.seed,
        device=run.device,
    )
    if run.world.rank == 0:
        text = config.prompt_text + decode(tokens)
        write_text(config.files.sample, text + "\n")
        run.display.say(f"sample     {config.files.sample}")
        run.display.say("\n".join(f"    {line}".rstrip() for line in printable(text).split("\n")))


def _introduce(run: _Run, position: Position) -> None:
    """The first lines: what is trained, how it is spread, from what it learns."""
    config, text, say = run.config, run.inputs.text, run.display.say
    train, sharding = config.train, config.train.sharding
    parameters = count(run.model.parameters())
    ranks = f"{run.world.size} {'rank' if run.world.size == 1 else 'ranks'}"
    tokens = train.examples_per_step(run.world.size) * config.seq_length
    accumulate = f" x {train.accumulate} microbatches" if train.accumulate > 1 else ""
    mine = shard_bytes(run.model) / 2**20
    whole = sum(p.numel() * p.element_size() for p in run.model.parameters()) / 2**20
    say(f"model      {config.model}, {parameters:,} parameters, {run.device.type}")
    say(
        f"sharding   {sharding.strategy.value} over {run.plan}, transport "
        f"{transport_name(run.model)}; {mine:.1f} of {whole:.1f} MiB of parameters on this rank"
    )
    say(
        f"precision  {sharding.param_dtype.value} compute, {sharding.reduce_dtype.value} "
        f"reduction, fp32 shards"
    )
    say(
        f"data       {text.name}: {brief(len(text.train))} tokens to learn from, "
        f"{brief(len(text.validation))} held back; {text.files:,} "
        f"{'file' if text.files == 1 else 'files'}"
    )
    say(
        f"step       {train.batch_size} sequences x {config.seq_length} tokens{accumulate} x "
        f"{ranks} = {tokens:,} tokens; {train.steps} steps"
    )
    if position.step:
        say(f"resume     after step {position.step} of {train.steps}")


def _session(run: _Run, position: Position) -> dict[str, Any]:
    return {
        "from_step": position.step,
        "steps_asked_for": run.config.train.steps,
        "world_size": run.world.size,
        "hosts": run.world.hosts,
        "device": run.device.type,
        "mesh": dict(zip(run.plan.names, run.plan.shape, strict=True)),
        "transport": transport_name(run.model),
    }


def _title(run: _Run) -> str:
    return f"{run.config.model} on {run.inputs.text.name}"


def _how_to_resume() -> str:
    if not launched_here():
        return "To go on, start the same with --resume."
    if "--auto-resume" in sys.argv:
        return "To go on:\n  " + journal.command_line(sys.argv[1:])
    arguments = [a for a in sys.argv[1:] if a not in ("--overwrite", "--resume")]
    return "To go on:\n  " + journal.command_line([*arguments, "--resume"])
