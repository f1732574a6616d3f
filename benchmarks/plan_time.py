"""Predicted seconds of a step, held against steps of real trainings on this machine.

    python benchmarks/plan_time.py --json found.json

Each case trains a Llama as ``shardwise train`` does: the same groups, precision, optimizer and
clipping. Cases differ in size, ranks, strategy, dtype, transport and link; those over two hosts run
in namespaces of this machine, whose link is shaped with ``tc`` (they need root, and are left out
without it). What is compared is the lower quartile of the steps: other programs only add to them.

How fast a virtual machine is changes with what its neighbors do. So each round calibrates as
``shardwise calibrate`` does and then takes the steps, and the error of a case is the median over
rounds. The calibration of the machine's user is neither read nor replaced.

``--clock processor`` is for a machine that others use, too: each rank has one thread, and its
processor time is compared with what is predicted of it, without waits and without turns. Cases over
two hosts, which wait for bytes, are left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from _hosts import HostsError, two_hosts
from _models import build
from _options import end, parser, positive_ints, run
from _plan_cases import Case
from _worlds import World
from shardwise.base.devices import keep_freed_memory
from shardwise.elastic.world import usable_cores
from shardwise.insight.planning.calibrate import Calibration
from shardwise.insight.planning.clock import StepTime, step_time
from shardwise.insight.planning.events import Log
from shardwise.insight.planning.models import of_module
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.insight.timeline.recorded import measure_machine
from shardwise.optim.norms import clip_grad_norm_

_PORT = 29500
PROCESSOR = "processor"  # time of it, in place of that on the wall
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

    def __init__(self, case: Case, clock: str) -> None:
        keep_freed_memory()
        settings = case.settings
        threads = usable_cores() // settings.mesh.size  # hosts share this machine
        torch.set_num_threads(1 if clock == PROCESSOR else max(1, threads))
        self._now = time.process_time if clock == PROCESSOR else time.perf_counter
        model = build(case.model, seed=0)
        case.shard(model, of_module(model))
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._tokens = torch.randint(model.config.vocab_size, (1, case.size), generator=generator)

    def steps(self, seconds: float) -> list[float]:
        """Take at least five timed steps, and as many as fit into so many seconds."""
        for _ in range(2):
            self._step()
        took: list[float] = []
        goes_on = True
        while goes_on:
            dist.barrier()
            begin = self._now()
            self._step()
            took.append(self._now() - begin)
            enough = torch.tensor(float(sum(took) < seconds or len(took) < 5))
            dist.all_reduce(enough, dist.ReduceOp.MAX)
            goes_on = bool(enough)
        return took

    def _step(self) -> None:
        loss = self._model(input_ids=self._tokens, labels=self._tokens).loss
        loss.backward()
        clip_grad_norm_(list(self._model.parameters()), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure(case: Case, seconds: float, port: int, clock: str) -> list[float]:
    """Return the seconds of each step: those of its slowest rank."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(case.gbit)) if case.gbit else ()
        env = {"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {}
        ranks = case.settings.mesh.size
        world = World(str(case), ranks, Worker, case, clock, hosts=hosts, port=port, env=env)
        by_rank = stack.enter_context(world).call("steps", seconds)
    return [max(step) for step in zip(*by_rank, strict=True)]


def predict(case: Case, log: Log, calibration: Calibration, clock: str) -> StepTime:
    """Time the rehearsal of a case."""
    settings = case.settings
    # Hosts are namespaces of this machine: their ranks share it.
    ranks = settings.mesh.size
    if clock == PROCESSOR:
        ranks = min(ranks, max(calibration.costs))  # more of them take turns
    machine = replace(calibration.machine(ranks, case.link), ranks_per_host=settings.on_host)
    found = step_time(log, machine, settings)
    return replace(found, seconds=found.seconds - found.exposed) if clock == PROCESSOR else found


def compared(
    seconds: float, rounds: int, cases: Sequence[Case], say: Callable[[str], None], clock: str
) -> list[_Found]:
    """Calibrate, take the steps of all cases and predict them, in rounds."""
    cases = [case for case in cases if clock != PROCESSOR or not case.gbit]
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
                steps = measure(case, seconds, _PORT + number, clock)
            except HostsError as error:
                print(f"left out: {case}: {error}")
                impossible.add(case)
                continue
            predicted = vars(predict(case, log, calibration, clock))
            values = {name: each for name, each in predicted.items() if name != "spans"}
            found[number]["rounds"].append({"steps": steps, "predicted": values})
    return [each for each in found if each["rounds"]]


def main() -> int:
    made = parser(__doc__, rounds=5)
    add = made.add_argument
    add("--seconds", type=float, default=2.0, help="of steps in each case (2)")
    add("--cases", type=positive_ints, default=[], help="numbers of cases from 1, with commas; all")
    add("--clock", choices=("wall", PROCESSOR), default="wall")
    options = made.parse_args()
    cases = [CASES[at - 1] for at in options.cases] or CASES
    if options.clock == PROCESSOR:
        os.environ["OMP_NUM_THREADS"] = "1"  # of calibrations, too
    settings = (options.seconds, options.rounds, cases)
    return run("plan_time", options, lambda say: compared(*settings, say, options.clock))


if __name__ == "__main__":
    end(main)
