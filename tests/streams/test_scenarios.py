"""No training of any kind races, on a model of a device; and its memory is the same every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.streams.device import Device
from tests.streams.scenarios import SCENARIOS, play

#: Steps before the memory of a step is compared: the first makes the optimizer's state.
WARM_UP = 1
#: Scenarios whose steps are alike only so many steps apart.
PERIODS = {"diloco": 2, "diloco_streaming": 2}
#: Scenarios in which the host waits for the device within a step, and for what.
SYNCHRONIZES = {
    "offload": "gradients are on the host when backward returns",
    "optimizer_in_backward_offloaded": "the optimizer on the host reads gradients at once",
}


@dataclass
class Steps:
    """What happened in each step of a scenario.

    Attributes:
        races: as texts.
        memory: peak allocated, allocated after the step, and reserved, by training and step.
        synchronizations: how often the host waited in a step, by training and step.
    """

    races: list[str] = field(default_factory=list)
    memory: list[list[tuple[int, int, int]]] = field(default_factory=list)
    synchronizations: list[list[list[str]]] = field(default_factory=list)


def _steps(rank: int, world_size: int, name: str) -> Steps:
    steps = Steps()

    def after_step(device: Device, step: int) -> None:
        if step == 0:
            steps.memory.append([])
            steps.synchronizations.append([])
        device.sweep()
        steps.memory[-1].append((device.peak, device.allocated, device.reserved))
        steps.synchronizations[-1].append(
            [f"{what} at {' < '.join(where)}" for what, where in device.synchronizations]
        )
        device.synchronizations.clear()
        device.reset_peak()

    device = play(name, [after_step])
    steps.races = [str(race) for race in device.races]
    return steps


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_nothing_races_and_memory_is_the_same_every_step(
    ranks: Callable[..., list[Any]], name: str
) -> None:
    [steps] = ranks(_steps, 1, name, backend=None)
    assert not steps.races, "\n".join(steps.races)
    period = PERIODS.get(name, 1)
    for training in steps.memory:
        warm = training[WARM_UP:]
        assert warm[period:] == warm[:-period], training
    if not any(word in name for word in SYNCHRONIZES):
        for training in steps.synchronizations:
            assert not any(training[WARM_UP:]), training[-1]


def test_pinned_offload_waits_only_for_gradients_at_the_end_of_backward(
    ranks: Callable[..., list[Any]],
) -> None:
    [steps] = ranks(_steps, 1, "offload_pinned", backend=None)
    [training] = steps.synchronizations
    for waits in training[WARM_UP:]:
        assert waits
        assert all("in wait < shardwise/sharding/group.py" in wait for wait in waits), waits
