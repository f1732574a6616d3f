"""Run a function on several ranks, each a thread of this process, and collect what they return.

    def each_rank(rank: int, world_size: int, scale: float) -> float:
        value = torch.tensor(scale * rank)
        torch.distributed.all_reduce(value)
        return value.item()

    assert run_threads(each_rank, 2, 10.0) == [10.0, 10.0]

This is :func:`tests.harness.run_ranks` for tests of logic: no process is started. The ranks are
those of :func:`shardwise.simulate`; whatever transport a group of parameters asks for, it gets the
strict one of :mod:`tests.transport.fake`. All ranks are on one host, or on those of
:func:`on_hosts`. What a test patches is patched for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardwise.schedules import Schedule
from shardwise.simulated.world import SimulatedWorld
from shardwise.transport import select
from tests.transport.fake import FakeTransport

#: The hosts of the ranks, by rank; empty: all are on one.
_hosts: list[str] = []


@contextlib.contextmanager
def on_hosts(names: Sequence[str]) -> Iterator[None]:
    """Put the ranks of worlds on hosts, by rank."""
    _hosts[:] = names
    try:
        yield
    finally:
        _hosts.clear()


def run_threads(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    schedule: Schedule | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args, **kwargs)`` on every rank of a new world.

    Args:
        fn: any function.
        world_size: the number of threads.
        args: given to every rank alike: the same objects.
        schedule: of the ranks' turns; by default, in order.
        kwargs: given to every rank, too.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        Exception: what a rank raised first.
    """
    world = SimulatedWorld(world_size, _hosts)

    def be(rank: int) -> Any:
        torch.manual_seed(0)
        return fn(rank, world_size, *args, **kwargs)

    fakes = {name: _choice(name) for name in select._CHOICES}
    try:
        with patch.dict(select._CHOICES, fakes):
            return world.run(be, schedule or Schedule())
    finally:
        world.end()


def _choice(name: str) -> Callable[[dist.ProcessGroup, torch.device], FakeTransport]:
    """Return what creates the fake that stands for the transport called ``name``."""
    return lambda group, device: FakeTransport(group, name)


def run_transports(fn: Callable[[Any], Any], world_size: int) -> list[Any]:
    """Call ``fn`` with every rank's transport over all ranks."""

    def be(rank: int, world_size: int) -> Any:
        group = dist.group.WORLD
        assert group is not None
        return fn(select._CHOICES["auto"](group, torch.device("cpu")))

    return run_threads(be, world_size)
