"""On a model of a device, no training races, waits on the host, or takes more memory every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.streams.device import Device, Synchronization
from tests.streams.mutants import SEEN
from tests.streams.scenarios import SCENARIOS, play

#: Scenarios that are played in one process.
_AT_A_TIME = 16
#: Steps before the memory of a step is compared: the first makes the optimizer's state.
WARM_UP = 1
#: Scenarios whose steps are alike only so many steps apart.
PERIODS = {"diloco": 2, "diloco_streaming": 2}
#: Where the host waits for the device within a step, and why: only if shards or inputs are there.
WAITS = {
    "in _to_device <": "inputs are copied to the device",
    "in gathered <": "a tensor subclass on the host is copied to the device",
    "in clip_grad_norm_ <": "some gradients are on the host, and what scales them goes there",
    "in _local_norm <": "some gradients are on the host, and their norms go to the device",
    "in step_in_backward <": "a group that steps in backward needs its gradients on the host",
    "in _finish_oldest <": "states of an optimizer go to the host, where others may read them",
    "in take_over_writes <": "what modules wrote to full parameters goes to shards on the host",
    "in fill <": "shards in pageable memory are copied to the device",
    "in copy_to_host <": "gradients are copied to pageable memory, or hooks read them at once",
    "in numbers <": "ranks compare which parameters they have gradients of, before a step of Muon",
    "in add_grad <": "another gradient is added to one on the host",
    "in wait_for_offload <": "gradients are on the host when backward returns",
}
#: Offloading scenarios with collectives after the end of a backward, at which the host waits.
GO_ON_AFTER_BACKWARD = {"offload_accumulate", "clip_offload"}
#: Those that are between collectives. Plain pinned offload has none.
WAITS_BETWEEN_COLLECTIVES = WAITS.keys() - {"in wait_for_offload <", "in _to_device <"}


@dataclass
class Steps:
    """What happened in each step of a scenario.

    Attributes:
        races: as texts.
        memory: peak allocated, allocated after the step, and reserved, by training and step.
        waits: of the host for the device, and the number of launches of collectives in the step, by
            training and step.
    """

    races: list[str] = field(default_factory=list)
    memory: list[list[tuple[int, int, int]]] = field(default_factory=list)
    waits: list[list[tuple[list[Synchronization], int]]] = field(default_factory=list)


def _steps(rank: int, world_size: int, name: str) -> Steps:
    steps = Steps()

    def after_step(device: Device, step: int) -> None:
        if step == 0:
            steps.memory.append([])
            steps.waits.append([])
        device.sweep()
        steps.memory[-1].append((device.peak, device.allocated, device.reserved))
        steps.waits[-1].append((list(device.synchronizations), device.collectives))
        device.synchronizations.clear()
        device.collectives = 0
        device.reset_peak()

    device = play(name, [after_step])
    steps.races = [str(race) for race in device.races]
    return steps


def _batches() -> list[Any]:
    """All scenarios; always those that, between them, report whatever is taken out."""
    reporting = set(SEEN.values())
    always = [name for name in SCENARIOS if name in reporting]
    others = [name for name in SCENARIOS if name not in reporting]
    return [
        pytest.param(names[first : first + _AT_A_TIME], marks=marks, id=names[first])
        for names, marks in ((always, ()), (others, pytest.mark.long))
        for first in range(0, len(names), _AT_A_TIME)
    ]


def _each(rank: int, world_size: int, names: Sequence[str]) -> dict[str, Steps]:
    return {name: _steps(rank, world_size, name) for name in names}


@pytest.mark.parametrize("names", _batches())
def test_nothing_races_or_waits_and_memory_stays_the_same(
    ranks: Callable[..., list[Any]], names: Sequence[str]
) -> None:
    [played] = ranks(_each, 1, names, backend=None, timeout=290)
    for name, steps in played.items():
        assert not steps.races, "\n".join([name, *steps.races])
        period = PERIODS.get(name, 1)
        for training in steps.memory:
            warm = training[WARM_UP:]
            assert warm[period:] == warm[:-period], f"{name}: {training}"
        for training in steps.waits:
            for waits, collectives in training[WARM_UP:]:
                _check_waits(name, waits, collectives)


def _check_waits(name: str, waits: Sequence[Synchronization], collectives: int) -> None:
    """Check where the host waits within a step of a scenario."""
    may_wait = "offload" in name or "muon" in name or name == "inputs_on_host"
    assert may_wait or not waits, f"{name}: {waits[0]}"
    for wait in waits:
        assert any(where in str(wait) for where in WAITS), f"{name}: {wait}"
        is_between = 0 < wait.collectives < collectives
        if is_between and name not in GO_ON_AFTER_BACKWARD:
            assert any(where in str(wait) for where in WAITS_BETWEEN_COLLECTIVES), f"{name}: {wait}"


def test_pinned_offload_waits_only_for_gradients_at_the_end_of_backward(
    ranks: Callable[..., list[Any]],
) -> None:
    [steps] = ranks(_steps, 1, "offload_pinned", backend=None)
    [training] = steps.waits
    for waits, collectives in training[WARM_UP:]:
        assert waits
        assert collectives > 2
        assert all("in wait_for_offload <" in str(wait) for wait in waits), waits
        assert all(wait.collectives == collectives for wait in waits), waits
