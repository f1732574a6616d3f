"""Recording what ranks do, and writing it down when they have done it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch import c10d
from shardwise.base import devices, observe, plain
from shardwise.base.arguments import check_arguments, check_seconds
from shardwise.base.errors import CheckpointError
from shardwise.base.files import read_small, replace_file
from shardwise.base.spans import StepTime
from shardwise.base.strict import parse, refuse
from shardwise.timeline.meeting import (
    ClockReport,
    Meeting,
    Reading,
    SharedClock,
    clock_of_host,
    first_turns,
    own_clock,
    read_clock,
    waiting_for,
)
from shardwise.timeline.page import page, trace
from shardwise.timeline.rank import RankTimeline
from shardwise.timeline.recorder import DeviceClock, Recorder
from shardwise.timeline.steps import Timeline, together
from shardwise.transport.peers import Peers

#: Spans, and changes of memory, that one rank keeps at most; and all ranks together.
SPANS_OF_RANK, SPANS_OF_ALL = 100_000, 2_000_000
_FEWEST = 2_000
#: Seconds that ranks wait for others at the beginning and at the end of a recording.
PATIENCE = 60.0

_LEFT = "left"  # what a rank says whose block has raised

_log = logging.getLogger(__name__)


class Recording:
    """A block of a program that is recorded; :func:`record` makes one.

    Args:
        folder: where files are written; ``None``: nowhere.
        prediction: the step that a plan predicts, to show beside.
        patience: seconds to wait for other ranks.
        now: a clock, in nanoseconds.
        model: of torch's FSDP2, to observe too.

    Attributes:
        folder: where files are written; ``None``: nowhere.
        timeline: what was recorded, after the block: on rank 0 of all ranks, on others of
            themselves. ``None`` before.
    """

    def __init__(
        self,
        folder: Path | None = None,
        prediction: StepTime | None = None,
        patience: float = PATIENCE,
        now: Callable[[], int] = time.perf_counter_ns,
        model: nn.Module | None = None,
    ) -> None:
        check_seconds("patience", patience)
        self.folder = folder
        self.timeline: Timeline | None = None
        self._prediction = prediction
        self._patience = patience
        self._now = now
        self._model = model
        self._recorder: Recorder | None = None
        self._rank, self._world_size = 0, 1
        self._held = contextlib.ExitStack()
        self._first: Reading | None = None
        self._clocks: Mapping[int, ClockReport] = {}
        self._meeting = ""  # "": not all ranks are recorded together

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Make one step of a block of code.

        Without this, a step begins with the first forward after an optimizer has stepped.

        Args:
            number: of the step; the same on all ranks.

        Returns:
            The block.

        Raises:
            RuntimeError: nothing is being recorded.
        """
        if self._recorder is None:
            raise RuntimeError("step() is for inside of the block: with record() as recording: ...")
        return self._recorder.step(number)

    def __enter__(self) -> Self:
        peers = _peers()
        if peers is not None:
            self._rank, self._world_size = peers.rank, peers.size
        limit = max(_FEWEST, min(SPANS_OF_RANK, SPANS_OF_ALL // self._world_size))
        clock = DeviceClock.of(_device())
        recorder = Recorder(limit, clock, self._now)
        self._first = self._begin(peers)
        with contextlib.ExitStack() as held:  # whatever fails here, nothing is recorded any more
            held.enter_context(recorder.recording())
            if self._model is not None:
                from shardwise.frontends.torch_groups import observed

                held.enter_context(observed(self._model))
            self._recorder = recorder
            self._held = held.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._held.close()
        peers = _peers()
        if error is not None:
            if peers is not None and self._meeting:
                with contextlib.suppress(RuntimeError):  # the store may be gone
                    self._end(peers).come(_LEFT)  # so that no rank waits for this one
            # Whatever cannot be written now must not hide the error.
            with contextlib.suppress(OSError, CheckpointError):
                self._leave(f"{type(error).__name__}: {error}")
            return
        try:
            if self._world_size == 1 or (peers is not None and self._all_have_come(peers)):
                self._put_together(peers)
                return
        except RuntimeError as lost:
            with contextlib.suppress(OSError, CheckpointError):
                self._leave(f"{type(lost).__name__}: {lost}")
            raise
        self._leave()

    def _begin(self, peers: Peers | None) -> Reading:
        """Meet the other ranks, and compare clocks. If any rank cannot begin, all of them raise."""
        if peers is None or not c10d.has_shared_store(peers.group):
            observe.check_unobserved()
            if self.folder is not None and self._rank == 0:
                make_folder(self.folder)
            return own_clock(self._now)
        doing = "the beginning of a recording"
        mine = _RankArrival.after(
            observe.check_unobserved, ClockReport(clock_of_host(), self._now())
        )
        turns = peers.once(first_turns)
        with peers.collective(doing):  # the store may go with the rank that keeps it
            meeting = turns.take(peers.store, peers.rank, range(peers.size))
            said = meeting.meet(
                plain.written(mine).decode(), waiting_for(peers, doing, self._patience)
            )
        arrivals = {rank: plain.read(_RankArrival, text.encode()) for rank, text in said.items()}
        turns.late = peers.rank not in arrivals
        for each in (mine, *arrivals.values()):
            each.check()
        if turns.late:
            _log.warning(
                "rank %d came to a recording when others had waited %g s and begun: it is recorded "
                "by itself, and its files are not written",
                peers.rank,
                self._patience,
            )
            self.folder = None
            return own_clock(self._now)
        self._clocks = {rank: each.clock for rank, each in arrivals.items()}
        self._make_folder(peers, meeting)
        if len(arrivals) == peers.size:
            self._meeting = meeting.name
        elif peers.rank == min(arrivals):
            _warn_of_missing(arrivals, peers, "beginning", self._patience)
        return read_clock(peers, self._clocks, f"{meeting.name}/begin", self._now)

    def _make_folder(self, peers: Peers, meeting: Meeting) -> None:
        """Make the folder, on the first rank, before any rank can write its own.

        Raises:
            OSError: it cannot be made; on all ranks alike.
        """
        key, first = f"{meeting.name}/folder", min(self._clocks)
        if peers.rank == first:

            def prepare() -> None:
                if self.folder is not None:
                    make_folder(self.folder)

            made = _RankArrival.after(prepare, self._clocks[first])
            peers.store.set(key, plain.written(made).decode())
        else:
            doing = "the beginning of a recording"
            text = peers.call(lambda: peers.store.get(key), doing, [first])
            made = plain.read(_RankArrival, text)
        made.check()

    def _end(self, peers: Peers) -> Meeting:
        return Meeting(peers.store, f"{self._meeting}/end", peers.rank, range(peers.size))

    def _all_have_come(self, peers: Peers) -> bool:
        """Whether all ranks were recorded together, and are at the end of their blocks now."""
        if not self._meeting:
            return False
        doing = "the end of a recording"
        with peers.collective(doing):
            said = self._end(peers).meet("", waiting_for(peers, doing, self._patience))
        here = [rank for rank, text in said.items() if text != _LEFT]
        if peers.rank == min(here, default=0):
            _warn_of_missing(here, peers, "end", self._patience)
        return len(here) == peers.size

    def _put_together(self, peers: Peers | None) -> None:
        """Gather what ranks have recorded on rank 0, and write it there."""
        if peers is None or not self._meeting:
            mine = self._of_this_rank()
            ranks = [mine]
        else:
            last = read_clock(peers, self._clocks, f"{self._meeting}/end", self._now)
            mine = self._of_this_rank(last=last)
            parts: list[Any] | None = [b""] * peers.size if mine.rank == 0 else None
            part = zlib.compress(plain.written(mine), 1)
            send = functools.partial(dist.gather_object, part, parts, 0, group=peers.group)
            peers.call(send, "gathering what ranks have recorded")
            ranks = [plain.read(RankTimeline, zlib.decompress(each)) for each in parts or ()]
            ranks = ranks or [mine]
        self.timeline = Timeline(tuple(ranks), self._prediction)
        if self.folder is not None and mine.rank == 0:
            write(self.timeline, self.folder)

    def _leave(self, error: str = "") -> None:
        """Keep what this rank knows, and write it by itself: peers may be gone."""
        mine = self._of_this_rank(error)
        self.timeline = Timeline((mine,), self._prediction)
        if self.folder is not None:
            leave(self.timeline, self.folder)

    def _of_this_rank(self, error: str = "", last: Reading | None = None) -> RankTimeline:
        assert self._recorder is not None
        assert self._first is not None
        if (peers := _peers()) is not None:  # it may have been made inside of the block
            self._rank, self._world_size = peers.rank, peers.size
        shared = SharedClock(self._first, last or self._first)
        return self._recorder.timeline(
            rank=self._rank,
            world_size=self._world_size,
            device=devices.name(_device()),
            shared=shared,
            error=error[:2000],
            uncertainty=shared.uncertainty,
        )


def record(
    folder: str | Path | None = None,
    *,
    model: nn.Module | None = None,
    prediction: StepTime | None = None,
    patience: float = PATIENCE,
) -> Recording:
    """Record what every rank computes, gathers, reduces, waits for, copies and allocates.

    ::

        with shardwise.timeline.record("runs/lm/timeline"):
            for batch in itertools.islice(batches, 4):
                train_step(batch)

    All ranks of the default process group call this at the same place: at the beginning and at the
    end they meet, and compare their clocks. In between, each writes down what happens, in bounded
    memory: 100,000 spans a rank, fewer in a job of more than 20 ranks; the oldest are dropped. A
    few steps are enough, and easier to look at. If a rank cannot begin, because its process is
    recorded already or the folder cannot be written to, all ranks raise what it raised.

    No rank waits forever. Ranks that have not come after ``patience`` seconds are named in a
    warning, and the others are recorded without them. They are not disturbed: ranks meet in the
    store, not in a collective.

    At the end rank 0 writes ``trace.json`` (for https://ui.perfetto.dev), ``timeline.html`` (which
    needs nothing else) and ``timeline.json`` (for :func:`read`) to the folder. If the block raises
    or not all ranks have come, every rank writes what it has by itself.

    Args:
        folder: where rank 0 writes to; ``None``: no files.
        model: one that torch's own ``fully_shard`` has sharded, to see its groups; ours need no
            mention.
        prediction: what a plan says that a step takes, to show beside what happened:
            ``shardwise.plan(...).step``.
        patience: seconds that ranks wait for others at the beginning, and at the end.

    Returns:
        A context manager. Its ``timeline`` has the result, and ``step(number)`` marks a step.

    Raises:
        ValueError: ``patience`` is not above 0.
        RuntimeError: this process is recorded already.
        PeerLostError: a peer is gone at the beginning or at the end.
        OSError: the folder cannot be written to.
    """
    check_arguments(record, locals())
    return Recording(None if folder is None else Path(folder), prediction, patience, model=model)


@dataclass(frozen=True)
class _RankArrival:
    """What a rank says when it comes.

    Attributes:
        clock: what it reports of its clock.
        problem: why it cannot begin; ``None``: it can.
        number: of the system's error that it is, if it is one.
        file: the one that the error is about.
    """

    clock: ClockReport
    problem: str | None = None
    number: int | None = None
    file: str | None = None

    @classmethod
    def after(cls, prepare: Callable[[], object], clock: ClockReport) -> _RankArrival:
        """Prepare, and return what came of it."""
        try:
            prepare()
        except OSError as error:
            file = error.filename and str(error.filename)
            return cls(clock, str(error.strerror or error), error.errno or 0, file)
        except RuntimeError as error:
            return cls(clock, str(error))
        return cls(clock)

    def check(self) -> None:
        """Raise the problem, if there is one."""
        if self.problem is not None and self.number is not None:
            raise OSError(self.number, self.problem, self.file)
        if self.problem is not None:
            raise RuntimeError(self.problem)


def _peers() -> Peers | None:
    return Peers() if dist.is_available() and dist.is_initialized() else None


def _device() -> torch.device:
    return devices.current(devices.default_type())


def _warn_of_missing(here: Collection[int], peers: Peers, when: str, seconds: float) -> None:
    missing = [rank for rank in range(peers.size) if rank not in here]
    if missing:
        _log.warning(
            "ranks %s did not come to the %s of a recording within %g s, and are not in it; all "
            "ranks of the default process group have to call record() at the same place",
            missing,
            when,
            seconds,
        )


#: Files in the folder of a timeline.
TIMELINE, TRACE, PAGE = "timeline.json", "trace.json", "timeline.html"

_PARTS = "rank-*.json"
_MOST_BYTES = 1 << 29  # a recording stops long before
_MOST_MEMORY = 20  # bytes that each byte of a file takes in memory: rows are short, and many


def write(timeline: Timeline, folder: str | Path) -> None:
    """Write the timeline, the trace for Perfetto, and the page. Each is complete, or is not.

    Args:
        timeline: what was recorded.
        folder: where to; it is made if it does not exist.

    Raises:
        OSError: the folder cannot be written to.
    """
    check_arguments(write, locals())
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    replace_file(root / TIMELINE, plain.written(timeline))
    replace_file(root / TRACE, plain.written(trace(timeline)))
    # A name or an error may hold half a surrogate pair, which no encoding has.
    replace_file(root / PAGE, page(timeline).encode(errors="replace"))


def read(path: str | Path) -> Timeline:
    """Read the timeline that a recording wrote.

    If the recording was cut short, what each rank has left in the folder is put together.

    Args:
        path: the folder that :func:`~shardwise.timeline.record` wrote to, or its
            ``timeline.json``.

    Returns:
        The timeline of all ranks.

    Raises:
        CheckpointError: a file is damaged, or there is none.
    """
    check_arguments(read, locals())
    root = Path(path)
    whole = root / TIMELINE if root.is_dir() else root
    if root.is_dir() and not os.path.lexists(whole):
        return read_parts(root)
    return _parsed(whole)


def read_parts(folder: Path) -> Timeline:
    """Put together what ranks have left in a folder, each by itself.

    Raises:
        CheckpointError: a file is damaged, or there is none.
    """
    parts = sorted(folder.glob(_PARTS))
    if not parts:
        refuse(str(folder), "no timeline", f"a folder with {TIMELINE}, or with {_PARTS}")
    return together(map(_parsed, parts))


def make_folder(folder: Path) -> None:
    """Make a folder for a recording, without what an earlier one wrote to it.

    Raises:
        OSError: it cannot be made, or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*(folder / name for name in (TIMELINE, TRACE, PAGE)), *folder.glob(_PARTS)):
        path.unlink(missing_ok=True)


def leave(mine: Timeline, folder: Path) -> None:
    """Write what one rank knows, when ranks cannot put it together.

    The last one to do so writes what all have left.

    Raises:
        CheckpointError: what another rank has left is damaged.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    [rank] = mine.ranks
    replace_file(folder / f"rank-{rank.rank:05}.json", plain.written(mine))
    with _one_at_a_time(folder):
        write(read_parts(folder), folder)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep other ranks out, where the file system can: not on every network file system."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _parsed(path: Path) -> Timeline:
    text = read_small(path, _MOST_BYTES)
    return Timeline.from_json(parse(text, str(path), _MOST_MEMORY * len(text)), str(path))
