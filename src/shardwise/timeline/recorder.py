"""Writing down what the runtime reports, quickly and in bounded memory.

Nothing is computed while training runs: a report costs a reading of the clock and one append. Where
the device has streams, an event is recorded on the current stream as well; see
:class:`DeviceClock`.
"""

from __future__ import annotations

import contextlib
import itertools
import platform
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise._torch import dtensor
from shardwise.base import devices, observe
from shardwise.base.observe import Activity, Memory, Observer, Route
from shardwise.base.spans import Span
from shardwise.timeline.rank import MemoryChange, RankTimeline, Step

#: Numbers of activities. One row for all recorders: a number of an earlier one means nothing here.
_numbers = itertools.count(1)

#: What a device works on, or waits for. The rest belongs to the host, or to a wire.
_ON_DEVICE = frozenset(
    {
        *(Activity.FORWARD, Activity.BACKWARD, Activity.UNSHARD, Activity.SUPPLY),
        *(Activity.REDUCE, Activity.WAIT, Activity.COPY, Activity.OPTIMIZER),
    }
)

Mark = devices.TimedEvent
#: The fields of a span, in nanoseconds of the host and with the thread's own number, and where the
#: device begins. To make a span takes longer, and is for later.
_Started = tuple[tuple[Any, ...], Mark | None]


def check_step(number: object) -> None:
    """Check that a user has given the number of a step.

    Raises:
        ValueError: it is not an integer, or is negative.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"step: found {number!r}, expected the number of a step, 0 or more")


class DeviceClock:
    """Times on a device, in seconds of the host's clock.

    An event is one more piece of work in the stream, so its time is when the device came to it, not
    when the host launched it. Two events that the host waits for tie both clocks together: one at
    the beginning, one at the end. In between, the clock of the device is taken to run evenly.

    Args:
        device: a device with streams; see :func:`shardwise.base.devices.has_streams`.
        now: the clock of the host, in nanoseconds.
    """

    def __init__(self, device: torch.device, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._device = device
        self._now = now
        self._first: tuple[Mark, int] | None = None
        self._rate = 1.0  # seconds of the host for each second of the device

    @classmethod
    def of(cls, device: torch.device) -> DeviceClock | None:
        """Return the clock of a device; ``None`` if it has no events that can be timed."""
        return cls(device) if devices.times_events(device) else None

    def begin(self) -> None:
        """Tie both clocks together. The host waits for the device."""
        self._first = self._tie()

    def end(self) -> None:
        """Tie both clocks together again, after the last mark. The host waits for the device."""
        assert self._first is not None
        first, began = self._first
        last, ended = self._tie()
        on_device = devices.elapsed(first, last)
        if on_device > 0:
            self._rate = (ended - began) / 1e9 / on_device

    def mark(self) -> Mark:
        """Mark the work that the current stream has so far."""
        return devices.timed_event(self._device)

    def seconds(self, mark: Mark) -> float:
        """Return when the device came to a mark. Call it after :meth:`end`."""
        assert self._first is not None
        first, began = self._first
        return began / 1e9 + devices.elapsed(first, mark) * self._rate

    def _tie(self) -> tuple[Mark, int]:
        devices.synchronize(self._device)  # then nothing is in the way of the event
        mark = self.mark()
        mark.synchronize()
        return mark, self._now()


@dataclass
class _StepMark:
    """A step that was begun, in nanoseconds of the host."""

    number: int
    begin: int
    end: int | None = None


class Recorder:
    """An observer that remembers.

    Steps are found without help: one begins with the first forward after an optimizer has stepped.
    A program that knows better says so by :meth:`step`.

    Args:
        limit: how many spans and how many changes of memory to keep. The oldest are dropped.
        device: the clock of the device; ``None``: it has none, as the CPU.
        now: the clock of the host, in nanoseconds.
    """

    def __init__(
        self,
        limit: int,
        device: DeviceClock | None = None,
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._now = now
        self._device = device
        self._open: dict[int, _Started] = {}
        self._spans: deque[tuple[_Started, int | None, Mark | None]] = deque(maxlen=limit)
        self._changes: deque[tuple[int, Memory, str, int]] = deque(maxlen=limit)
        self._ended = itertools.count()
        self._changed = itertools.count()
        self._held: Counter[Memory] = Counter()  # when the recording began, as far as it is known
        self._optimizers: dict[int, tuple[int, int]] = {}  # id: number of states, their bytes
        self._stepping: dict[int, int] = {}  # id of an optimizer: number of its activity
        self._steps: deque[_StepMark] = deque(maxlen=limit)
        self._finds_steps = True
        self._has_stepped = True  # then the next forward begins a step
        self._began = self._finished = 0

    # -- as an observer ---------------------------------------------------------------------------

    def begin(self, activity: Activity, name: str, dimension: str, nbytes: int) -> int:
        """Note that an activity begins."""
        number = next(_numbers)
        mark = None
        if self._device is not None and activity in _ON_DEVICE:
            mark = self._device.mark()
        thread = threading.get_ident()
        now = self._now()
        self._open[number] = (activity, name, now, None, dimension, nbytes, thread), mark
        if self._has_stepped and self._finds_steps and activity is Activity.FORWARD:
            self._begin_step(now)
        return number

    def collective(
        self, activity: Activity, name: str, wire: Route, nbytes: int, launches: int
    ) -> int:
        """Note that a collective is issued."""
        number = next(_numbers)
        thread = threading.get_ident()
        self._open[number] = (
            (
                *(activity, name, self._now(), None, wire.dimension, nbytes, thread),
                *(wire.transport, launches, wire.members),
            ),
            None,
        )
        return number

    def end(self, number: int) -> None:
        """Note that an activity has ended."""
        started = self._open.pop(number, None)
        if started is None:
            return  # it began before the recording
        mark = None if started[1] is None or self._device is None else self._device.mark()
        self._spans.append((started, self._now(), mark))
        next(self._ended)

    def memory(self, kind: Memory, name: str, nbytes: int) -> None:
        """Note that memory has grown or shrunk."""
        self._changes.append((self._now(), kind, name, nbytes))
        next(self._changed)

    # -- steps ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record a block as a step. From the first one on, no others are looked for.

        Args:
            number: of the step.

        Raises:
            ValueError: it is not an integer, or is negative.
        """
        check_step(number)
        if self._finds_steps:
            self._finds_steps = False
            self._steps.clear()
        mark = _StepMark(number, self._now())
        self._steps.append(mark)
        try:
            yield
        finally:
            mark.end = self._now()

    def _begin_step(self, now: int) -> None:
        self._has_stepped = False
        last = self._steps[-1] if self._steps else None
        if last is not None:
            last.end = now
        self._steps.append(_StepMark(1 if last is None else last.number + 1, now))

    # -- optimizers -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(
        self, watching: Callable[[Observer], AbstractContextManager[None]] = observe.observing
    ) -> Iterator[None]:
        """Record what happens inside the block, in all threads.

        Args:
            watching: how: by default as the only one who may.

        Raises:
            RuntimeError: another observer watches this process.
        """
        with (
            watching(self),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ):
            if self._device is not None:
                self._device.begin()
            self._began = self._now()
            try:
                yield
            finally:
                self._finished = self._now()
                if self._device is not None:
                    self._device.end()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if observe.watchers()[0] is not self:
            return
        name = type(optimizer).__name__
        self._stepping[id(optimizer)] = self.begin(Activity.OPTIMIZER, name, "", 0)
        if id(optimizer) not in self._optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            states = _states(optimizer)
            self._held[Memory.PARAMETERS] += sum(map(_nbytes, params))
            self._held[Memory.OPTIMIZER] += states
            self._optimizers[id(optimizer)] = len(optimizer.state), states

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if observe.watchers()[0] is not self:
            return
        self.end(self._stepping.pop(id(optimizer), 0))
        self._has_stepped = True
        count, before = self._optimizers.get(id(optimizer), (0, 0))
        if len(optimizer.state) != count:  # the first step makes them
            states = _states(optimizer)
            self._optimizers[id(optimizer)] = len(optimizer.state), states
            self.memory(Memory.OPTIMIZER, type(optimizer).__name__, states - before)

    # -- what came of it --------------------------------------------------------------------------

    def timeline(
        self,
        rank: int,
        world_size: int,
        device: str,
        shared: Callable[[float], float],
        error: str = "",
        uncertainty: float = 0.0,
    ) -> RankTimeline:
        """Return what was recorded.

        Args:
            rank: this rank.
            world_size: how many there are.
            device: what it computes on.
            shared: turns nanoseconds of the host into seconds of the clock that ranks share.
            error: the exception that ended the recording.
            uncertainty: seconds by which that clock may be off.
        """
        ended = list(self._spans)
        begun = sorted(self._open.values(), key=lambda started: started[0][2])
        last = self._steps[-1].begin if self._steps else self._began
        # What did not end belongs to where the rank was last, or an exception ended it long ago.
        unfinished = [(each, None, None) for each in begun if each[0][2] >= last]
        threads: dict[int, int] = {}

        def span(started: _Started, end: int | None, mark: Mark | None) -> Span:
            fields, first = started
            own, on = Span(*fields), None
            if (clock := self._device) is not None and first is not None and mark is not None:
                came, left = (shared(round(clock.seconds(each) * 1e9)) for each in (first, mark))
                on = came, left
            return own._replace(
                begin=shared(own.begin),
                end=None if end is None else shared(end),
                thread=threads.setdefault(own.thread, len(threads)),
                device=on,
            )

        spans = sorted((span(*each) for each in (*ended, *unfinished)), key=lambda s: s.begin)
        dropped = next(self._ended) - len(self._spans) + next(self._changed) - len(self._changes)
        return RankTimeline(
            rank=rank,
            world_size=world_size,
            host=platform.node(),
            device=device,
            begin=shared(self._began),
            end=shared(self._finished),
            spans=tuple(spans),
            changes=tuple(
                MemoryChange(shared(t), kind, name, n) for t, kind, name, n in self._changes
            ),
            held={kind: nbytes for kind, nbytes in self._held.items() if nbytes},
            steps=tuple(
                Step(mark.number, shared(mark.begin), shared(mark.end or self._finished))
                for mark in self._steps
            ),
            dropped=dropped,
            error=error,
            uncertainty=uncertainty,
        )


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the memory of this rank's part of a tensor."""
    local = dtensor.plain(tensor)
    return 0 if local.is_meta else local.numel() * local.itemsize


def _states(optimizer: torch.optim.Optimizer) -> int:
    """Return the memory of the states of an optimizer, on this rank."""
    found: Any = optimizer.state.values()
    return sum(
        _nbytes(value)
        for state in found
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
