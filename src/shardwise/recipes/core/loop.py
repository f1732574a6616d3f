"""The training loop that every recipe shares.

A recipe hands in a :class:`~shardwise.recipes.core.recipe.Task`: model, optimizer, schedule, data,
loss. Accumulation, clipping, metrics, checkpoints, progress and stopping are done here, alike for
all.

One step, on every rank:

    forward, backward      x accumulate; gradients are reduced once, in the last backward
    clip
    exchange               one small all-gather: loss, memory, "was I asked to stop?"
    optimizer step
    record, evaluate, save
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise import clip_grad_norm_, devices
from shardwise.launch.errors import Stopped, UserError, signal_name
from shardwise.launch.rank import StopSignals
from shardwise.recipes.core.build import set_lr
from shardwise.recipes.core.checkpointing import Checkpoints, SaveError
from shardwise.recipes.core.config import TrainConfig
from shardwise.recipes.core.journal import Journal, StepMetrics
from shardwise.recipes.core.position import Position, Span
from shardwise.recipes.core.recipe import Place, Task
from shardwise.transport.peers import Peers

RECENT = 20  # steps over which speed is averaged


class DivergedError(UserError):
    """The loss or the gradient is no longer a finite number."""

    exit_code = 1


@dataclass(frozen=True)
class _Outcome:
    """One step, as all ranks know it after the exchange."""

    position: Position
    loss: float
    grad_norm: float
    lr: float
    memory_mib: float
    stop: int  # the signal that asked any rank to stop, or 0
    saved: bool  # all ranks have finished writing the checkpoint under way, or failed to


class Loop:
    """Trains a :class:`Task`.

    Args:
        task: what to train.
        config: how to train.
        span: how long.
        place: where.
        checkpoints: of the run.
        journal: where to record what happens.
        signals: which may ask to stop.
        how_to_resume: for the message of a run that was stopped.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        span: Span,
        place: Place,
        *,
        checkpoints: Checkpoints,
        journal: Journal,
        signals: StopSignals,
        how_to_resume: str,
    ) -> None:
        self._task = task
        self._config = config
        self._span = span
        self._world = place.world
        self._device = place.device
        self._per_step = config.examples_per_step(place.world.size)
        self._checkpoints = checkpoints
        self._journal = journal
        self._display = place.display
        self._signals = signals
        self._how_to_resume = how_to_resume
        self._durations: deque[float] = deque(maxlen=RECENT)

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
        self._display.begin(position.step, position.step + left, self._task.unit)
        evaluated: dict[str, float] = {}
        try:
            with self._signals.deferred():
                while self._left(position):
                    started = time.perf_counter()
                    before, outcome = position, self._step(position)
                    self._durations.append(time.perf_counter() - started)
                    position = outcome.position
                    self._write(outcome)
                    self._signals.stepped()
                    if outcome.saved:
                        self._wait_for_checkpoint()
                    if self._task.replicas is not None and not self._left(position):
                        self._task.replicas.end()
                    evaluated = self._evaluate_if_due(before, position)
                    self._save_if_due(position, outcome.stop)
                    if outcome.stop:
                        raise Stopped(outcome.stop, self._farewell(position, outcome.stop))
            # It came after the last exchange, when other ranks may have left the loop.
            if noted := self._signals.noted:
                raise Stopped(noted, self._farewell(position, noted))
        finally:
            self._display.end()
            self._task.close()
        return position, evaluated or self._evaluate(position)

    def _left(self, position: Position) -> int:
        return self._span.left(position, self._per_step)

    def _step(self, before: Position) -> _Outcome:
        task, config = self._task, self._config
        position = Position(before.step + 1, before.examples + self._per_step)
        lr = task.schedule(position)
        set_lr(task.optimizer, lr)
        loss = self._accumulate(before)
        limit = config.optimizer.clip_grad or math.inf
        norm = _item(clip_grad_norm_(list(task.module.parameters()), limit))
        mean, memory_mib, stop, saved = self._exchange(loss, position.step)
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise DivergedError(self._divergence(position.step, mean, norm))
        task.optimizer.step()
        task.optimizer.zero_grad()
        task.after_step()
        return _Outcome(position, mean, norm, lr, memory_mib, stop, saved)

    def _accumulate(self, position: Position) -> torch.Tensor:
        """Run forward and backward over this rank's microbatches; return the mean loss."""
        task, count = self._task, self._config.accumulate
        size = self._config.batch_size
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for micro in range(count):
            # Where this rank's part of this microbatch lies among the examples of the step.
            first = position.examples + (micro * self._world.size + self._world.rank) * size
            batch = task.data.batch(first, size)
            task.model.set_requires_gradient_sync(micro == count - 1)
            loss = task.loss(task.module, batch)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            total += loss.detach().float() / count
        return total

    def _exchange(self, loss: torch.Tensor, step: int) -> tuple[float, float, int, bool]:
        """Return mean loss, largest memory, stop and saved, over all ranks; see :class:`_Outcome`.

        Where replicas train apart, most exchanges are within a replica, which does not stop alone.
        """
        replicas = self._task.replicas
        group = None if replicas is None else replicas.group_after(step)
        size = dist.get_world_size(group)
        mine = torch.tensor(
            [
                *(loss.item(), devices.peak_memory(self._device) / 2**20),
                *(self._signals.noted, self._checkpoints.has_ended),
            ],
            dtype=torch.float64,
        )
        everyone = [torch.empty_like(mine) for _ in range(size)]
        with Peers(group).collective("the exchange of losses and signals"):
            dist.all_gather(everyone, mine, group=group)
        losses, memory, asked, ended = torch.stack(everyone, dim=1).tolist()
        # Summed in the order of ranks: the same bits on every rank, every time.
        stop = int(max(asked)) if group is None else 0
        return sum(losses) / size, max(memory), stop, all(ended)

    def _write(self, outcome: _Outcome) -> None:
        seconds = sum(self._durations) / len(self._durations)
        speed = self._per_step * self._task.units_per_example / seconds
        peak = self._task.peak_units_per_s
        metrics = StepMetrics(
            step=outcome.position.step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            units_per_s=speed,
            memory_mib=outcome.memory_mib,
            eta_s=self._left(outcome.position) * seconds,
            epoch=self._span.epoch(outcome.position),
            mfu=None if peak is None else speed / peak,
        )
        self._journal.step(metrics)
        self._display.step(metrics)

    def _evaluate_if_due(self, before: Position, position: Position) -> dict[str, float]:
        every = self._config.output.eval_every
        done, now = self._span.evaluation_count(before), self._span.evaluation_count(position)
        due = every and done // every < now // every
        return self._evaluate(position) if due else {}

    def _evaluate(self, position: Position) -> dict[str, float]:
        replicas = self._task.replicas
        with contextlib.nullcontext() if replicas is None else replicas.outer_parameters():
            values = self._task.evaluate()
        self._journal.evaluated(position.step, values)
        shown = " ".join(f"{name}={value:.4f}" for name, value in values.items())
        self._display.say(f"evaluation step={position.step} {shown}")
        return values

    def _save_if_due(self, position: Position, stop: int) -> None:
        every = self._config.output.checkpoint_every
        last = not self._left(position)
        if not (stop or last or (every and position.step % every == 0)):
            return
        self._wait_for_checkpoint()
        self._journal.saved()
        model, optimizer = self._task.module, self._task.optimizer
        if self._config.output.async_checkpoint and not (stop or last):
            self._checkpoints.begin(position, model, optimizer)
        else:
            self._checkpoints.save(position, model, optimizer)
            self._say_saved(position.step)

    def _wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if one is.

        Raises:
            SaveError: a rank could not write; every rank raises it.
        """
        step = self._checkpoints.wait()
        if step is not None:
            self._say_saved(step)

    def _say_saved(self, step: int) -> None:
        self._display.say(f"checkpoint step={step} {self._checkpoints.path(step)}")

    def _divergence(self, step: int, loss: float, norm: float) -> str:
        try:
            self._wait_for_checkpoint()
            saved = self._checkpoints.steps()
            since = f"step {saved[-1]} is saved" if saved else "nothing was saved before"
        except SaveError as error:
            since = str(error)
        return (
            f"step {step}: found loss {loss} and gradient norm {norm}, expected finite numbers; "
            f"{since}; try a lower --lr or a longer --warmup"
        )

    def _farewell(self, position: Position, stop: int) -> str:
        return (
            f"Stopped by {signal_name(stop)} after {self._span.shown(position)}, which is saved. "
            f"{self._how_to_resume}"
        )


def _item(norm: torch.Tensor) -> float:
    return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
