"""What ranks run on: the same training on each of these.

run("threads", sharded_trainings, 2, cases)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardwise._torch import c10d
from tests.devices.world import run_on_device
from tests.harness import run_ranks
from tests.threads import run_threads


def _processes(transport: str) -> Callable[..., list[Any]]:
    env = {"SHARDWISE_TRANSPORT": transport}
    return functools.partial(run_ranks, env=env, timeout=240)


def _pretended(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Be the first rank, and the last one, in this process.

    Collectives return at once, and move no values.
    """
    found = []
    for rank in sorted({0, world_size - 1}):
        with c10d.fake_world(world_size, rank):
            found.append(fn(rank, world_size, *args, **kwargs))
    return found


#: By name: called with what a rank does, the number of ranks, and arguments.
INSTRUMENTS: dict[str, Callable[..., list[Any]]] = {
    "threads": run_threads,  # which fake their transport
    "pretended": _pretended,  # what ranks call and allocate, not what they compute
    **{name: _processes(name) for name in ("shm", "c10d", "collectives")},
    "device": run_on_device,  # processes, each with a device of its own, as torch knows one
}


def run(
    instrument: str, fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any
) -> list[Any]:
    """Call ``fn(rank, world_size, *args, **kwargs)`` on every rank of a world.

    Returns:
        What ``fn`` returned, by rank; of those that are pretended, on the first and the last.
    """
    return INSTRUMENTS[instrument](fn, world_size, *args, **kwargs)
