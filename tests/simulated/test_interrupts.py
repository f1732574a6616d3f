"""Ctrl-C at any line of a simulation, and forks of the process: the next simulation works."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from typing import Any

import torch.distributed as dist

import shardwise
from shardwise._torch import threads
from shardwise.base import observe
from shardwise.simulated import api, turns, world
from shardwise.transport import carrier
from tests.interrupts import at_every_line

_FILES = [each.__file__ for each in (threads, api, turns, world, carrier)]


def _of_process() -> tuple[Any, ...]:
    """What a simulation changes in the process as long as it runs."""
    world_of_torch: Any = dist.distributed_c10d
    return (
        *(carrier.carrier(), observe.watchers(), sys.stdout, sys.excepthook),
        *(dist.init_process_group, world_of_torch._world, dist.is_initialized()),
    )


def test_nothing_is_left_of_an_interrupted_simulation() -> None:
    shardwise.simulate(dist.get_rank, 2)
    before, running = _of_process(), set(threading.enumerate())
    for attempt in at_every_line(_FILES):
        with attempt:
            ranks = shardwise.simulate(dist.get_rank, 2)
        assert _of_process() == before, attempt.where
        if attempt.where:
            assert set(threading.enumerate()) - running == set(), attempt.where
        assert [each.value for each in shardwise.simulate(dist.get_rank, 2)] == [0, 1]
    assert [each.value for each in ranks] == [0, 1]


def _run_in_child(simulation: Any, answers: Any) -> None:
    try:
        simulation.run(dist.get_rank)
    except RuntimeError as error:
        answers.put(str(error))
    answers.put([each.value for each in shardwise.simulate(dist.get_rank, 2)])


def test_a_forked_process_begins_a_simulation_of_its_own() -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with shardwise.simulation(2) as simulation:
        simulation.run(dist.get_rank)
        child = context.Process(target=_run_in_child, args=(simulation, answers))
        child.start()
        assert "begin another simulation here" in answers.get()
        assert answers.get() == [0, 1]
        child.join()
        assert [each.value for each in simulation.run(dist.get_rank)] == [0, 1]
