"""The parent's side of a world of ranks: hand out units, and notice ranks that die or hang."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.fuzz.worker import Place, Report, Unit, main
from tests.harness import start_server

#: How long a collective may take.
COLLECTIVE_SECONDS = 8.0

_Results = dict[tuple[int, str], dict[int, Report]]


class Pool:
    """A world of ranks, started when they are needed, and again when a program left them unfit.

    Args:
        world: the number of ranks.
        sabotage: how to break the library in them; see ``sabotage.py``.
        device: ``"cpu"``, or ``"cuda"``: of each rank; ranks share a GPU if there are fewer.
        hosts: of how many the processes act as if they were on them, as many on each.
        collective_seconds: how long a collective may take.
        hang_seconds: how long after the last word of any rank all of them count as hung.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        world: int,
        sabotage: str = "",
        *,
        device: str = "cpu",
        hosts: int = 1,
        collective_seconds: float = COLLECTIVE_SECONDS,
        hang_seconds: float = 30.0,
    ) -> None:
        self.world = world
        self.starts = 0
        self._sabotage = sabotage
        self._device = device
        self._hosts = hosts
        self._collective_seconds = collective_seconds
        self._hang_seconds = hang_seconds
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._directory = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        self._directory.cleanup()

    def run(self, units: Sequence[Unit]) -> _Results:
        """Run all units, in as many worlds as it takes; return the reports of all ranks."""
        results: _Results = {}
        left = list(units)
        while left:
            if not self._processes:
                self._start()
            left = [self._with_torch(unit, results) for unit in left]
            done = self._run_until_unfit(left, results)
            left = left[done:]
        return results

    def _with_torch(self, unit: Unit, results: _Results) -> Unit:
        """Let ranks that are new run torch's again, where that ended at one place on all ranks."""
        raised = [each.raised for each in results.get((unit.index, "torch"), {}).values()]
        ended = not any(text.startswith(("died", "hung")) for text in raised if text is not None)
        alike = len({text and text.partition(":")[0] for text in raised}) == 1
        return dataclasses.replace(unit, torch_ran=ended and alike)

    def _run_until_unfit(self, units: list[Unit], results: _Results) -> int:
        """Run units until a rank is unfit; return how many are settled."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(units)
        at = [0] * self.world  # which unit each rank is at
        ended: set[int] = set()
        heard = time.monotonic()
        end = len(units)  # where the first rank became unfit
        while min(at) < end:
            ready = self._next_ready(ended, heard + self._hang_seconds - time.monotonic())
            if not ready:
                self._note_hang(units, at, end, results)
                self._stop()
                return min(min(at) + 1, len(units))
            heard = time.monotonic()
            for rank in ready:
                report = self._receive(rank)
                unit = units[at[rank]]
                results.setdefault((unit.index, unit.runtime), {})[rank] = report
                at[rank] += 1
                if report.ends:
                    ended.add(rank)
                    end = min(end, at[rank])
                    at[rank] = len(units)
        if ended:
            self._stop()
            for unit in units[end:]:
                results.pop((unit.index, unit.runtime), None)
        return end

    def _next_ready(self, ended: set[int], seconds: float) -> list[int]:
        waited: dict[Any, int] = {}
        for rank in range(self.world):
            if rank not in ended:
                waited[self._pipes[rank]] = rank
                waited[self._processes[rank].sentinel] = rank
        return sorted({waited[each] for each in wait(list(waited), timeout=max(seconds, 0))})

    def _receive(self, rank: int) -> Report:
        try:
            if not self._pipes[rank].poll():
                raise EOFError
            return self._pipes[rank].recv()[2]
        except (EOFError, OSError):
            self._processes[rank].join()
            code = self._processes[rank].exitcode or 0
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Report(raised=f"died: {name}\n{self._output(rank)}", ends=True)

    def _note_hang(self, units: list[Unit], at: list[int], end: int, results: _Results) -> None:
        """Say of the ranks that hang where they are."""
        hung = [rank for rank in range(self.world) if at[rank] < end]
        for rank in hung:
            pid = self._processes[rank].pid
            if pid is not None:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        unit = units[min(at)]
        for rank in hung:
            if at[rank] == min(at):
                report = Report(raised=f"hung\n{self._output(rank)}", ends=True)
                results.setdefault((unit.index, unit.runtime), {})[rank] = report

    def _start(self) -> None:
        self.starts += 1
        context = start_server()
        number = next(self._numbers)
        for rank in range(self.world):
            here, there = context.Pipe()
            place = Place(
                rank=rank,
                world=self.world,
                port=self._store.port,
                prefix=str(number),
                seconds=self._collective_seconds,
                output=str(Path(self._directory.name) / f"output-{rank}"),
                sabotage=self._sabotage,
                device=self._device,
                hosts=self._hosts,
            )
            process = context.Process(target=main, args=(place, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        self._processes, self._pipes = [], []

    def _output(self, rank: int) -> str:
        """The innermost calls of the main thread, or else the last lines."""
        path = Path(self._directory.name) / f"output-{rank}"
        text = path.read_text(errors="replace") if path.exists() else ""
        _, _, stack = text.rpartition("Current thread")
        return "\n".join(stack.splitlines()[1:8]) or text[-1000:]
