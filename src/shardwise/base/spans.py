"""What took time in a step, and when; measured, or predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.base.observe import Activity


class Span(NamedTuple):
    """Something that took time, or is predicted to.

    Attributes:
        activity: what it was.
        name: of the group, such as ``"model.layers.3"``; for ``PEER``, the rank waited for.
        begin: when it began on the host.
        end: when it ended there; ``None`` if it never did.
        dimension: the mesh dimension of a collective or a wait, else ``""``.
        nbytes: what a collective moved, as :class:`~shardwise.base.observe.Observer` says.
        thread: a small number for the thread that it ran in.
        transport: of a collective, such as ``"shm"``, else ``""``.
        launches: of a collective: how many calls of the wire it took.
        members: of a collective: the ranks that took part.
        device: when it began and ended on the device, if that was recorded.
    """

    activity: Activity
    name: str
    begin: float
    end: float | None
    dimension: str = ""
    nbytes: int = 0
    thread: int = 0
    transport: str = ""
    launches: int = 0
    members: tuple[int, ...] = ()
    device: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """How long it took on the host; 0 if it never ended."""
        return 0.0 if self.end is None else self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted time of an optimizer step. The parts add up to ``seconds``.

    Attributes:
        seconds: of the step.
        compute: seconds of forward and backward.
        exposed: seconds in which a rank only waits for communication.
        optimizer: seconds of clipping and of the optimizer.
        host: seconds in which the device waits for the host; on CPUs, those of everything that is
            not inside an operation.
        tokens_per_second: of all ranks; samples for models without sequences.
        mfu: model FLOPs utilization, 0 to 1.
        bound_by: what takes most of the time: ``"matrix products"``, ``"memory bandwidth"``,
            ``"optimizer"``, ``"host"``, or ``"communication over"`` a mesh dimension.
        spans: what is predicted when, in seconds after the begin of the step, ordered by begin.
    """

    seconds: float
    compute: float
    exposed: float
    optimizer: float
    host: float
    tokens_per_second: float
    mfu: float
    bound_by: str
    spans: tuple[Span, ...] = ()

    @property
    def parts(self) -> dict[str, float]:
        """The parts by their names."""
        return {
            "compute": self.compute,
            "exposed communication": self.exposed,
            "optimizer": self.optimizer,
            "host": self.host,
        }
