"""The training loop that every recipe shares.

A recipe hands in a :class:`~shardwise.app.recipes.core.recipe.Task`: model, optimizer, schedule,
data, loss. Accumulation, clipping, metrics, checkpoints, progress and stopping are done here, alike
for all.

One step, on every rank:

    forward, backward      x accumulate; gradients are reduced once, in the last backward
    clip                   unless groups step in backward
    exchange               one small all-gather: loss, memory, times, "was I asked to stop?"
    optimizer step
    record, evaluate, save
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.app.recipes.core.checkpointing import Checkpoints, SaveError
from shardwise.app.recipes.core.journal import Journal, StepMetrics, command_line
from shardwise.app.recipes.core.position import Position, TrainingSpan
from shardwise.app.recipes.core.recipe import Task, TrainContext
from shardwise.base import devices, observe
from shardwise.base.errors import CheckpointError, StoreError, UserError
from shardwise.checkpoint.ranks.moving import Departure, hand_over
from shardwise.elastic.errors import MovedOn, Parted, Stopped, signal_name
from shardwise.elastic.rank import MOVE_ON, StopSignals
from shardwise.elastic.world import STAYS, launched_here
from shardwise.insight.optimizers import set_lr
from shardwise.insight.program import TrainingStep
from shardwise.insight.schema.training import TrainConfig
from shardwise.runs.metrics import RankStep
from shardwise.transport.peers import Peers

if TYPE_CHECKING:
    from shardwise.app.recipes.core.memory import RunInMemory
    from shardwise.app.recipes.core.timeline_of_run import TimelineOfRun


RECENT = 20  # steps over which speed is averaged


class DivergedError(UserError):
    """The loss or the gradient is no longer a finite number."""

    exit_code = 1


@dataclass(frozen=True)
class _StepOutcome:
    """One step, as all ranks know it after the exchange."""

    position: Position
    loss: float
    grad_norm: float
    lr: float
    memory_mib: float
    stop: int  # the signal that asked any rank to stop, or MOVE_ON, or 0
    asked: frozenset[int]  # the ranks that a signal asked to stop
    saved: bool  # all ranks have finished writing the checkpoint under way, or failed to
    ranks: Sequence[RankStep]  # what each rank says of the step; empty where replicas train apart


@dataclass(kw_only=True)
class Loop:
    """Trains a :class:`Task`.

    Attributes:
        task: what to train.
        config: how to train.
        span: how long.
        place: where.
        checkpoints: of the run.
        journal: where to record what happens.
        signals: which may ask to stop.
        timeline: records some of the steps; None: it records none.
        memory: keeps versions in the memory of hosts; None: none are kept.
    """

    task: Task
    config: TrainConfig
    span: TrainingSpan
    place: TrainContext
    checkpoints: Checkpoints
    journal: Journal
    signals: StopSignals
    timeline: TimelineOfRun | None = None
    memory: RunInMemory | None = None

    def __post_init__(self) -> None:
        self._per_step = self.config.examples_per_step(self.place.readers.size)
        self._one = TrainingStep(program=self.task.program, optimizer=self.task.optimizer)
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._updating = 0.0  # seconds of the last step behind its exchange
        self._loading = 0.0  # seconds of this step in which batches were waited for

    def run(self, position: Position) -> tuple[Position, dict[str, float]]:
        """Train until the end.

        Args:
            position: how far the run is already.

        Returns:
            How far it is now, and the evaluation there.

        Raises:
            Stopped: a signal asked any rank to stop, or this one after its last step; the run
                is saved.
            DivergedError: the loss is not finite; the last checkpoint is from before.
        """
        left = self._left(position)
        self.place.display.begin(position.step, position.step + left, self.task.unit)
        evaluated: dict[str, float] = {}
        try:
            nothing, timeline = contextlib.nullcontext(), self.timeline
            with self.signals.deferred(), timeline or nothing, self._recording_failure():
                while self._left(position):
                    with timeline.step(position.step + 1) if timeline else nothing:
                        started = time.perf_counter()
                        before, outcome = position, self._step(position)
                        self._durations.append(time.perf_counter() - started)
                    position = self._reached(outcome.position)
                    self._write(outcome)
                    self.signals.stepped()
                    if outcome.saved:
                        self._wait_for_checkpoint()
                    if self.task.replicas is not None and not self._left(position):
                        self.task.replicas.diloco.flush()  # which makes all of them equal
                        self.task.replicas.diloco.leave()
                    evaluated = self._evaluate_if_due(before, position, outcome.stop)
                    self._save_if_due(position, outcome.stop)
                    if self.memory is not None and (outcome.stop or not self._left(position)):
                        self.memory.wait()
                    elif self.memory is not None:
                        self.memory.keep_if_due(position, self.task.module, self.task.optimizer)
                    if outcome.stop == MOVE_ON:
                        raise self._moved_on(position)
                    if outcome.stop:
                        raise self._stopped(position, outcome)
            # It came after the last exchange, when other ranks may have left the loop.
            if (noted := self.signals.noted) > MOVE_ON:
                raise Stopped(noted, self._farewell(position, noted))
        finally:
            self.place.display.end()
            self.task.close()
        evaluated = evaluated or self._evaluate(position)
        self._record_best(position.step)
        return position, evaluated

    @contextlib.contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """Record a failure first: a launcher ends the ranks soon after, and files take time."""
        try:
            yield
        except Stopped:
            raise
        except BaseException as error:
            self.journal.failed(error)
            raise

    def _left(self, position: Position) -> int:
        return self.span.left(position, self._per_step)

    def _step(self, before: Position) -> _StepOutcome:
        task = self.task
        began, waited, self._loading = time.perf_counter(), observe.waited(), 0.0
        position = Position(before.step + 1, before.examples + self._per_step)
        lr = task.schedule(position)
        set_lr(task.optimizer, lr, self.config.optimizer.lr)
        loss = self._accumulate(before)
        total = self._one.norm()
        assert total is not None
        norm = (total.full_tensor() if isinstance(total, DTensor) else total).item()
        seconds = self._updating + time.perf_counter() - began
        own = (seconds, observe.waited() - waited, self._loading)
        mean, memory_mib, noted, saved, ranks = self._exchange(loss, position.step, own)
        exchanged = time.perf_counter()
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise DivergedError(self._divergence(position.step, mean, norm))
        if task.replicas is not None:
            task.replicas.count(self.config.accumulate * self.config.batch_size)
        self._one.update()
        self._updating = time.perf_counter() - exchanged
        asked = frozenset(rank for rank, signum in enumerate(noted) if signum > MOVE_ON)
        stop = max(noted, default=0)  # MOVE_ON is less than any signal
        return _StepOutcome(position, mean, norm, lr, memory_mib, stop, asked, saved, ranks)

    def _reached(self, position: Position) -> Position:
        """Return how far this rank is after a step; the replicas may be further than it was."""
        replicas = self.task.replicas
        if replicas is None:
            return position
        step = replicas.reached(position.step)
        if self.span.steps is not None:
            step = max(position.step, min(step, self.span.steps))
        return Position(step, position.examples + (step - position.step) * self._per_step)

    def _accumulate(self, position: Position) -> torch.Tensor:
        """Run forward and backward over this rank's microbatches; return the mean loss."""
        task, count = self.task, self.config.accumulate
        batches: Iterable[Any] = (self._batch(position, micro) for micro in range(count))
        divisor: float = count
        if task.targets is not None:
            batches = list(batches)  # counted before the first backward
            divisor = self._mean_targets(sum(map(task.targets, batches)))
        total = torch.zeros((), dtype=torch.float32, device=self.place.device)
        for loss in self._one.backward(batches, count, divisor):
            total += loss.float() / divisor
        return total

    def _batch(self, position: Position, micro: int) -> Any:
        """Return this rank's part of a microbatch of the step from a position on."""
        size = self.config.batch_size
        first = (
            position.examples + (micro * self.place.readers.size + self.place.readers.rank) * size
        )
        began = time.perf_counter()
        batch = self.task.data.batch(first, size).to(self.place.device)
        self._loading += time.perf_counter() - began
        return batch

    def _mean_targets(self, mine: int) -> float:
        """Return the targets of the step over the ranks, of which gradients are averaged.

        A rank's loss divided by it has the gradient of the mean over all targets, once gradients
        are averaged: ranks with fewer targets count less.
        """
        replicas = self.task.replicas
        group = None if replicas is None else replicas.own_group
        count = torch.tensor(mine, dtype=torch.float64)
        return Peers(group).gather_numbers(count, "the count of targets").mean().item()

    def _exchange(
        self, loss: torch.Tensor, step: int, own: tuple[float, float, float]
    ) -> tuple[float, float, Sequence[int], bool, Sequence[RankStep]]:
        """Return mean loss, largest memory, what each rank has noted, and whether all have saved.

        And what each says of the step; see :class:`_StepOutcome`.

        Where replicas train apart, most exchanges are within a replica, which does not stop alone.
        """
        replicas = self.task.replicas
        group = None if replicas is None else replicas.group_after(step)
        mine = torch.tensor(
            [
                *(loss.item(), devices.peak_memory(self.place.device) / 2**20),
                *(self.signals.noted, self.checkpoints.has_ended),
                *own,
            ],
            dtype=torch.float64,
        )
        everyone = Peers(group).gather_numbers(mine, "the exchange of losses and signals")
        losses, memory, asked, ended, *times = everyone.T.tolist()
        # Summed in the order of ranks: the same bits on every rank, every time.
        noted = tuple(map(int, asked)) if group is None else ()
        ranks = tuple(map(RankStep, *times, memory)) if replicas is None else ()
        return sum(losses) / len(losses), max(memory), noted, all(ended), ranks

    def _write(self, outcome: _StepOutcome) -> None:
        seconds = sum(self._durations) / len(self._durations)
        speed = self._per_step * self.task.units_per_example / seconds
        peak = self.task.peak_units_per_s
        metrics = StepMetrics(
            step=outcome.position.step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            units_per_s=speed,
            memory_mib=outcome.memory_mib,
            eta_s=self._left(outcome.position) * seconds,
            epoch=self.span.epoch(outcome.position),
            mfu=None if peak is None else speed / peak,
        )
        self.journal.step(metrics, outcome.ranks)
        if metrics.step % self.config.output.log_every == 0 or not metrics.eta_s:
            self.place.display.step(metrics)

    def _evaluate_if_due(self, before: Position, position: Position, stop: int) -> dict[str, float]:
        every = self.config.output.eval_every
        if self.config.output.keep_best and not (stop > MOVE_ON or self._left(position)):
            return self._evaluate(position)  # before the last save, which deletes what is worse
        done, now = self.span.evaluation_count(before), self.span.evaluation_count(position)
        due = every and done // every < now // every
        return self._evaluate(position) if due else {}

    def _evaluate(self, position: Position) -> dict[str, float]:
        replicas = self.task.replicas
        with contextlib.nullcontext() if replicas is None else replicas.diloco.outer_parameters():
            values = self.task.evaluate()
        self.journal.evaluated(position.step, values)
        shown = " ".join(f"{name}={value:.4f}" for name, value in values.items())
        self.place.display.say(f"evaluation step={position.step} {shown}")
        if self.config.output.keep_best:
            self.checkpoints.improves(position.step, values.get("validation_loss", math.nan))
        return values

    def _save_if_due(self, position: Position, stop: int) -> None:
        every = self.config.output.checkpoint_every
        last = not self._left(position)
        best = self.checkpoints.best
        is_best = best is not None and best.step == position.step
        if not (stop > MOVE_ON or last or is_best or (every and position.step % every == 0)):
            return
        self._wait_for_checkpoint()
        self.journal.saved()
        model, optimizer = self.task.module, self.task.optimizer
        if self.config.output.async_checkpoint and not (stop > MOVE_ON or last):
            self.checkpoints.begin(position, model, optimizer)
        else:
            self.checkpoints.save(position, model, optimizer)
            self._say_saved(position.step)

    def _stopped(self, position: Position, outcome: _StepOutcome) -> Stopped:
        """Part with the ranks that were asked to stop, if the others can go on without them."""
        farewell = self._farewell(position, outcome.stop)
        rank, leaving = self.place.world.rank, outcome.asked
        departure: Departure | None = None
        if STAYS in os.environ and len(leaving) < self.place.world.size:
            try:
                departure = self._departure(position)
                hand_over(departure, leaving)
            except CheckpointError:
                departure = None  # all is saved
            if rank not in leaving:
                return Parted(outcome.stop, farewell, departure)
        self.signals.agree(outcome.stop)
        return Stopped(outcome.stop, farewell)

    def _departure(self, position: Position) -> Departure:
        extra = self.checkpoints.extra(position)
        departure = Departure((self.task.module, self.task.optimizer), extra)
        departure.let_go()
        return departure

    def _moved_on(self, position: Position) -> MovedOn:
        """Collect what this rank takes into the next world."""
        self._wait_for_checkpoint()
        text = f"More hosts join after {self.span.shown(position)}."
        return MovedOn(signal.SIGTERM, text, self._departure(position))

    def _wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if one is.

        Raises:
            SaveError: a rank could not write; every rank raises it.
        """
        step = self.checkpoints.wait()
        if step is not None:
            self._say_saved(step)

    def _say_saved(self, step: int) -> None:
        self.place.display.say(f"checkpoint step={step} {self.checkpoints.path(step)}")
        self._record_best(step)

    def _record_best(self, step: int) -> None:
        """Record the best checkpoint, if it is that of this step, which is complete."""
        best = self.checkpoints.best
        if best is not None and best.step == step:
            self.journal.best(best)

    def _divergence(self, step: int, loss: float, norm: float) -> str:
        try:
            self._wait_for_checkpoint()
            saved = self.checkpoints.steps()
            since = f"step {saved[-1]} is saved" if saved else "nothing was saved before"
        except (SaveError, StoreError) as error:
            since = str(error)
        return (
            f"step {step}: found loss {loss} and gradient norm {norm}, expected finite numbers; "
            f"{since}; try a lower --lr or a longer --warmup"
        )

    def _farewell(self, position: Position, stop: int) -> str:
        return (
            f"Stopped by {signal_name(stop)} after {self.span.shown(position)}, which is saved. "
            f"{_how_to_resume()}"
        )


def _how_to_resume() -> str:
    if not launched_here():
        return "To go on, start the same with --resume."
    if "--auto-resume" in sys.argv:
        return "To go on:\n  " + command_line(sys.argv[1:])
    arguments = [a for a in sys.argv[1:] if a not in ("--overwrite", "--resume")]
    return "To go on:\n  " + command_line([*arguments, "--resume"])
