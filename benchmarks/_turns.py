"""Contenders that take turns: in every round, each of them does its work while others sleep.

Each contender has processes of its own. Those that fit beside each other stay in memory; others
start anew for each of their turns. The order changes from round to round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from _contenders import CONTENDERS, Case, Contender
from _models import BATCHES, batches
from _worlds import TICKS, World, WorldError
from shardwise.base.devices import synchronize

Content = dict[str, Any]
#: What a contender does in a round, with its world, and whether that has just begun.
Turn = Callable[[str, World, bool], Any]


def in_turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield who is next, with the number of the round; who begins changes from round to round."""
    names = list(names)
    for index in range(rounds):
        shift = index % len(names)
        for name in (*names[shift:], *names[:shift]):
            yield index, name


class Turns(ExitStack):
    """The worlds of all contenders, in rounds, while the context is open.

    Args:
        names: of the contenders.
        start: makes the processes of a contender.
        is_resident: whether all stay in memory.
        deadline: no round but the first begins after it, as ``time.monotonic()`` counts.
        failed: where contenders are noted that fail, which take no other turn; by default, the
            first error is raised.
        say: tells people whose turn it is.

    Attributes:
        worlds: those that are in memory, by contender.
    """

    def __init__(
        self,
        names: Iterable[str],
        start: Callable[[str], World],
        *,
        is_resident: bool = True,
        deadline: float = math.inf,
        failed: dict[str, str] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__()
        self._names, self._start, self._say = list(names), start, say
        self._is_resident, self._deadline, self._failed = is_resident, deadline, failed
        self.worlds: dict[str, World] = {}

    def play(self, rounds: int, turn: Turn) -> dict[str, list[Any]]:
        """Let all contenders take turns.

        Args:
            rounds: how many.
            turn: what each contender does in one.

        Returns:
            What the turns of each contender returned, of rounds in which each has had its own.

        Raises:
            WorldError: a contender failed and is not to be noted, or all of them failed.
        """
        found: dict[str, list[Any]] = {name: [] for name in self._names}
        for index, name in in_turns(self._names, rounds):
            if index and time.monotonic() > self._deadline:
                break
            if name in found:
                self._say(f"round {index + 1} of {rounds}: {name}")
                try:
                    found[name].append(self._take(name, turn))
                except WorldError as error:
                    if self._failed is None:
                        raise
                    self._failed[name] = str(error)
                    del found[name]
        if not found:
            raise WorldError("\n".join((self._failed or {}).values()))
        least = min(map(len, found.values()))
        return {name: turns[:least] for name, turns in found.items()}

    def _take(self, name: str, turn: Turn) -> Any:
        if name in self.worlds:
            return turn(name, self.worlds[name], False)
        if not self._is_resident:
            with self._start(name) as world:
                return turn(name, world, True)
        self.worlds[name] = self.enter_context(self._start(name))
        return turn(name, self.worlds[name], True)


class StepWorker:
    """One rank of a contender, taking steps on demand."""

    contenders: ClassVar[Mapping[str, type[Contender]]] = CONTENDERS

    def __init__(self, name: str, case: Case) -> None:
        self._contender = self.contenders[name](case)
        drawn = batches(case.params, case.tokens, dist.get_rank(), case.seed)
        self._batches = [batch.to(case.device) for batch in drawn]
        self._device = torch.device(case.device)
        self._cuda = case.device == "cuda"
        self._taken = 0

    def steps(self, count: int) -> list[dict[str, float]]:
        """Take some steps.

        Returns:
            Of each, the seconds from a barrier until the optimizer is done, what of them each part
            takes, those until the host has launched all of it, processor seconds of this process
            with the threads of its process group, and the loss of its batch.
        """
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

    def _next(self) -> torch.Tensor:
        self._taken += 1
        return self._batches[(self._taken - 1) % BATCHES]

    def _step(self) -> dict[str, float]:
        batch = self._next()
        dist.barrier()
        synchronize(self._device)
        cpu, start = time.process_time(), time.perf_counter()
        loss = self._contender.forward(batch)
        forward = time.perf_counter()
        self._contender.backward(loss)
        backward = time.perf_counter()
        self._contender.update()
        host = time.perf_counter()
        synchronize(self._device)
        end = time.perf_counter()
        return {
            "seconds": end - start,
            "forward": forward - start,
            "backward": backward - forward,
            "optimizer": end - backward,
            "cpu": time.process_time() - cpu,
            "host": host - start,
            "loss": loss.item(),
        }


def transposed(by_rank: Iterable[Iterable[Any]]) -> list[list[Any]]:
    """Turn steps of ranks into ranks of steps."""
    return [list(step) for step in zip(*by_rank, strict=True)]


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


def play_steps(
    case: Case,
    names: Sequence[str],
    pace: Pace,
    *,
    is_resident: bool,
    env: Callable[[str], dict[str, str]] = lambda name: {},
    backend: str | None = None,
    timeout: float = 600,
    deadline: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Let contenders take steps of a training in turn.

    Args:
        case: what they train.
        names: of the contenders.
        pace: how much is measured.
        is_resident: whether all stay in memory.
        env: of a contender's processes, by its name.
        backend: of the process group; by default gloo on CPUs, NCCL on GPUs.
        timeout: seconds that ranks have to answer.
        deadline: no round but the first begins after it, as ``time.monotonic()`` counts.
        say: tells people whose turn it is.

    Returns:
        The raw numbers of the case. Contenders that failed are in its ``errors``.
    """
    idle_cpu = 0.0
    errors: dict[str, str] = {}

    def start(name: str) -> World:
        where = {"device": case.device, "backend": backend, "timeout": timeout}
        return World(name, case.ranks, StepWorker, name, case, env=env(name), **where)  # type: ignore[arg-type]

    def turn(name: str, world: World, is_new: bool) -> dict[str, Any]:
        nonlocal idle_cpu
        warm = world.call("steps", pace.warmup if is_new else 0)
        world.call("memory")  # forget the peak of warming up
        others = [each for each in turns.worlds.values() if each is not world]
        idle = sum(each.cpu_seconds() for each in others)
        busy, own = _machine_busy(), world.cpu_seconds()
        steps = world.call("steps", pace.steps)
        busy, own = _machine_busy() - busy, world.cpu_seconds() - own
        idle_cpu += sum(each.cpu_seconds() for each in others) - idle
        return {
            "warmup": transposed(warm),
            "steps": transposed(steps),
            "memory": world.call("memory"),
            "foreign_cpu_seconds": max(busy - own, 0.0),
        }

    with Turns(
        *(names, start), is_resident=is_resident, deadline=deadline, failed=errors, say=say
    ) as turns:
        found = turns.play(pace.rounds, turn)
    return {
        **case.facts(),
        "worlds": "resident" if is_resident else "fresh",
        "idle_cpu_seconds": idle_cpu,
        "contenders": found,
        "errors": errors,
    }


def _machine_busy() -> float:
    """Return the processor seconds that everybody on this machine has taken."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / TICKS


def slowest(ranks: Sequence[Mapping[str, float]], what: str) -> float:
    """Return the most of any rank."""
    return max(rank[what] for rank in ranks)


def losses(case: Content, name: str) -> list[float]:
    """List a contender's losses, the mean over ranks, of all its steps from its first."""
    turns = case["contenders"][name]
    return mean_losses([step for turn in turns for step in turn["warmup"] + turn["steps"]])


def mean_losses(steps: list[list[dict[str, float]]]) -> list[float]:
    """Return the mean loss over the ranks of each step."""
    return [fmean(rank["loss"] for rank in step) for step in steps]


def disagreement(
    case: Content, contenders: Mapping[str, type[Contender]] = CONTENDERS
) -> str | None:
    """Compare the losses of the contenders.

    Those that exchange gradients must agree to four decimals at every step, or as closely as they
    say themselves. The floor exchanges none, so that only its very first loss is comparable.

    Args:
        case: of a document.
        contenders: what its names stand for.

    Returns:
        What differs, for people, or ``None``.
    """
    names = list(case["contenders"])
    reference = min(names, key=lambda name: (not contenders[name].exchanges, name != "fsdp2"))
    expected = losses(case, reference)
    found = []
    for name in names:
        own = losses(case, name)
        comparable = len(own) if contenders[name].exchanges else 1
        for step, (mine, theirs) in enumerate(zip(own[:comparable], expected, strict=False)):
            if not abs(mine - theirs) < contenders[name].tolerance:  # NaN differs
                found.append(
                    f"{name} differs from {reference} first at step {step}: {mine:.6f}, not "
                    f"{theirs:.6f}"
                )
                break
    return "; ".join(found) or None


def step_seconds(case: Content, name: str) -> list[float]:
    """Return a contender's step time in each round: the median step, by its slowest rank."""
    return [
        median(slowest(step, "seconds") for step in turn["steps"])
        for turn in case["contenders"][name]
    ]


def verdict(case: Content, contenders: Mapping[str, type[Contender]] = CONTENDERS) -> str:
    """Tell whether the losses of contenders agree."""
    wrong = disagreement(case, contenders)
    return f"losses: {'DIFFERENT: ' + wrong if wrong else 'OK, equal to four decimals'}"
