"""Predicted memory of ranks, compared with what the kernel counts in real trainings here.

    python benchmarks/plan_memory.py --json found.json
    python benchmarks/plan_memory.py --model tiny --size 64 --mesh dp=2

Each case trains as ``shardwise train`` does: the same groups, precision, optimizer, clipping and
settings of malloc. What is compared is the proportional set size (PSS) of each rank at its peak,
sampled by the parent: a page that k ranks share counts 1/k in each. Shared memory that no rank maps
at the moment is taken all the same, and counts 1/k, too. Each case is trained three times, since
the heap of the same training differs from run to run, and the median of a rank counts.

What a rank takes above what it held before it had the model, after steps of a tiny one, is held
against its planned tensors: how many times as much in the median is the factor of plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from _memory import PssSampler, give_back, pss, pss_shared
from _options import end, parser, positive_int, run
from _plan_cases import Case, Training
from _report import Table, mib
from _worlds import World
from shardwise.base.devices import keep_freed_memory
from shardwise.insight.planning.memory import memory
from shardwise.insight.planning.rehearsal import rehearse

WARMUP = 4  # steps: shared memory may settle only after so many
STEPS = 3  # that are sampled
RUNS = 3  # of each case

CASES = (
    Case("34m", 256, "dp=1"),
    Case("34m", 256, "dp=2"),
    Case("34m", 256, "dp=2", transport="c10d"),
    Case("34m", 256, "dp=2", transport="collectives"),
    Case("34m", 512, "dp=2", dtype="bf16"),
    Case("34m", 512, "dp=2", dtype="bf16", transport="c10d"),
    Case("34m", 256, "dp=2", "grad-op"),
    Case("34m", 256, "dp=2", "no-shard"),
    Case("34m", 256, "dp=4"),
    Case("34m", 256, "dp_replicate=2,dp_shard=2", "hybrid", dtype="bf16"),
    Case("34m", 1024, "dp=2", checkpointing="full"),
    Case("34m", 1024, "dp=2", checkpointing="selective", dtype="bf16"),
    Case("34m", 256, "dp=2", accumulate=4),
    Case("150m", 256, "dp=2"),
    Case("150m", 256, "dp=2", dtype="bf16", transport="c10d"),
    Case("vit-small", 8, "dp=2"),
)


class Worker:
    """One rank."""

    def __init__(self, case: Case) -> None:
        keep_freed_memory()
        torch.manual_seed(dist.get_rank())
        tiny = "tiny" if case.is_text else "vit-tiny"
        small = Training(replace(case, model=tiny, size=32 if tiny == "tiny" else 1))
        for _ in range(2):
            small.step()
        del small
        give_back()
        dist.barrier()
        self._base = pss()
        dist.barrier()
        self._training = Training(case)
        self.steps(WARMUP)

    def base(self) -> int:
        """Return the PSS without the model, in bytes."""
        return self._base

    def steps(self, count: int) -> None:
        """Take steps."""
        for _ in range(count):
            self._training.step()


def measure(case: Case) -> list[dict[str, int]]:
    """Train; return each rank's bytes: PSS before it has a model, at the peak, and unmapped."""
    with World(str(case), case.settings.mesh.size, Worker, case, exec_each=True) as world:
        base = world.call("base")
        with PssSampler(world.pids) as sampler:
            world.call("steps", STEPS)
        beside = unmapped(world.pids) // len(world.pids)
        return [
            {"base": before, "peak": peak, "unmapped": beside}
            for before, peak in zip(base, sampler.peaks, strict=True)
        ]


def unmapped(pids: Sequence[int]) -> int:
    """Return the bytes of the ranks' shared memory that none of them maps now."""
    files = {}
    for pid in pids:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it has been closed
                if str(each.readlink()).startswith("/memfd:shardwise"):
                    found = each.stat()
                    files[found.st_ino] = found.st_blocks * 512
    return max(0, sum(files.values()) - sum(pss_shared(pid) for pid in pids))


def predict(case: Case) -> dict[str, Any]:
    """Plan a case; return the bytes of a rank at the peak of a step by kind."""
    log = rehearse(case.blueprint(), case.settings)
    values = asdict(memory(log))
    return {name: each for name, each in values.items() if isinstance(each, int | str)}


def compared(cases: Sequence[Case], runs: int = RUNS) -> Iterator[dict[str, Any]]:
    """Plan the cases, and measure each of them some times."""
    for case in cases:
        measured = [measure(case) for _ in range(runs)]
        yield {"case": asdict(case), "predicted": predict(case), "runs": measured}


def of_ranks(case: dict[str, Any]) -> list[tuple[float, float]]:
    """Return each rank's PSS before it has a model and at its peak, medians over runs, in bytes."""
    return [
        (
            median(each["base"] for each in runs),
            median(each["peak"] + each["unmapped"] for each in runs),
        )
        for runs in zip(*case["runs"], strict=True)
    ]


def tables(cases: Sequence[dict[str, Any]]) -> list[Table]:
    """Make a table with a row for each case: that of the rank that is furthest from its plan."""
    times = median(
        (measured - bare) / case["predicted"]["peak"]
        for case in cases
        for bare, measured in of_ranks(case)
    )
    columns = ["configuration", "mesh", "bare", "tensors", "predicted", "measured", "ratio"]
    shown = Table("PSS of a rank at its peak, MiB", columns)
    off = []
    for case in cases:
        tensors = case["predicted"]["peak"]
        bare, measured = max(
            of_ranks(case), key=lambda rank: abs((rank[0] + times * tensors) / rank[1] - 1)
        )
        total = bare + times * tensors
        off.append(abs(total / measured - 1))
        trained = Case(**case["case"])
        sizes = [mib(each, 0) for each in (bare, tensors, total, measured)]
        shown.rows.append([str(trained), trained.mesh, *sizes, f"{total / measured:.3f}"])
    shown.notes += [
        f"A rank takes {times:.2f} x its tensors in the median.",
        f"With that, {sum(each <= 0.05 for each in off)} of {len(off)} are within 5 %, "
        f"{100 * median(off):.1f} % off in the median, {100 * max(off):.1f} % at most.",
    ]
    return [shown]


def main() -> int:
    made = parser(__doc__, cases=None)
    add = made.add_argument
    add("--model", help="a case of your own: a preset")
    add("--size", type=positive_int, default=256, help="its tokens, or images")
    add("--mesh", default="dp=2", help="its ranks")
    add("--transport", default="shm", help="its transport")
    add("--runs", type=positive_int, default=RUNS, help="how often each case is trained")
    options = made.parse_args()
    if not Path("/proc/self/smaps_rollup").exists():
        made.error("this needs Linux, whose kernel counts proportional set sizes")
    cases = [CASES[at - 1] for at in options.cases or ()] or list(CASES)
    if options.model is not None:
        cases = [Case(options.model, options.size, options.mesh, transport=options.transport)]
    return run("plan_memory", options, lambda say: compared(cases, options.runs), tables)


if __name__ == "__main__":
    end(main)
