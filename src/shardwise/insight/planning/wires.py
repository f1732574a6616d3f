"""Transports of a rank that is alone: they allocate and copy as always, and send nothing.

A rehearsal runs one rank of a world without other processes. Its transports are the runtime's own,
so that their buckets, scratch memory and copies are those of a training. Only what carries the
bytes is another, which does nothing.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from shardwise.base import devices, libc, observe
from shardwise.base.devices import Backend
from shardwise.base.observe import Memory
from shardwise.frontends.torch_groups import Launch
from shardwise.transport.base import FinishedWork, Transport
from shardwise.transport.carrier import Announced, Carrier, Collective, Ends, carried_by
from shardwise.transport.peers import Peers
from shardwise.transport.runner import Turn
from shardwise.transport.shm.arena import Arena, Window
from shardwise.transport.shm.handshake import Connections
from shardwise.transport.shm.transport import ShmTransport
from shardwise.transport.waiter import Launched

observe.ALLOCATES[__file__] = Memory.TRANSPORT


@contextlib.contextmanager
def simulated(backend: Backend, *, ranks_per_host: int) -> Iterator[None]:
    """Make transports of rehearsed ranks until the end of the block.

    They are chosen as in a training: by the argument ``transport`` of ``fully_shard``, by the
    backend, and by who shares a host.

    Args:
        backend: of the process groups that are planned for; see
            :func:`shardwise.base.devices.backend_of`.
        ranks_per_host: the number of consecutive ranks that share a host.
    """
    with carried_by(_RehearsedCarrier(backend, ranks_per_host)), warnings.catch_warnings():
        # Tensors without memory have no address, and nothing here needs one.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


class TorchCollectives:
    """The collectives of torch's own FSDP2 in a rehearsal: see :class:`_GlooWork`.

    Args:
        backend: of the process groups that are planned for.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def launch(
        self, launch: Launch, tensors: tuple[torch.Tensor, torch.Tensor], peers: Peers, doing: str
    ) -> None:
        """Launch a collective of a world without other processes."""
        work = _GlooWork(tensors) if self._backend.name == devices.GLOO.name else None
        launch(False)
        del work


class _RehearsedCarrier(Carrier):
    """What carries nothing: messages and collectives are prepared, and not sent."""

    def __init__(self, backend: Backend, ranks_per_host: int) -> None:
        self._backend = backend
        self._ranks_per_host = ranks_per_host

    def backend(self, peers: Peers, device: torch.device) -> Backend:
        return self._backend

    def share_memory(self, peers: Peers) -> Transport | str:
        hosts = {rank // self._ranks_per_host for rank in peers.members}
        if len(hosts) > 1:
            each = f"with {self._ranks_per_host} ranks on each"
            return f"its ranks are on {len(hosts)} hosts, {each}"
        if not libc.has_futex():
            return "shared memory is for Linux on x86-64"
        # The others are always as far as this rank.
        written, connections = range(peers.size), Connections({}, Arena.create())
        return ShmTransport(peers, connections, _SimulatedArena, written, pagemap=None)

    def announce(self, peers: Peers, wire: str) -> None:
        pass

    def announced(self, peers: Peers) -> Sequence[Announced]:
        return [Announced(f"host {rank // self._ranks_per_host}", "") for rank in peers.members]

    def ends(self, group: dist.ProcessGroup) -> Ends:
        return _LooseEnds()

    def watches(self, backend: Backend) -> bool:
        return False  # no thread waits for messages: there are none

    def launch(
        self, calls: Sequence[Collective], group: dist.ProcessGroup | None = None
    ) -> Launched:
        if self._backend.name != devices.GLOO.name or group is not None:
            return FinishedWork()
        (call,) = calls
        return _GlooWork(getattr(call.start, "args", ()))

    def numbers(self, received: torch.Tensor, mine: int) -> list[int]:
        """Let the others have the number of this rank."""
        return [mine] * received.numel()

    def turn(self, backend: Backend) -> Turn:
        return Turn.CALL if backend.sends_messages else Turn.NEXT_CALL

    def turn_over_hosts(self, backend: Backend) -> Turn:
        return Turn.WAIT


class _LooseEnds:
    """Where messages are posted that are not waited for."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> None:
        pass

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> None:
        pass


class _GlooWork:
    """A collective of gloo: what torch's process group copies for it.

    A reduce-scatter works on a copy of what it reads, until the work is dropped. For a gather there
    is a copy of the result while it is launched, and one in the thread of gloo that does the work.
    Seen in the allocations of real collectives of torch 2.13. What gloo allocates itself, a seventh
    of a tensor that it reduces, is left out.

    Args:
        tensors: those of the call: the result, and what is sent unless it is the result.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        result, *sent = tensors
        self._copies: list[torch.Tensor] = []
        for each in sent:
            if each.nbytes > result.nbytes:
                self._copies.append(_copy_of_gloo(each))
            else:
                _copy_of_gloo(result)

    def wait(self) -> None:
        """Return at once."""


@observe.allocates(Memory.OTHER)
def _copy_of_gloo(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


class _SimulatedArena(Arena):
    """A range of a file, of which nothing is ever written: its windows have no memory.

    What is reported as in use is allocated as a tensor, so that what counts tensors sees it.
    """

    def __init__(self, fd: int, first: int, last: int) -> None:
        super().__init__(fd, first, last)
        self._pages: dict[Memory, torch.Tensor] = {}

    def window(self, length: int) -> Window:
        return _EmptyWindow(length)

    def report(self, kind: Memory, name: str, nbytes: int) -> None:
        super().report(kind, name, nbytes)
        if kind not in self._pages:
            make = _shared_full_parameters if kind is Memory.FULL_PARAMETERS else _shared_staging
            self._pages[kind] = make()
        storage = self._pages[kind].untyped_storage()
        storage.resize_(storage.nbytes() + nbytes)


@observe.allocates(Memory.FULL_PARAMETERS)
def _shared_full_parameters() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _shared_staging() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


class _EmptyWindow(Window):
    """A window on nothing. Its tensors share a storage of no bytes."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.address = 0
        self.keeps: object = None
        self._nothing = torch.empty(0, dtype=torch.uint8)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        made = self._nothing.view(dtype).as_strided((numel,), (1,), offset // dtype.itemsize)
        self._nothing.untyped_storage().resize_(0)  # it has grown
        return made

    def forget_writes(self) -> None:
        """Do nothing: there are none."""

    def _open(self, fd: int, at: int, flags: int) -> None:
        pass

    def _protect(self, protection: int) -> None:
        pass
