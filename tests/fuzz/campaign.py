"""Many programs on several worlds of ranks at once, and what became of them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from tests.fuzz.pool import Pool
from tests.fuzz.program import Program, essentials, features, taken_by_torch
from tests.fuzz.runtimes import TRANSPORTS
from tests.fuzz.shrink import shrink
from tests.fuzz.verdict import AS_TORCH, Verdict, how_torch_ran, judge
from tests.fuzz.worker import Unit

_BATCH = 8


@dataclasses.dataclass(frozen=True)
class Judged:
    """A program, and the verdict on each transport; ``seconds`` are of processors, of all ranks."""

    program: Program
    torch: str
    verdicts: dict[str, Verdict]
    seconds: float = 0.0
    torch_error: str = ""

    @property
    def finds(self) -> dict[str, Verdict]:
        """The verdicts that say that something is wrong."""
        return {name: verdict for name, verdict in self.verdicts.items() if verdict.is_find}


@dataclasses.dataclass
class Tally:
    """Counts over a campaign."""

    seconds: float = 0.0
    processor_seconds: float = 0.0
    programs: int = 0
    features: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    raised: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    raised_by_torch: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    as_torch: list[Program] = dataclasses.field(default_factory=list)
    finds: list[Judged] = dataclasses.field(default_factory=list)

    def add(self, judged: Judged) -> None:
        self.programs += 1
        self.processor_seconds += judged.seconds
        self.features.update(features(judged.program))
        for name, verdict in judged.verdicts.items():
            self.kinds[f"{name}: {verdict.kind}"] += 1
            if verdict.kind.startswith("raises"):
                self.raised[_brief(verdict.detail.partition("raised at ")[2])] += 1
            if verdict.kind.startswith(AS_TORCH):
                self.as_torch.append(judged.program)
        if judged.torch_error:
            self.raised_by_torch[_brief(judged.torch_error)] += 1
        if judged.finds:
            self.finds.append(judged)


def _brief(error: str) -> str:
    """Cut an error to what it has in common with others: without the step, and numbers."""
    first = (error.splitlines() or [""])[0].partition(": ")[2]
    return "".join("#" if each.isdigit() else each for each in first[:110])


def run_all(
    pool: Pool, programs: Sequence[Program], transports: Sequence[str] = TRANSPORTS
) -> list[Judged]:
    """Run programs in one world, and judge them.

    Where ours differs and torch refuses, a program like it that torch takes is asked instead.
    """
    judged = _run_all(pool, programs, transports)
    doubtful = {
        at: taken_by_torch(each.program)
        for at, each in enumerate(judged)
        if each.torch in ("raises", "dies")
        and any(verdict.kind.startswith("differs") for verdict in each.finds.values())
    }
    doubtful = {at: each for at, each in doubtful.items() if each != judged[at].program}
    others = _run_all(pool, list(doubtful.values()), transports)
    for at, other in zip(doubtful, others, strict=True):
        judged[at] = _judge_by_another(judged[at], other)
    return judged


def _judge_by_another(judged: Judged, other: Judged) -> Judged:
    verdicts = dict(judged.verdicts)
    for name, verdict in other.verdicts.items():
        if verdict.kind == AS_TORCH and verdicts[name].kind.startswith("differs"):
            verdicts[name] = Verdict(f"{AS_TORCH} in a program that it takes")
    return dataclasses.replace(judged, verdicts=verdicts, seconds=judged.seconds + other.seconds)


def _run_all(pool: Pool, programs: Sequence[Program], transports: Sequence[str]) -> list[Judged]:
    units = []
    for index, program in enumerate(programs):
        served = _serving(program, transports)
        # Where ranks part, torch waits until time is up, which says nothing.
        names = served if program.parts_ranks else ["torch", *served]
        units += [Unit(index, program, name) for name in names]
    results = pool.run(units)
    judged = []
    for index, program in enumerate(programs):
        torchs = results.get((index, "torch"))
        verdicts = {
            name: judge(program, results[index, name], torchs)
            for name in _serving(program, transports)
        }
        ran = [results.get((index, name), {}) for name in ("torch", *transports)]
        seconds = sum(report.seconds for reports in ran for report in reports.values())
        error = next((each.raised for each in (torchs or {}).values() if each.raised), "")
        judged.append(Judged(program, how_torch_ran(torchs), verdicts, seconds, error))
    return judged


def _serving(program: Program, transports: Sequence[str]) -> list[str]:
    """The transports that promise something for a program.

    Ranks that part exchange by bare collectives what does not belong together, or end each other:
    docs/torch-compatibility.md says so.
    """
    return [name for name in transports if not (program.parts_ranks and name == "collectives")]


def run_campaign(
    programs: Iterable[Program],
    world: int,
    transports: Sequence[str],
    pools: int,
    sabotage: str = "",
    device: str = "cpu",
    hosts: int = 1,
    note_starts: Callable[[int], object] = lambda starts: None,
) -> Iterator[Judged]:
    """Run programs in so many worlds at once; yield what came of them as it comes."""
    batches: queue.Queue[list[Program] | None] = queue.Queue(maxsize=2 * pools)
    results: queue.Queue[list[Judged] | BaseException | None] = queue.Queue()
    stop = threading.Event()

    def serve() -> None:
        try:
            with Pool(world, sabotage, device=device, hosts=hosts) as pool:
                while (batch := batches.get()) is not None and not stop.is_set():
                    results.put(run_all(pool, batch, transports))
                note_starts(pool.starts)
        except BaseException as error:
            results.put(error)
        finally:
            results.put(None)

    def feed() -> None:
        source = iter(programs)
        while not stop.is_set() and (batch := list(itertools.islice(source, _BATCH))):
            batches.put(batch)
        for _ in range(pools):
            batches.put(None)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(pools)]
    threads.append(threading.Thread(target=feed, daemon=True))
    for thread in threads:
        thread.start()
    running = pools
    try:
        while running:
            result = results.get()
            if result is None:
                running -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                yield from result
    finally:
        stop.set()


def tally(programs: Iterable[Judged], note: Callable[[Tally, Judged], object]) -> Tally:
    """Count what came of programs; tell ``note`` of each as it comes."""
    counted = Tally()
    began = time.monotonic()
    for judged in programs:
        counted.add(judged)
        counted.seconds = time.monotonic() - began
        note(counted, judged)
    return counted


def smallest(pool: Pool, judged: Judged) -> Judged:
    """Shrink a find: to a program with the same verdict on the same transport."""
    transport, verdict = next(iter(judged.finds.items()))
    word = verdict.kind.split(" (")[0]

    def shows(programs: list[Program]) -> list[bool]:
        return [_says(each, transport, word) for each in run_all(pool, programs, [transport])]

    program = shrink(judged.program, shows)
    return run_all(pool, [program])[0]


def _says(judged: Judged, transport: str, word: str) -> bool:
    verdict = judged.verdicts[transport]
    return verdict.is_find and verdict.kind.split(" (")[0] == word


def distinct(finds: Sequence[Judged], known: Sequence[Program]) -> Iterator[Judged]:
    """The finds that hold more than one of those that are ``known``."""
    for find in finds:
        if not any(essentials(each) <= essentials(find.program) for each in known):
            yield find
