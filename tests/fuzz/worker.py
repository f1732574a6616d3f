"""One rank: a process that runs programs, one after the other, in one process group."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import os
import resource
import signal
import sys
import time
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._devices import take_gpu
from tests.fuzz import sabotage
from tests.fuzz.execution import Execution
from tests.fuzz.program import Program
from tests.fuzz.runtimes import Gathered, forget_meshes, runtime
from tests.fuzz.trace import Trace, first_difference, tolerance_of
from tests.transport.encoded import on_host

#: A program that raises may leave what its world was made of: descriptors, of which there are 1024.
_MAX_WORLDS = 100


@dataclasses.dataclass(frozen=True)
class Unit:
    """A program to run on one runtime.

    Attributes:
        index: of the program.
        runtime: its name.
        torch_ran: torch's FSDP2 has run it in another process, to the end or until it raised on
            all ranks.
    """

    index: int
    program: Program
    runtime: str
    torch_ran: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of a unit on one rank.

    Attributes:
        raised: what ended it; ``None`` if it came to its end.
        differs: where it differs first from the unsharded program, as far as that goes.
        differs_from_gathered: where from the unsharded program with values as they are gathered.
        differs_from_torch: where from torch's FSDP2; ``"?"`` where that did not come so far.
        missed: whether values as gathered are documented to miss a write in backward.
        unsharded: how the unsharded program ended: ``complete``, ``undefined`` or what it raised.
        ends: the process is not fit to run another program.
        seconds: of the processor since the report before.
    """

    raised: str | None = None
    differs: str | None = None
    differs_from_gathered: str | None = None
    differs_from_torch: str | None = "?"
    missed: bool = False
    unsharded: str = "complete"
    ends: bool = False
    seconds: float = 0.0


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
    device: str
    hosts: int


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
    )
    if place.device == "cuda":
        take_gpu(place.rank, place.world)
        torch.backends.cudnn.allow_tf32 = False  # programs in fp32 are compared to five digits
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.pop("SHARDWISE_TRANSPORT", None)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some programs end in SIGSEGV
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", place.port, is_master=False)
    rank = _Rank(place, dist.PrefixStore(place.prefix, store), pipe)
    if place.hosts > 1:
        on_host(place.rank, place.world // place.hosts).__enter__()
    rank.connect()
    sabotage.break_library(place.sabotage)
    gc.freeze()
    rank.serve()


class _Rank:
    """Runs units, and remembers what the unsharded program and torch made of the last one."""

    def __init__(self, place: Place, store: dist.Store, pipe: Connection) -> None:
        self._place = place
        self._store = store
        self._pipe = pipe
        self._worlds = 0
        self._program: Program | None = None
        self._now = 0.0
        self._unsharded = self._gathered = Trace()
        self._missed = False
        self._torch: Trace | None = None

    def connect(self) -> None:
        """Enter a new process group of all ranks."""
        self._worlds += 1
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._place.device == "cuda" else "gloo",
            store=dist.PrefixStore(f"world {self._worlds}", self._store),
            rank=self._place.rank,
            world_size=self._place.world,
            timeout=timedelta(seconds=self._place.seconds),
        )

    def serve(self) -> None:
        while True:
            try:
                units: list[Unit] = self._pipe.recv()
            except (EOFError, OSError):
                _leave(0)
            for unit in units:
                report = self._run(unit)
                if report.ends:
                    report = dataclasses.replace(report, ends=not self._reconnects())
                report = dataclasses.replace(report, seconds=self._lap())
                self._pipe.send((unit.index, unit.runtime, report))
                if report.ends:
                    _leave(0)

    def _reconnects(self, seconds: float = 4.0) -> bool:
        """Leave the process group, and enter a new one if all other ranks do so too, and soon.

        To leave tells peers that wait in a collective that nobody comes.
        """
        if self._worlds == _MAX_WORLDS:
            return False
        forget_meshes()
        dist.destroy_process_group()
        gc.collect()
        keys = [f"left {self._worlds} {rank}" for rank in range(self._place.world)]
        self._store.set(keys[self._place.rank], "")
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
            self.connect()
        except RuntimeError:  # DistStoreError, of a peer that hangs or is gone
            return False
        return True

    def _lap(self) -> float:
        now = time.process_time()
        before, self._now = self._now, now
        return now - before

    def _run(self, unit: Unit) -> Report:
        if unit.program != self._program:  # indices begin anew with every batch
            gc.collect()
            self._program = unit.program
            # All ranks run both, whatever they have found: these exchange gradients.
            self._unsharded = Execution(unit.program, runtime("unsharded")).run()
            gathered = Gathered()
            self._gathered = Execution(unit.program, gathered).run()
            self._missed = gathered.clock.missed
            self._torch = None
            if unit.torch_ran:
                self._torch = Execution(unit.program, runtime("torch")).run()
                if self._torch.raised is not None:
                    self._reconnects(60.0)  # it ended at one place on all ranks: all come
        trace = Execution(unit.program, runtime(unit.runtime)).run()
        tolerance = tolerance_of([unit.program.dtype, unit.program.precision])
        from_torch: str | None = "?"
        if unit.runtime == "torch":
            self._torch = trace
        elif self._torch is not None:
            from_torch = first_difference(trace, self._torch, tolerance)
            if from_torch is None and _goes_further(trace, self._torch):
                from_torch = "?"
        differs = first_difference(trace, self._unsharded, tolerance)
        from_gathered = first_difference(trace, self._gathered, tolerance)
        if from_gathered is None and _goes_further(trace, self._gathered):
            from_gathered = self._gathered.raised
        # What raised before anything was sent leaves the ranks fit.
        raised = trace.raised is not None and not _raised_early(trace.raised)
        unsharded = "undefined" if self._unsharded.undefined else "complete"
        return Report(
            raised=trace.raised,
            differs=differs,
            differs_from_gathered=from_gathered,
            differs_from_torch=from_torch,
            missed=self._missed,
            unsharded=self._unsharded.raised or unsharded,
            ends=raised or unit.program.parts_ranks,
        )


def _goes_further(trace: Trace, other: Trace) -> bool:
    """Whether ``trace`` shows something after what ended ``other`` early."""
    if other.raised is None:  # where it has no meaning any more, nothing is promised
        return False
    return trace.raised is None or len(trace.entries) > len(other.entries)


def _raised_early(raised: str) -> bool:
    at, kind, *_ = raised.split(": ")
    return at == "set up" and kind in ("ValueError", "NotImplementedError", "MisuseError")


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
