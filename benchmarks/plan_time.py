"""Predicted seconds of a step, held against steps of real trainings on this machine.

    python benchmarks/plan_time.py --json found.json
    python benchmarks/plan_time.py --stored found.json --markdown

Each case trains a Llama as ``shardwise train`` does: the same groups, precision, optimizer and
clipping. Cases differ in size, ranks, strategy, dtype, transport and link; those over two hosts run
in namespaces of this machine, whose link is shaped with ``tc`` (they need root, and are left out
without it). What is compared is the lower quartile of the steps: other programs only add to them.

How fast a virtual machine is changes with what its neighbors do. So each round calibrates as
``shardwise calibrate`` does and then takes the steps, and the error of a case is the median over
rounds. The calibration of the machine's user is neither read nor replaced.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from _hosts import HostsError, two_hosts
from _models import build
from _report import Table, document, machine_line, save
from _worlds import World, stop_server
from shardwise.devices import keep_freed_memory
from shardwise.frontends.blocks import shard_blocks
from shardwise.frontends.strategies import Strategy, WantedMesh
from shardwise.planning.calibrate import Calibration, cores, measure_machine
from shardwise.planning.clock import StepTime, step_time
from shardwise.planning.models import of_module
from shardwise.planning.rehearsal import rehearse
from shardwise.planning.settings import Settings
from shardwise.sharding.grad import clip_grad_norm_

_PORT = 29500
_Found = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: a preset of ``_models.py``.
        tokens: of a rank and step, in one sequence.
        mesh: of ranks.
        strategy: by name.
        dtype: of forward and backward.
        transport: as for ``fully_shard``.
        gbit: speed of the link between two hosts; 0: all ranks are on one.
    """

    model: str
    tokens: int
    mesh: str
    strategy: str = "full"
    dtype: str = "fp32"
    transport: str = "auto"
    gbit: float = 0.0

    @property
    def settings(self) -> Settings:
        """What to plan for."""
        mesh = WantedMesh.parse(self.mesh)
        return Settings(
            mesh=mesh,
            strategy=Strategy(self.strategy),
            batch_size=1,
            seq_length=self.tokens,
            param_dtype=None if self.dtype == "fp32" else self.dtype,
            transport=self.transport,
            ranks_per_host=mesh.size // (2 if self.gbit else 1),
        )

    @property
    def link(self) -> str | None:
        """The link between hosts, by name."""
        return f"ethernet-{self.gbit:g}" if self.gbit else None


CASES = (
    Case("5m", 512, "dp=1"),
    Case("34m", 256, "dp=1"),
    Case("34m", 256, "dp=1", dtype="bf16"),
    Case("5m", 512, "dp=2"),
    Case("34m", 256, "dp=2"),
    Case("34m", 512, "dp=2", dtype="bf16"),
    Case("34m", 256, "dp=2", "grad-op"),
    Case("34m", 256, "dp=2", "no-shard", dtype="bf16"),
    Case("34m", 256, "dp=2", transport="c10d"),
    Case("34m", 512, "dp=2", dtype="bf16", transport="c10d"),
    Case("10m", 256, "dp=4"),
    Case("10m", 256, "dp_replicate=2,dp_shard=2", "hybrid", dtype="bf16"),
    Case("34m", 256, "dp=2", gbit=10),
    Case("34m", 512, "dp=2", dtype="bf16", gbit=1),
    Case("10m", 512, "dp=2", "no-shard", gbit=1),
)


class Worker:
    """One rank of a training."""

    def __init__(self, case: Case) -> None:
        keep_freed_memory()
        settings = case.settings
        torch.set_num_threads(max(1, cores() // settings.mesh.size))  # hosts share this machine
        model = build(case.model, seed=0)
        plan = settings.sharding
        mesh = init_device_mesh("cpu", plan.shape, mesh_dim_names=plan.names)
        dtype = None if case.dtype == "fp32" else torch.bfloat16
        shard_blocks(
            model,
            list(model.model.layers),
            mesh=plan.sharding_mesh(mesh),
            reshard_after_forward=plan.reshard_after_forward,
            precision=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            transport=case.transport,
        )
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._tokens = torch.randint(model.config.vocab_size, (1, case.tokens), generator=generator)

    def steps(self, seconds: float) -> list[float]:
        """Take at least five timed steps, and as many as fit into so many seconds."""
        for _ in range(2):
            self._step()
        took: list[float] = []
        goes_on = True
        while goes_on:
            dist.barrier()
            begin = time.perf_counter()
            self._step()
            took.append(time.perf_counter() - begin)
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


def measure(case: Case, seconds: float, port: int) -> list[float]:
    """Return the seconds of each step: those of its slowest rank."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(case.gbit)) if case.gbit else ()
        env = {"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {}
        ranks = case.settings.mesh.size
        world = World(str(case), ranks, Worker, case, hosts=hosts, port=port, env=env)
        by_rank = stack.enter_context(world).call("steps", seconds)
    return [max(step) for step in zip(*by_rank, strict=True)]


def predict(case: Case, calibration: Calibration) -> StepTime:
    """Rehearse a case, and time it."""
    settings = case.settings
    log = rehearse(of_module(build(case.model, 0, "meta")), settings)
    # Hosts are namespaces of this machine: their ranks share it.
    machine = replace(
        calibration.machine(settings.mesh.size, case.link), ranks_per_host=settings.on_host
    )
    return step_time(log, machine, settings)


def run(seconds: float, rounds: int, names: list[int], console: Console) -> Iterator[_Found]:
    """Calibrate, measure the cases and predict them, in rounds."""
    leave_out: set[int] = set()
    found: dict[int, _Found] = {}
    for at in range(rounds):
        if console.is_terminal:
            console.print(f"  round {at + 1} of {rounds}", end="\r")
        calibration = measure_machine()
        for name in names:
            if name in leave_out:
                continue
            case = CASES[name]
            try:
                steps = measure(case, seconds, _PORT + name)
            except HostsError as error:
                console.print(f"left out: {case}: {error}", highlight=False)
                leave_out.add(name)
                continue
            predicted = predict(case, calibration)
            values = {name: each for name, each in vars(predicted).items() if name != "spans"}
            each = found.setdefault(name, {"case": asdict(case), "rounds": []})
            each["rounds"].append({"steps": steps, "predicted": values})
    stop_server()
    yield from found.values()


def table(cases: list[dict[str, Any]]) -> Table:
    """Return the comparison."""
    columns = ["case", "ranks", "measured", "predicted", "error", "of rounds", "bound by"]
    found = Table("Seconds of a step", columns)
    errors = []
    for each in cases:
        case = Case(**each["case"])
        reals = [statistics.quantiles(one["steps"], n=4)[0] for one in each["rounds"]]
        predicted = [one["predicted"]["seconds"] for one in each["rounds"]]
        off = [found / real - 1 for found, real in zip(predicted, reals, strict=True)]
        errors.append(statistics.median(off))
        where = f"two hosts, {case.gbit:g} Gbit/s" if case.gbit else case.transport
        words = f"{case.model}, {case.tokens} tokens, {case.dtype}, {case.strategy}, {where}"
        found.rows.append(
            [
                words,
                str(case.settings.mesh),
                f"{1e3 * statistics.median(reals):,.0f} ms",
                f"{1e3 * statistics.median(predicted):,.0f} ms",
                f"{100 * errors[-1]:+.1f} %",
                f"{100 * min(off):+.1f} to {100 * max(off):+.1f} %",
                each["rounds"][0]["predicted"]["bound_by"],
            ]
        )
    sizes = [100 * abs(error) for error in errors]
    found.notes.append(
        f"Error: {statistics.median(sizes):.1f} % in the median, {max(sizes):.1f} % at most."
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=2.0, help="of steps in each case")
    parser.add_argument("--rounds", type=int, default=5, help="of calibration and steps")
    parser.add_argument("--cases", help="numbers of cases from 1, with commas; default: all")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--stored", type=Path, help="show a file instead of measuring")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    options = parser.parse_args()
    console = Console()
    if options.stored is not None:
        found = json.loads(options.stored.read_text())
    else:
        names = [int(each) - 1 for each in (options.cases or "").split(",") if each]
        cases = list(
            run(options.seconds, options.rounds, names or list(range(len(CASES))), console)
        )
        found = document("plan_time", cases)
        if options.json is not None:
            save(options.json, found)
    shown = table(found["cases"])
    if options.markdown:
        print(machine_line(found["machine"]))
        print()
        print(shown.markdown())
    else:
        shown.show(Console(width=160))


if __name__ == "__main__":
    main()
