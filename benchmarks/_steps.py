"""One rank of a contender that takes timed training steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from _contenders import CONTENDERS, Case, Contender
from _models import BATCHES, batches


@dataclass(frozen=True)
class Step:
    """One step of one rank.

    Attributes:
        seconds: from a barrier until the optimizer is done.
        forward: seconds of it in forward.
        backward: seconds of it in backward.
        optimizer: seconds of it in the optimizer.
        cpu: processor seconds of this process, with the threads of its process group.
        host: seconds until the host had launched the whole step; on a CPU, that is the step.
        loss: of this rank's batch, before the step.
    """

    seconds: float
    forward: float
    backward: float
    optimizer: float
    cpu: float
    host: float
    loss: float


class StepWorker:
    """One rank of a contender, taking steps on demand."""

    contenders: ClassVar[Mapping[str, type[Contender]]] = CONTENDERS

    def __init__(self, name: str, case: Case) -> None:
        self._contender = self.contenders[name](case)
        drawn = batches(case.params, case.tokens, dist.get_rank(), case.seed)
        self._batches = [batch.to(case.device) for batch in drawn]
        self._cuda = case.device == "cuda"
        self._taken = 0

    def steps(self, count: int) -> list[Step]:
        """Take some steps."""
        return [self._step() for _ in range(count)]

    def _step(self) -> Step:
        batch = self._batches[self._taken % BATCHES]
        self._taken += 1
        dist.barrier()
        self._synchronize()
        cpu, start = time.process_time(), time.perf_counter()
        loss = self._contender.forward(batch)
        forward = time.perf_counter()
        self._contender.backward(loss)
        backward = time.perf_counter()
        self._contender.update()
        host = time.perf_counter()
        self._synchronize()
        end = time.perf_counter()
        return Step(
            seconds=end - start,
            forward=forward - start,
            backward=backward - forward,
            optimizer=end - backward,
            cpu=time.process_time() - cpu,
            host=host - start,
            loss=loss.item(),
        )

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def transposed(by_rank: list[list[Step]]) -> list[list[dict[str, float]]]:
    """Turn steps of ranks into ranks of steps, as plain data."""
    return [[asdict(step) for step in ranks] for ranks in zip(*by_rank, strict=True)]
