"""Simulated ranks: how long a world takes to start, and a collective beyond its bytes.

    python benchmarks/simulated.py [--ranks 4] [--rounds 15]

Beside the start of a world stands that of as many processes, which meet over gloo. The bytes of a
collective are what it does to the tensors of all ranks, without ranks. The floor of what it takes
beyond them is a bare hand-off between two threads of Python, each of which wakes the other. All are
measured in turn, and printed as medians.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import shardwise

CALLS = 300


def _seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _nothing() -> None:
    """Be a rank that does nothing."""


def _collectives(value: list[torch.Tensor]) -> None:
    for _ in range(CALLS):
        dist.all_reduce(value[dist.get_rank()])


def _bytes(values: list[torch.Tensor]) -> None:
    for _ in range(CALLS):
        total = values[0]
        for other in values[1:]:
            total = total + other
        for each in values:
            each.copy_(total)


def _hand_offs() -> None:
    """Wake another thread, and wait until it wakes this one."""
    mine, other = threading.Lock(), threading.Lock()
    mine.acquire()
    other.acquire()

    def answer() -> None:
        for _ in range(CALLS):
            other.acquire()
            mine.release()

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in range(CALLS):
        other.release()
        mine.acquire()
    thread.join()


def main() -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    ranks, values = arguments.ranks, [torch.zeros(16) for _ in range(arguments.ranks)]
    found: dict[str, list[float]] = {}
    ratios: list[float] = []

    def note(what: str, seconds: float) -> None:
        found.setdefault(what, []).append(seconds)

    shardwise.simulate(_nothing, ranks)  # which imports
    for number in range(arguments.rounds):
        note("start of a simulated world", _seconds(lambda: shardwise.simulate(_nothing, ranks)))
        if number < 5:
            launch = _seconds(lambda: shardwise.launch(_nothing, nproc=ranks))
            note("start of as many processes", launch)
        with shardwise.simulation(ranks) as world:
            world.run(_collectives, values)
            each = _seconds(lambda: world.run(_collectives, values)) / CALLS
            of_bytes = _seconds(lambda: _bytes(values)) / CALLS
            beyond = (each - of_bytes) / ranks
            floor = _seconds(_hand_offs) / CALLS / 2
            note("collective, all ranks", each)
            note("bytes of it", of_bytes)
            note("beyond them, for each rank", beyond)
            note("floor: a bare hand-off", floor)
            ratios.append(beyond / floor)
    for what, seconds in found.items():
        print(f"{what:28} {statistics.median(seconds) * 1e6:12,.0f} us")
    print(f"{'beyond bytes / floor':28} {statistics.median(ratios):12,.1f}")


if __name__ == "__main__":
    main()
