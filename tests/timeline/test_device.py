"""The clock of a device, on events that are made up: no device is needed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shardwise.base import devices, observe
from shardwise.base.observe import Activity
from shardwise.timeline.recorder import DeviceClock, Recorder


class Modeled:
    """A device that is always a second behind the host, and whose clock is 1 % slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = 100.0
        self.behind = 1.0
        monkeypatch.setattr(devices, "timed_event", lambda device: Event(self))
        monkeypatch.setattr(devices, "elapsed", lambda a, b: (b.at - a.at) * 0.99)
        monkeypatch.setattr(devices, "synchronize", lambda device: self.synchronize())

    def now(self) -> int:
        return round(self.host * 1e9)

    def synchronize(self) -> None:
        self.host += self.behind


@dataclass
class Event:
    """An event: when the device comes to it."""

    device: Modeled

    def __post_init__(self) -> None:
        self.at = self.device.host + self.device.behind

    def synchronize(self) -> None:
        self.device.host = self.at


def test_marks_are_read_on_the_clock_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    modeled = Modeled(monkeypatch)
    clock = DeviceClock(torch.device("cpu"), modeled.now)
    clock.begin()
    modeled.host += 5.0
    launched = modeled.host
    mark = clock.mark()
    modeled.host += 50.0
    clock.end()
    assert clock.seconds(mark) == pytest.approx(launched + modeled.behind)


def test_spans_of_groups_and_waits_have_times_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modeled = Modeled(monkeypatch)
    recorder = Recorder(10, DeviceClock(torch.device("cpu"), modeled.now), modeled.now)
    with recorder.recording():
        number = observe.begin(Activity.FORWARD, "layers.0")
        modeled.host += 2.0
        observe.end(number)
        observe.end(observe.begin(Activity.PEER, "1"))
    computed, peer = recorder.timeline(0, 1, "modeled", lambda own: own / 1e9).spans
    assert peer.device is None
    assert computed.device is not None
    begin, end = computed.device
    assert begin == pytest.approx(computed.begin + modeled.behind)
    assert end - begin == pytest.approx(2.0)


def test_the_host_has_no_clock_of_a_device() -> None:
    assert DeviceClock.of(devices.CPU) is None
    assert not devices.times_events(devices.CPU)
