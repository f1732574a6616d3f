"""Run a function on several ranks, each a thread of this process, and collect what they return.

    def each_rank(rank: int, world_size: int, scale: float) -> float:
        value = torch.tensor(scale * rank)
        torch.distributed.all_reduce(value)
        return value.item()

    assert run_threads(each_rank, 2, 10.0) == [10.0, 10.0]

This is :func:`tests.harness.run_ranks` for tests of logic: no process is started. Whatever
transport a group of parameters asks for, it gets the fake one of :mod:`tests.transport.fake`. All
ranks are on one host, or on those of :func:`on_hosts`.
``torch.distributed`` itself runs on torch's process groups for threads. Ranks have no environment
variables of their own, and what one of them patches is patched for all.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.testing._internal.distributed import multi_threaded_pg

from shardwise.transport import select
from shardwise.transport.carrier import Announced, Carrier, carried_by
from shardwise.transport.peers import Peers
from tests.transport.fake import Box, FakeTransport, FakeWorld

#: The name by which torch knows that meshes of several ranks are in one process.
_BACKEND = "threaded"
# Torch's own helpers for tests have no types.
_threaded: Any = multi_threaded_pg
_c10d: Any = torch._C._distributed_c10d
_guard_devices: Any = torch._C._ensureCUDADeviceGuardSet

if not hasattr(_threaded.ThreadLocalWorld, "comms"):  # torch 2.11 forgot it
    _threaded.ThreadLocalWorld.comms = []

#: The world that runs, if one does: a process has one at a time.
_worlds: list[FakeWorld] = []
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


class _Threads(Carrier):
    """What carries between threads, which know where the others are."""

    def announce(self, peers: Peers, wire: str) -> None:
        """Do nothing."""

    def announced(self, peers: Peers) -> list[Announced]:
        """Return the hosts of :func:`on_hosts`."""
        return [Announced(_hosts[rank] if _hosts else "host", "") for rank in peers.members]


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
    """Make threads that create a process group ranks of ``world``."""
    assert not _worlds, "one world at a time"
    _worlds.append(world)
    excepthook = sys.excepthook  # every process group that is made wraps it once more
    _threaded._install_threaded_pg()
    _threaded.ProcessLocalGroup.reset()
    _c10d._set_thread_isolation_mode(True)
    chosen = {name: _choice(name) for name in select._CHOICES}
    # For fake tensors on hosts without a GPU. Torch 2.11 crashes where a second thread calls it.
    if not torch.cuda.is_available():
        _guard_devices()
    plugin = dist.Backend._BackendPlugin(_create, False)
    try:
        with (
            carried_by(_Threads()),
            patch.dict(select._CHOICES, chosen),
            patch.dict(dist.Backend._plugins, {_BACKEND.upper(): plugin}),
            patch.object(_threaded, "Collective", _Torchs),
            patch.object(torch._C, "_ensureCUDADeviceGuardSet", lambda: None),
            # Torch caches by mesh what depends on the rank, and knows meshes of several ranks apart
            # by these numbers. The system's would be given out again in the next world.
            patch.object(device_mesh, "threading", SimpleNamespace(get_ident=_number_of_rank)),
        ):
            yield
    finally:
        _c10d._set_thread_isolation_mode(False)
        _threaded._uninstall_threaded_pg()
        sys.excepthook = excepthook
        _worlds.pop()


def _number_of_rank() -> int:
    """Return a number that no rank of another world has."""
    world = _worlds[-1]
    return world.number * 1000 + world.turns.rank


def _choice(name: str) -> Callable[[dist.ProcessGroup, torch.device], FakeTransport]:
    """Return what creates the fake that stands for the transport called ``name``."""

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


class _Group(multi_threaded_pg.ProcessLocalGroup):
    """Torch's process group for threads, with messages from one rank to another."""

    def _get_backend(self, device: torch.device) -> Any:
        """Say that it has no abilities: torch 2.15 asks before it sends a batch of messages."""
        return SimpleNamespace(supports_coalescing=False, supports_tensor_alloc=lambda _: False)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        """Send copies, which wait for whoever receives them."""
        copies = [tensor.detach().clone() for tensor in tensors]
        _worlds[-1].box((self.pg_name, self.rank(), to, tag)).sent.append(copies)
        return _threaded.ret_work(tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Arrival:
        """Receive the next message that is not yet asked for."""
        return _Arrival(tensors, source, _worlds[-1].box((self.pg_name, source, self.rank(), tag)))


class _Arrival(dist.Work):
    """A message on its way."""

    def __init__(self, tensors: list[torch.Tensor], source: int, box: Box) -> None:
        super().__init__()
        self._tensors: list[torch.Tensor] | None = tensors
        self._source = source
        self._box = box
        self._number = box.asked_for
        box.asked_for += 1

    def wait(self, timeout: object = None) -> bool:
        """Wait for the message, and write it to the tensors."""
        tensors, self._tensors = self._tensors, None
        if tensors is not None:
            sent, number = self._box.sent, self._number
            doing = f"the receiving of a message from rank {self._source} of its group"
            _worlds[-1].turns.wait_for(lambda: len(sent) > number, doing)
            for tensor, copy in zip(tensors, sent[number], strict=True):
                tensor.detach().copy_(copy)
            sent[number] = []
        return True


def _create(store: object, rank: int, world_size: int, timeout: object) -> Any:
    return cast(Any, _Group)(rank, world_size)
