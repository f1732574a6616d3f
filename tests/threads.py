"""Run a function on several ranks, each a thread of this process, and collect what they return.

    def each_rank(rank: int, world_size: int, scale: float) -> float:
        value = torch.tensor(scale * rank)
        torch.distributed.all_reduce(value)
        return value.item()

    assert run_threads(each_rank, 2, 10.0) == [10.0, 10.0]

As :func:`tests.harness.run_ranks`, for tests of logic: no process is started and no byte leaves
this one. Whatever transport a group of parameters asks for, it gets the fake one of
:mod:`tests.transport.fake`. ``torch.distributed`` itself runs on torch's process groups for
threads. Ranks have neither environment variables of their own nor point-to-point messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from shardwise.transport import select
from tests.transport.fake import FakeTransport, FakeWorld

_BACKEND = "turns"
# Nothing of what torch tests itself with has types.
_threaded: Any = multi_threaded_pg
_c10d: Any = torch._C._distributed_c10d

#: The world that runs, if one does: a process has one at a time.
_worlds: list[FakeWorld] = []


def run_threads(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Call ``fn(rank, world_size, *args, **kwargs)`` on every rank of a new world.

    Args:
        fn: any function.
        world_size: the number of threads.
        args: given to every rank alike: the same objects.
        kwargs: and so are these.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        Exception: what a rank raised; if several did, one that did not only miss another rank.
    """
    world = FakeWorld(world_size)
    store = _c10d.HashStore()

    def be(rank: int) -> Any:
        dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=world_size)
        try:
            return fn(rank, world_size, *args, **kwargs)
        finally:
            dist.destroy_process_group()

    with _installed(world):
        return world.turns.run(be)


@contextlib.contextmanager
def _installed(world: FakeWorld) -> Iterator[None]:
    """Have threads that make a process group be ranks of ``world``."""
    assert not _worlds, "one world at a time"
    _worlds.append(world)
    _threaded._install_threaded_pg()
    _threaded.ProcessLocalGroup.reset()
    _c10d._set_thread_isolation_mode(True)
    chosen = {name: _choice(name) for name in select._CHOICES}
    try:
        with patch.dict(select._CHOICES, chosen), patch.object(_threaded, "Collective", _Torchs):
            yield
    finally:
        _c10d._set_thread_isolation_mode(False)
        _threaded._uninstall_threaded_pg()
        _worlds.pop()


def _choice(name: str) -> Callable[[dist.ProcessGroup, torch.device], FakeTransport]:
    """What stands for the transport called ``name``."""

    def choose(group: dist.ProcessGroup, device: torch.device) -> FakeTransport:
        overlaps = name in ("c10d", "collectives")
        members = dist.get_process_group_ranks(group)
        return _worlds[-1].transport(members, (group.group_name, name), overlaps=overlaps)

    return choose


class _Torchs:
    """A collective of torch's process groups for threads, whose ranks take turns."""

    def __init__(self, world_size: int, collective: Any, pg: object) -> None:
        self._world_size = world_size
        self._collective = collective
        self._data: dict[int, object] = {}
        self._is_done = False

    def join(self, rank: int, data: object) -> Any:
        """Bring one rank's tensors; whoever comes last does the work of all."""
        self._data[rank] = data
        if len(self._data) == self._world_size:
            self._collective.work([self._data[each] for each in range(self._world_size)])
            self._is_done = True
        name = type(self._collective).__name__
        _worlds[-1].turns.wait_for(lambda: self._is_done, f"torch's {name}")
        return _threaded.ret_work(data)


def _create(store: object, rank: int, world_size: int, timeout: object) -> Any:
    return _threaded.ProcessLocalGroup(rank, world_size)


dist.Backend.register_backend(_BACKEND, _create, devices=["cpu"])
