"""One rank: a process that runs programs, one after the other, in one process group."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import os
import signal
import sys
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from tests.fuzz import sabotage
from tests.fuzz.execution import Execution
from tests.fuzz.program import Program
from tests.fuzz.runtimes import runtime
from tests.fuzz.trace import Trace, first_difference, tolerance_of


@dataclasses.dataclass(frozen=True)
class Unit:
    """A program to run on one runtime.

    Attributes:
        index: of the program.
        runtime: its name.
        torch_completes: torch's FSDP2 has run it to the end in another process.
    """

    index: int
    program: Program
    runtime: str
    torch_completes: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of a unit on one rank.

    Attributes:
        raised: what ended it; ``None`` if it came to its end.
        differs: where it differs first from the unsharded program, as far as that goes.
        differs_from_torch: where from torch's FSDP2; ``"?"`` where that did not come to its end.
        unsharded: how the unsharded program ended: ``complete``, ``undefined`` or what it raised.
        ends: the process is not fit to run another program.
    """

    raised: str | None = None
    differs: str | None = None
    differs_from_torch: str | None = "?"
    unsharded: str = "complete"
    ends: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank is, and what it needs to begin."""

    rank: int
    world: int
    port: int
    prefix: str
    seconds: float
    output: str
    sabotage: str


def main(place: Place, pipe: Connection) -> None:
    """Be a rank until the parent lets go, or a program leaves it unfit."""
    _redirect(place.output)
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_WORLD_SIZE=str(place.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(place.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        CUDA_VISIBLE_DEVICES="",
    )
    os.environ.pop("SHARDWISE_TRANSPORT", None)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.PrefixStore(place.prefix, dist.TCPStore("127.0.0.1", place.port, is_master=False))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=place.seconds),
    )
    sabotage.break_library(place.sabotage)
    gc.collect()
    gc.freeze()
    _Rank(pipe).serve()


class _Rank:
    """Runs units, and remembers what the unsharded program and torch made of the last one."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._index = -1
        self._unsharded = Trace()
        self._torch: Trace | None = None

    def serve(self) -> None:
        while True:
            try:
                units: list[Unit] = self._pipe.recv()
            except (EOFError, OSError):
                _leave(0)
            for unit in units:
                report = self._run(unit)
                self._pipe.send((unit.index, unit.runtime, report))
                if report.ends:
                    _leave(0)

    def _run(self, unit: Unit) -> Report:
        if unit.index != self._index:
            gc.collect()
            self._index = unit.index
            self._unsharded = Execution(unit.program, runtime("unsharded")).run()
            self._torch = None
            if unit.torch_completes:
                self._torch = Execution(unit.program, runtime("torch")).run()
        trace = Execution(unit.program, runtime(unit.runtime)).run()
        tolerance = tolerance_of([unit.program.dtype, unit.program.precision])
        from_torch: str | None = "?"
        if unit.runtime == "torch" and trace.raised is None:
            self._torch = trace
        elif self._torch is not None:
            from_torch = first_difference(trace, self._torch, tolerance)
        unsharded = "undefined" if self._unsharded.undefined else "complete"
        return Report(
            raised=trace.raised,
            differs=first_difference(trace, self._unsharded, tolerance),
            differs_from_torch=from_torch,
            unsharded=self._unsharded.raised or unsharded,
            ends=trace.raised is not None or unit.program.parts_ranks,
        )


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect(path: str) -> None:
    with Path(path).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
