"""Writing down what the runtime reports."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardwise.base import observe
from shardwise.base.observe import Activity, Memory, Route
from shardwise.timeline.rank import RankTimeline
from shardwise.timeline.recorder import Recorder

_WIRE = Route("gloo", "dp", 2, (0, 1))


def _seconds(own: int) -> float:
    return own / 1e9


def _counting() -> Callable[[], int]:
    """A clock that goes on by one second whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * 10**9


def _timeline(recorder: Recorder) -> RankTimeline:
    return recorder.timeline(0, 1, "cpu", _seconds)


def test_spans_have_what_was_reported_and_the_times_of_the_clock() -> None:
    recorder = Recorder(100, now=_counting())
    with recorder.recording():  # 0
        number = observe.begin(Activity.UNSHARD, "layers.0")  # 1
        gather = observe.collective(Activity.ALL_GATHER, "layers.0", _WIRE, 64, 2)  # 2
        observe.end(number)  # 3
        observe.memory(Memory.FULL_PARAMETERS, "layers.0", 64)  # 4
        observe.end(gather)  # 5
    found = _timeline(recorder)
    unshard, gathered = found.spans
    assert (unshard.activity, unshard.begin, unshard.end) == (Activity.UNSHARD, 1.0, 3.0)
    assert (gathered.begin, gathered.end, gathered.nbytes) == (2.0, 5.0, 64)
    assert (gathered.dimension, gathered.transport, gathered.launches) == ("dp", "gloo", 2)
    assert gathered.members == (0, 1)
    [change] = found.changes
    assert (change.time, change.kind, change.nbytes) == (4.0, Memory.FULL_PARAMETERS, 64)
    assert (found.begin, found.end, found.dropped) == (0.0, 6.0, 0)


def test_memory_of_a_recording_is_bounded_and_the_latest_is_kept() -> None:
    recorder = Recorder(10)
    with recorder.recording():
        for i in range(1000):
            observe.end(observe.begin(Activity.COPY, str(i)))
            observe.memory(Memory.OTHER, str(i), 1)
    found = _timeline(recorder)
    assert [span.name for span in found.spans] == [str(i) for i in range(990, 1000)]
    assert len(found.changes) == 10
    assert found.dropped == 2 * 990


def test_what_an_earlier_recorder_began_means_nothing_to_the_next() -> None:
    first, second = Recorder(10), Recorder(10)
    with first.recording():
        number = observe.begin(Activity.COPY, "one")
    with second.recording():
        observe.begin(Activity.COPY, "other")
        observe.end(number)
    assert [(span.name, span.end) for span in _timeline(second).spans] == [("other", None)]


def test_what_never_ended_is_kept_if_it_began_in_the_last_step() -> None:
    recorder = Recorder(10)
    with recorder.recording():
        with recorder.step(1):
            observe.begin(Activity.FORWARD, "interrupted by an exception")
        with recorder.step(2):
            observe.begin(Activity.WAIT, "where the rank is now")
    found = _timeline(recorder)
    assert [(span.name, span.end) for span in found.spans] == [("where the rank is now", None)]


def test_a_step_begins_with_the_first_forward_after_the_optimizer() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    recorder = Recorder(100, now=_counting())
    with recorder.recording():
        for _ in range(2):
            for _ in range(2):  # microbatches
                observe.end(observe.begin(Activity.FORWARD, "the root group"))
                model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        observe.end(observe.begin(Activity.FORWARD, "evaluation"))
    found = _timeline(recorder)
    steps = [span for span in found.spans if span.activity is Activity.OPTIMIZER]
    assert [span.name for span in steps] == ["SGD", "SGD"]
    assert [step.number for step in found.steps] == [1, 2, 3]
    first, second, third = found.steps
    assert first.end == second.begin
    assert second.end == third.begin
    assert third.end == found.end
    inside = [span for span in found.of(first) if span.activity is Activity.FORWARD]
    assert len(inside) == 2


def test_steps_that_are_marked_count_alone() -> None:
    recorder = Recorder(100)
    with recorder.recording():
        observe.begin(Activity.FORWARD, "warms up")
        with pytest.raises(ValueError, match="no"), recorder.step(7):
            raise ValueError("no")
        with recorder.step(8):
            observe.begin(Activity.FORWARD, "")
    assert [step.number for step in _timeline(recorder).steps] == [7, 8]


def test_memory_of_parameters_and_of_optimizer_states_is_known_from_the_optimizer() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    recorder = Recorder(100)
    with recorder.recording():
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    found = _timeline(recorder)
    assert found.held == {Memory.PARAMETERS: 64}
    assert [(change.kind, change.nbytes) for change in found.changes] == [(Memory.OPTIMIZER, 64)]


def test_an_optimizer_that_raises_does_not_stop_the_recording() -> None:
    class Raises(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise ValueError("no step")

    model = nn.Linear(2, 2)
    bad, good = Raises(model.parameters()), torch.optim.SGD(model.parameters())
    recorder = Recorder(100)
    with recorder.recording():
        with pytest.raises(ValueError, match="no step"):
            bad.step()
        good.step()
    spans = _timeline(recorder).spans
    assert [(span.name, span.end is None) for span in spans] == [("Raises", True), ("SGD", False)]


def test_threads_are_told_apart() -> None:
    recorder = Recorder(100)
    with recorder.recording():
        observe.end(observe.begin(Activity.COPY, "here"))
        other = threading.Thread(
            target=lambda: observe.end(observe.begin(Activity.PEER, "1")), name="other"
        )
        other.start()
        other.join()
        observe.end(observe.begin(Activity.COPY, "here again"))
    assert [span.thread for span in _timeline(recorder).spans] == [0, 1, 0]


def test_nothing_is_left_behind_after_a_recording() -> None:
    recorder = Recorder(100)
    with recorder.recording():
        pass
    model = nn.Linear(2, 2)
    torch.optim.SGD(model.parameters()).step()
    assert not observe.is_observed()
    assert not _timeline(recorder).spans
