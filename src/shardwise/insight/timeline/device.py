"""The clock of a device with streams: events on its current stream, read when all is over.

An event is one more piece of work in the stream, so its time is when the device came to it, not
when the host launched it. Two events that the host waits for tie both clocks together: one at the
beginning, one at the end. In between, the clock of the device is taken to run evenly.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shardwise.base import devices

Mark = devices.TimedEvent


class DeviceClock:
    """Times on a device, in seconds of the host's clock.

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
