"""Recording what ranks do, and writing it down when they have done it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from shardwise import devices, observe
from shardwise.errors import CheckpointError
from shardwise.planning.clock import StepTime
from shardwise.timeline.clocks import Reading, SharedClock, read_clock
from shardwise.timeline.device import DeviceClock
from shardwise.timeline.files import leave, make_folder, write
from shardwise.timeline.merged import Timeline, packed, unpacked
from shardwise.timeline.rank import RankTimeline
from shardwise.timeline.recorder import Recorder
from shardwise.transport.peers import WARNING_SECONDS, Peers

#: Spans, and changes of memory, that one rank keeps at most; and all ranks together.
SPANS_OF_RANK, SPANS_OF_ALL = 100_000, 2_000_000
_FEWEST = 2_000


class Recording:
    """A block of a program that is recorded; see :func:`record`.

    Attributes:
        folder: where files are written; ``None``: nowhere.
        timeline: what was recorded, after the block: on rank 0 of all ranks, on others of
            themselves. ``None`` before.
    """

    def __init__(
        self,
        folder: Path | None = None,
        prediction: StepTime | None = None,
        now: Callable[[], int] = time.perf_counter_ns,
        clock: str | None = None,
    ) -> None:
        self.folder = folder
        self.timeline: Timeline | None = None
        self._prediction = prediction
        self._now = now
        self._clock = clock
        self._recorder: Recorder | None = None
        self._place = _Place(0, 1)
        self._held = contextlib.ExitStack()
        self._first: Reading | None = None

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Return a block that is one step.

        Without this, a step begins with the first forward after an optimizer has stepped.

        Args:
            number: of the step; the same on all ranks.

        Raises:
            RuntimeError: nothing is being recorded.
        """
        if self._recorder is None:
            raise RuntimeError("step() is for inside of the block: with record() as recording: ...")
        return self._recorder.step(number)

    def __enter__(self) -> Self:
        peers = _peers()
        self._prepare(peers)
        self._place = _place(peers) or _Place(0, 1)
        limit = max(_FEWEST, min(SPANS_OF_RANK, SPANS_OF_ALL // (peers.size if peers else 1)))
        clock = DeviceClock.of(_device())
        recorder = Recorder(limit, clock, self._now)
        self._first = read_clock(peers, self._now, self._clock)
        self._held.enter_context(recorder.recording())
        self._recorder = recorder
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._recorder is not None
        assert self._first is not None
        self._held.close()
        if error is not None:
            # Whatever cannot be written now must not hide the error.
            with contextlib.suppress(OSError, CheckpointError):
                self._leave(self._first, f"{type(error).__name__}: {error}")
            return
        peers = _peers()
        if peers is None and self._place.world_size > 1:  # the block has destroyed the group
            self._leave(self._first)
            return
        try:
            mine = self._of_this_rank(read_clock(peers, self._now, self._clock))
            parts = [] if peers is None else _gather(peers, packed(mine))
        except RuntimeError as lost:
            with contextlib.suppress(OSError, CheckpointError):
                self._leave(self._first, f"{type(lost).__name__}: {lost}")
            raise
        ranks = [unpacked(part, rank) for rank, part in enumerate(parts)] or [mine]
        self.timeline = Timeline(tuple(ranks), self._prediction)
        if self.folder is not None and mine.rank == 0:
            write(self.timeline, self.folder)

    def _prepare(self, peers: Peers | None) -> None:
        """Make the folder, on rank 0. If any rank cannot begin, all of them raise."""
        problem: Exception | None = None
        try:
            observe.check_unobserved()
            if self.folder is not None and (peers is None or peers.rank == 0):
                make_folder(self.folder)  # before any rank can write its own
        except (OSError, RuntimeError) as error:
            problem = error
        if peers is not None:
            told = peers.gather_objects(problem, "the beginning of a recording", WARNING_SECONDS)
            problem = problem or next((each for each in told if each is not None), None)
        if problem is not None:
            raise problem

    def _leave(self, last: Reading, error: str = "") -> None:
        """Keep what this rank knows, and write it by itself: peers may be gone."""
        mine = self._of_this_rank(last, error)
        self.timeline = Timeline((mine,), self._prediction)
        if self.folder is not None:
            leave(self.timeline, self.folder)

    def _of_this_rank(self, last: Reading, error: str = "") -> RankTimeline:
        assert self._recorder is not None
        assert self._first is not None
        place = _place(_peers()) or self._place
        shared = SharedClock(self._first, last)
        return self._recorder.timeline(
            rank=place.rank,
            world_size=place.world_size,
            device=devices.name(_device()),
            shared=shared,
            error=error[:2000],
            uncertainty=shared.uncertainty,
        )


def record(folder: str | Path | None = None, *, prediction: StepTime | None = None) -> Recording:
    """Record what every rank computes, gathers, reduces, waits for, copies and allocates.

    ::

        with shardwise.timeline.record("runs/lm/timeline"):
            for batch in itertools.islice(batches, 4):
                train_step(batch)

    Beginning and end are collective: all ranks of the default process group call this at the same
    place, and compare their clocks. In between, each writes down what happens, in bounded memory:
    100,000 spans a rank, fewer in a job of more than 20 ranks; the oldest are dropped. A few steps
    are enough, and easier to look at. If a rank cannot begin, because its process is recorded
    already or the folder cannot be written to, all ranks raise what it raised.

    At the end rank 0 writes ``trace.json`` (for https://ui.perfetto.dev), ``timeline.html`` (which
    needs nothing else) and ``timeline.json`` (for :func:`read`) to the folder. If the block raises,
    every rank writes what it has by itself.

    Args:
        folder: where rank 0 writes to; ``None``: no files.
        prediction: what a plan says that a step takes, to show beside what happened:
            ``shardwise.plan(...).step``.

    Returns:
        A context manager. Its ``timeline`` has the result, and ``step(number)`` marks a step.

    Raises:
        RuntimeError: this process is recorded already.
        PeerLostError: a peer is gone at the beginning or at the end.
        OSError: the folder cannot be written to.
    """
    return Recording(None if folder is None else Path(folder), prediction)


@dataclass(frozen=True)
class _Place:
    """This process among the ranks."""

    rank: int
    world_size: int


def _place(peers: Peers | None) -> _Place | None:
    return None if peers is None else _Place(peers.rank, peers.size)


def _peers() -> Peers | None:
    return Peers() if dist.is_available() and dist.is_initialized() else None


def _device() -> torch.device:
    return devices.current(devices.default_type())


def _gather(peers: Peers, mine: bytes) -> list[bytes]:
    """Return the parts of all ranks on rank 0, and nothing elsewhere."""
    parts: list[bytes] | None = [b""] * peers.size if peers.rank == 0 else None
    doing = "gathering what ranks have recorded"
    peers.call(lambda: dist.gather_object(mine, parts, 0, group=peers.group), doing)
    return parts or []
