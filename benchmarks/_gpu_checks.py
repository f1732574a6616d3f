"""What only a GPU can say about a training: whether streams race, and whether a graph captures it.

On a CPU both trainings run as they are, without the tool that looks at them, and the results say
so. That shows that the programs themselves are sound.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from _contenders import CONTENDERS, Case
from _models import batches
from _turns import StepWorker

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


class SanitizedWorker:
    """One rank of a contender under CUDA's sanitizer, which looks for races between streams.

    It sees what torch launches and the events and streams of torch; collectives of NCCL it sees as
    operations of the stream that calls them.
    """

    def __init__(self, name: str, case: Case) -> None:
        self._races: tuple[type[Exception], ...] = ()
        if case.device == "cuda":
            from torch.cuda import _sanitizer

            _sanitizer.enable_cuda_sanitizer()
            self._races = (_sanitizer.CUDASanitizerErrors,)
        self._contender = CONTENDERS[name](case)
        self._batches = [
            batch.to(case.device)
            for batch in batches(case.params, case.tokens, torch.distributed.get_rank(), case.seed)
        ]

    def train(self, steps: int) -> dict[str, Any]:
        """Take steps until a race is found.

        Returns:
            The losses, and the reports of the sanitizer.
        """
        losses: list[float] = []
        try:
            for step in range(steps):
                loss = self._contender.forward(self._batches[step % len(self._batches)])
                self._contender.backward(loss)
                self._contender.update()
                losses.append(loss.item())
        except self._races as found:
            races = [str(error) for error in found.errors]  # type: ignore[attr-defined]
            return {"losses": losses, "races": races, "looked": True}
        return {"losses": losses, "races": [], "looked": bool(self._races)}


class GraphWorker:
    """One rank of a contender whose whole step becomes one CUDA graph.

    A twin takes the same steps as usual, and its losses are what the graph has to arrive at.
    """

    def __init__(self, name: str, case: Case) -> None:
        self._is_captured = case.device == "cuda"
        drawn = batches(case.params, case.tokens, torch.distributed.get_rank(), case.seed)
        self._batches = [batch.to(case.device) for batch in drawn]
        self._static = self._batches[0].clone()
        self._captured, self._eager = (CONTENDERS[name](dataclasses.replace(case)) for _ in "ab")
        for contender in (self._captured, self._eager):
            for group in contender.optimizer.param_groups:
                group["capturable"] = self._is_captured

    def compare(self, steps: int) -> dict[str, Any]:
        """Capture a step, replay it, and compare its losses with those of the twin.

        Returns:
            The losses of both, and the seconds of a step of both.
        """
        replay, losses = self._capture()
        expected = [self._step_of(self._eager, batch) for batch in self._warm_batches()]
        found = losses[:]
        for step in range(steps):
            batch = self._batches[step % len(self._batches)]
            self._static.copy_(batch)
            found.append(float(replay()))
            expected.append(self._step_of(self._eager, batch))
        return {
            "captured": self._is_captured,
            "losses": found,
            "expected": expected,
            "seconds": {
                "replayed": self._time(replay),
                "as usual": self._time(lambda: self._launch(self._eager, self._static)),
            },
        }

    def _warm_batches(self) -> list[torch.Tensor]:
        return [self._batches[0]] * _WARMUP

    def _capture(self) -> tuple[Callable[[], torch.Tensor], list[float]]:
        """Return a function that takes a step on the static batch, and the losses of warming up."""
        if not self._is_captured:
            losses = [self._step_of(self._captured, batch) for batch in self._warm_batches()]
            return lambda: self._launch(self._captured, self._static), losses
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            losses = [self._step_of(self._captured, batch) for batch in self._warm_batches()]
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # On the stream of warming up, which autograd may remember. Threads of NCCL may ask for the
        # state of their events meanwhile.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            loss = self._launch(self._captured, self._static)

        def replay() -> torch.Tensor:
            graph.replay()
            return loss

        return replay, losses

    def _launch(self, contender: Any, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = contender.forward(batch)
        contender.backward(loss)
        contender.update()
        return loss.detach()

    def _step_of(self, contender: Any, batch: torch.Tensor) -> float:
        return float(self._launch(contender, batch))

    def _time(self, step: Callable[[], torch.Tensor]) -> float:
        """Return the median seconds of a step."""
        seconds = []
        for _ in range(_TIMED):
            self._synchronize()
            begun = time.perf_counter()
            step()
            self._synchronize()
            seconds.append(time.perf_counter() - begun)
        return median(seconds)

    def _synchronize(self) -> None:
        if self._is_captured:
            torch.cuda.synchronize()
