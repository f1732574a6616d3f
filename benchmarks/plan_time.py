"""Predicted seconds of a step, held against steps of real trainings on this machine.

    python benchmarks/plan_time.py --json found.json

Each case trains a Llama as ``shardwise train`` does: the same groups, precision, optimizer and
clipping. Cases differ in size, ranks, strategy, dtype, transport and link; those over two hosts run
in namespaces of this machine, whose link is shaped with ``tc`` (they need root, and are left out
without it). What is compared is the lower quartile of the steps: other programs only add to them.

How fast a virtual machine is changes with what its neighbors do. So each round calibrates as
``shardwise calibrate`` does and then takes the steps, and the error of a case is the median over
rounds. The calibration of the machine's user is neither read nor replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from _hosts import HostsError, two_hosts
from _options import end, parser, run
from _plan_cases import Case, Training
from _report import Table
from _worlds import World
from shardwise.base.devices import keep_freed_memory
from shardwise.base.spans import StepTime
from shardwise.elastic.world import usable_cores
from shardwise.insight.planning.calibrate import Calibration
from shardwise.insight.planning.clock import step_time
from shardwise.insight.planning.events import Log
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.timeline.recorded import measure_machine

_PORT = 29500
_Found = dict[str, Any]
CASES = (
    Case("5m", 512, "dp=1", transport="auto"),
    Case("34m", 256, "dp=1", transport="auto"),
    Case("34m", 256, "dp=1", dtype="bf16", transport="auto"),
    Case("5m", 512, "dp=2", transport="auto"),
    Case("34m", 256, "dp=2", transport="auto"),
    Case("34m", 512, "dp=2", dtype="bf16", transport="auto"),
    Case("34m", 256, "dp=2", "grad-op", transport="auto"),
    Case("34m", 256, "dp=2", "no-shard", dtype="bf16", transport="auto"),
    Case("34m", 256, "dp=2", transport="c10d"),
    Case("34m", 512, "dp=2", dtype="bf16", transport="c10d"),
    Case("10m", 256, "dp=4", transport="auto"),
    Case("10m", 256, "dp_replicate=2,dp_shard=2", "hybrid", dtype="bf16", transport="auto"),
    Case("34m", 256, "dp=2", gbit=10, transport="auto"),
    Case("34m", 512, "dp=2", dtype="bf16", gbit=1, transport="auto"),
    Case("10m", 512, "dp=2", "no-shard", gbit=1, transport="auto"),
)


class Worker:
    """One rank of a training."""

    def __init__(self, case: Case) -> None:
        keep_freed_memory()
        threads = usable_cores() // case.settings.mesh.size  # hosts share this machine
        torch.set_num_threads(max(1, threads))
        self._training = Training(case)

    def steps(self, seconds: float) -> list[float]:
        """Take at least five timed steps, and as many as fit into so many seconds."""
        for _ in range(2):
            self._training.step()
        took: list[float] = []
        goes_on = torch.ones(())
        while goes_on:
            dist.barrier()
            begin = time.perf_counter()
            self._training.step()
            took.append(time.perf_counter() - begin)
            goes_on.fill_(sum(took) < seconds or len(took) < 5)
            dist.all_reduce(goes_on, dist.ReduceOp.MAX)
        return took


def measure(case: Case, seconds: float, port: int) -> list[float]:
    """Return the seconds of each step: those of its slowest rank."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(case.gbit)) if case.gbit else ()
        env = {"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {}
        ranks = case.settings.mesh.size
        world = World(str(case), ranks, Worker, case, hosts=hosts, port=port, env=env)
        by_rank = stack.enter_context(world).call("steps", seconds)
    return [max(step) for step in zip(*by_rank, strict=True)]


def predict(case: Case, log: Log, calibration: Calibration) -> StepTime:
    """Time the rehearsal of a case."""
    settings = case.settings
    # Hosts are namespaces of this machine: their ranks share it.
    machine = calibration.machine(settings.mesh.size, case.link)
    return step_time(log, replace(machine, ranks_per_host=settings.on_host), settings)


def compared(
    seconds: float, rounds: int, cases: Sequence[Case], say: Callable[[str], None]
) -> list[_Found]:
    """Calibrate, take the steps of all cases and predict them, in rounds."""
    logs = [rehearse(case.blueprint(), case.settings) for case in cases]
    found: list[_Found] = [{"case": asdict(case), "rounds": []} for case in cases]
    impossible: set[Case] = set()
    for at in range(rounds):
        say(f"round {at + 1} of {rounds}")
        calibration = measure_machine()
        for number, (case, log) in enumerate(zip(cases, logs, strict=True)):
            if case in impossible:
                continue
            try:
                steps = measure(case, seconds, _PORT + number)
            except HostsError as error:
                print(f"left out: {case}: {error}")
                impossible.add(case)
                continue
            predicted = {**vars(predict(case, log, calibration))}
            del predicted["spans"]
            found[number]["rounds"].append({"steps": steps, "predicted": predicted})
    return [each for each in found if each["rounds"]]


def tables(cases: Sequence[_Found]) -> list[Table]:
    """Make a table with a row for each case."""
    columns = ["case", "ranks", "measured", "predicted", "error", "of rounds", "bound by"]
    shown = Table("Seconds of a step", columns)
    off = []
    for case in cases:
        rounds, trained = case["rounds"], Case(**case["case"])
        # Other programs only add to a step.
        real = [quantiles(each["steps"], n=4)[0] for each in rounds]
        planned = [each["predicted"]["seconds"] for each in rounds]
        errors = [100 * (p / r - 1) for p, r in zip(planned, real, strict=True)]
        off.append(abs(median(errors)))
        shown.rows.append(
            [
                *(str(trained), trained.mesh),
                *(f"{1e3 * median(seconds):,.0f} ms" for seconds in (real, planned)),
                f"{median(errors):+.1f} %",
                f"{min(errors):+.1f} to {max(errors):+.1f} %",
                rounds[0]["predicted"]["bound_by"],
            ]
        )
    shown.notes.append(f"Error: {median(off):.1f} % in the median, {max(off):.1f} % at most.")
    return [shown]


def main() -> int:
    made = parser(__doc__, rounds=5, cases=None)
    made.add_argument("--seconds", type=float, default=2.0, help="of steps in each case (2)")
    options = made.parse_args()
    cases = [CASES[at - 1] for at in options.cases or ()] or CASES
    settings = (options.seconds, options.rounds, cases)
    return run("plan_time", options, lambda say: compared(*settings, say), tables)


if __name__ == "__main__":
    end(main)
