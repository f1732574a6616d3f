"""What only a GPU can say about a training: whether streams race, and whether a graph captures it.

On a CPU both trainings run as they are, without the tool that looks at them, and the results say
so. That shows that the programs themselves are sound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from _contenders import CONTENDERS, Case, Contender
from _turns import StepWorker
from shardwise.base.devices import synchronize

#: Steps before a graph is captured: the optimizer makes its state, libraries their workspaces.
_WARMUP = 3
_TIMED = 5


class ProbeWorker:
    """One rank that computes something and sums it over all ranks."""

    def __init__(self, device: str) -> None:
        self._device = device

    def summed(self) -> float:
        """Return the sum of ones over all ranks, through the device."""
        ones = torch.ones(8, device=self._device)
        torch.distributed.all_reduce(ones)
        return float(ones.mean())


class LossWorker(StepWorker):
    """One rank of a contender whose kernels add in the same order in every run."""

    def __init__(self, name: str, case: Case) -> None:
        torch.use_deterministic_algorithms(True)
        super().__init__(name, case)


class SanitizedWorker(StepWorker):
    """One rank of a contender under CUDA's sanitizer, which looks for races between streams.

    It sees what torch launches and the events and streams of torch; collectives of NCCL it sees as
    operations of the stream that calls them.
    """

    def __init__(self, name: str, case: Case) -> None:
        self._races: tuple[type[Exception], ...] = ()
        if case.device == "cuda":
            from torch.cuda import _sanitizer

            _sanitizer.enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
            self._races = (_sanitizer.CUDASanitizerErrors,)
        super().__init__(name, case)

    def check(self, steps: int) -> dict[str, Any]:
        """Take steps until a race is found.

        Returns:
            The losses, and the reports of the sanitizer.
        """
        losses: list[float] = []
        races: list[str] = []
        try:
            while len(losses) < steps:
                losses.append(self._contender.step(self._next()).item())
        except self._races as found:
            races = [str(error) for error in found.errors]  # type: ignore[attr-defined]
        return {"losses": losses, "races": races, "looked": bool(self._races)}


class GraphWorker(StepWorker):
    """One rank of a contender whose whole step becomes one CUDA graph.

    A twin takes the same steps as usual, and its losses are what the graph has to arrive at.
    """

    def __init__(self, name: str, case: Case) -> None:
        super().__init__(name, case)
        self._twin = CONTENDERS[name](case)
        self._static = self._batches[0].clone()
        for contender in (self._contender, self._twin):
            for group in contender.optimizer.param_groups:
                group["capturable"] = self._cuda

    def check(self, steps: int) -> dict[str, Any]:
        """Capture a step, replay it, and compare its losses with those of the twin.

        Returns:
            The losses of both, and the seconds of a step of both.
        """
        replay, found = self._capture()
        expected = self._warm_up(self._twin)
        for _ in range(steps):
            batch = self._next()
            self._static.copy_(batch)
            found.append(float(replay()))
            expected.append(float(self._twin.step(batch)))
        return {
            "captured": self._cuda,
            "losses": found,
            "expected": expected,
            "seconds": {
                "replayed": self._time(replay),
                "as usual": self._time(lambda: self._twin.step(self._static)),
            },
        }

    def _warm_up(self, contender: Contender) -> list[float]:
        return [float(contender.step(self._batches[0])) for _ in range(_WARMUP)]

    def _capture(self) -> tuple[Callable[[], torch.Tensor], list[float]]:
        """Return a function that takes a step on the static batch, and the losses of warming up."""
        if not self._cuda:
            losses = self._warm_up(self._contender)
            return lambda: self._contender.step(self._static), losses
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            losses = self._warm_up(self._contender)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # On the stream of warming up, which autograd may remember. Threads of NCCL may ask for the
        # state of their events meanwhile.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            loss = self._contender.step(self._static)

        def replay() -> torch.Tensor:
            graph.replay()
            return loss

        return replay, losses

    def _time(self, step: Callable[[], torch.Tensor]) -> float:
        """Return the median seconds of a step."""
        seconds = []
        for _ in range(_TIMED):
            synchronize(self._device)
            begun = time.perf_counter()
            step()
            synchronize(self._device)
            seconds.append(time.perf_counter() - begun)
        return median(seconds)
