"""Contenders that take turns: in every round, each of them takes a few steps while others sleep.

Each contender has processes of its own. Those that fit beside each other stay in memory; others
start anew for each of their turns. The order changes from round to round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from _contenders import CONTENDERS, Case, Contender
from _models import BATCHES, PRESETS, batches
from _worlds import TICKS, World, WorldError


def in_turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield who is next, with the number of the round; who begins changes from round to round."""
    for index in range(rounds):
        shift = index % len(names)
        for name in (*names[shift:], *names[:shift]):
            yield index, name


@dataclass(frozen=True)
class Step:
    """One step of one rank.

    Attributes:
        seconds: from a barrier until the optimizer is done.
        forward: seconds of it in forward.
        backward: seconds of it in backward.
        optimizer: seconds of it in the optimizer.
        cpu: processor seconds of this process, with the threads of its process group.
        host: seconds until the host had launched the whole step; on a CPU, that is the step.
        loss: of this rank's batch, before the step.
    """

    seconds: float
    forward: float
    backward: float
    optimizer: float
    cpu: float
    host: float
    loss: float


class StepWorker:
    """One rank of a contender, taking steps on demand."""

    contenders: ClassVar[Mapping[str, type[Contender]]] = CONTENDERS

    def __init__(self, name: str, case: Case) -> None:
        self._contender = self.contenders[name](case)
        drawn = batches(case.params, case.tokens, dist.get_rank(), case.seed)
        self._batches = [batch.to(case.device) for batch in drawn]
        self._cuda = case.device == "cuda"
        self._taken = 0

    def steps(self, count: int) -> list[Step]:
        """Take some steps."""
        return [self._step() for _ in range(count)]

    def memory(self) -> dict[str, int]:
        """Return the bytes allocated and reserved at the peak since the last call, and now.

        On a CPU nobody counts them.
        """
        if not self._cuda:
            return {}
        torch.cuda.synchronize()
        found = {
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "at_rest": torch.cuda.memory_allocated(),
        }
        torch.cuda.reset_peak_memory_stats()
        return found

    def _step(self) -> Step:
        batch = self._batches[self._taken % BATCHES]
        self._taken += 1
        dist.barrier()
        self._synchronize()
        cpu, start = time.process_time(), time.perf_counter()
        loss = self._contender.forward(batch)
        forward = time.perf_counter()
        self._contender.backward(loss)
        backward = time.perf_counter()
        self._contender.update()
        host = time.perf_counter()
        self._synchronize()
        end = time.perf_counter()
        return Step(
            seconds=end - start,
            forward=forward - start,
            backward=backward - forward,
            optimizer=end - backward,
            cpu=time.process_time() - cpu,
            host=host - start,
            loss=loss.item(),
        )

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def transposed(by_rank: list[list[Step]]) -> list[list[dict[str, float]]]:
    """Turn steps of ranks into ranks of steps, as plain data."""
    return [[asdict(step) for step in ranks] for ranks in zip(*by_rank, strict=True)]


@dataclass(frozen=True)
class Pace:
    """How much is measured.

    Attributes:
        rounds: turns of every contender.
        steps: in a turn.
        warmup: steps before a process is measured.
    """

    rounds: int
    steps: int
    warmup: int


class Turns:
    """All contenders of one case, taking turns.

    Args:
        case: what they train.
        names: of the contenders.
        pace: how much is measured.
        is_resident: whether all stay in memory.
        env: of a contender's processes, by its name.
        backend: of the process group; by default gloo on CPUs, NCCL on GPUs.
        timeout: seconds that ranks have to answer.
        deadline: no turn begins after it, as ``time.monotonic()`` counts.
        say: tells people whose turn it is.
    """

    def __init__(
        self,
        case: Case,
        names: list[str],
        pace: Pace,
        *,
        is_resident: bool,
        env: Callable[[str], dict[str, str]] = lambda name: {},
        backend: str | None = None,
        timeout: float = 600,
        deadline: float = math.inf,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.case, self.names, self.pace, self._say = case, names, pace, say
        self._is_resident, self._env, self._deadline = is_resident, env, deadline
        self.backend, self._timeout = backend, timeout
        self.worlds: dict[str, World] = {}
        self._idle_cpu = 0.0

    def play(self) -> dict[str, Any]:
        """Run all rounds and return the raw numbers of the case."""
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names}
        with ExitStack() as open_worlds:
            for index, name in in_turns(self.names, self.pace.rounds):
                if index and time.monotonic() > self._deadline:
                    break
                if name in turns:
                    self._say(f"round {index + 1} of {self.pace.rounds}: {name}")
                    try:
                        turns[name].append(self._try(name, open_worlds))
                    except WorldError as error:
                        self.fail(name, error)
                        del turns[name]
            self.end()
        # A round counts if every contender has taken its turn.
        rounds = min(map(len, turns.values()), default=0)
        return {
            **asdict(self.case),
            "numel": PRESETS[self.case.params].numel,
            "worlds": "resident" if self._is_resident else "fresh",
            "idle_cpu_seconds": self._idle_cpu,
            "contenders": {name: found[:rounds] for name, found in turns.items()},
        }

    def start(self, name: str) -> World:
        """Start the processes of a contender."""
        return World(
            *(name, self.case.ranks, StepWorker, name, self.case),
            device=self.case.device,
            env=self._env(name),
            backend=self.backend,
            timeout=self._timeout,
        )

    def fail(self, name: str, error: WorldError) -> None:
        """Take note of a contender that failed, or raise its error."""
        raise error

    def turn(self, name: str, world: World, warmup: int) -> dict[str, Any]:
        """Let one contender take its steps of a round."""
        warm = world.call("steps", warmup)
        world.call("memory")  # forget the peak of warming up
        others = [each for each in self.worlds.values() if each is not world]
        idle = sum(each.cpu_seconds() for each in others)
        busy, own = _machine_busy(), world.cpu_seconds()
        steps = world.call("steps", self.pace.steps)
        busy, own = _machine_busy() - busy, world.cpu_seconds() - own
        self._idle_cpu += sum(each.cpu_seconds() for each in others) - idle
        return {
            "warmup": transposed(warm),
            "steps": transposed(steps),
            "memory": world.call("memory"),
            "foreign_cpu_seconds": max(busy - own, 0.0),
        }

    def end(self) -> None:
        """Measure what is left, once all rounds are over."""

    def _try(self, name: str, open_worlds: ExitStack) -> dict[str, Any]:
        world = self.worlds.get(name)
        warmup = 0 if world is not None else self.pace.warmup
        if world is None:
            world = open_worlds.enter_context(self.start(name))
            if self._is_resident:
                self.worlds[name] = world
        found = self.turn(name, world, warmup)
        if not self._is_resident:
            world.close()
        return found


def _machine_busy() -> float:
    """Return the processor seconds that everybody on this machine has taken."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / TICKS
