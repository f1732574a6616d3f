"""What carries bytes between ranks, and what is known about who they are.

Transports of all kinds are made of the same parts, in a training and in a rehearsal of one. Only
what is below them differs: a rehearsed rank is alone, so it has another :class:`Carrier`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise._torch.c10d import coalesced
from shardwise.base.devices import Backend
from shardwise.transport import hosts
from shardwise.transport.base import Transport
from shardwise.transport.peers import Peers
from shardwise.transport.runner import Turn
from shardwise.transport.shm.arena import Arena, PageMap
from shardwise.transport.shm.handshake import SharedMemoryUnavailableError, shake_hands
from shardwise.transport.shm.transport import ShmTransport
from shardwise.transport.waiter import Launched


@dataclass(frozen=True)
class Collective:
    """A collective that is ready to start.

    Attributes:
        tensor: what it writes to. The function's own arguments do not say: a tool may have replaced
            it by a ``functools.partial`` that puts other arguments first.
        start: starts it; only its ``async_op`` is missing.
    """

    tensor: torch.Tensor
    start: Callable[..., dist.Work]

    @classmethod
    def of(
        cls, function: Callable[..., dist.Work], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Collective:
        """Prepare ``function(tensor, *args, **kwargs)``."""
        return cls(tensor, functools.partial(function, tensor, *args, **kwargs))


class Ends(Protocol):
    """Where messages leave and arrive: a process group, as far as it is used here."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work | None:
        """Post a message."""

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work | None:
        """Post memory for one."""


class Carrier:
    """The process groups of ``torch.distributed``, and memory that ranks of a host share."""

    def backend(self, peers: Peers, device: torch.device) -> Backend:
        """Find the backend of a process group for a device.

        Raises:
            ValueError: there is none.
        """
        return peers.backend(device)

    def share_memory(self, peers: Peers) -> Transport | str:
        """Make the transport of ranks that share memory, or say why they cannot.

        All ranks have to meet at once, so this happens once in the life of a process group: not
        whenever a transport is needed again, which depends on when each rank has let go of the last
        one.
        """
        try:
            return ShmTransport(peers, shake_hands(peers), Arena, [peers.rank], PageMap())
        except SharedMemoryUnavailableError as error:
            return str(error)

    def announce(self, peers: Peers, wire: str) -> None:
        """Tell the others on which host this rank is, and its wire."""
        hosts.announce(peers, wire)

    def announced(self, peers: Peers) -> Sequence[hosts.Announced]:
        """Return what the ranks of a group have announced."""
        return hosts.announced(peers)

    def ends(self, group: dist.ProcessGroup) -> Ends:
        """Return where messages between the ranks of a group leave and arrive."""
        return group

    def watches(self, backend: Backend) -> bool:
        """Whether peers are watched while collectives on the host are waited for."""
        return backend.sends_messages

    def launch(self, together: Sequence[Collective]) -> Launched:
        """Launch a collective."""
        (call,) = together
        return call.start(async_op=True)

    def launch_together(self, group: dist.ProcessGroup, calls: Sequence[Collective]) -> Launched:
        """Launch several collectives at once."""
        with coalesced(group) as work:
            for call in calls:
                call.start(async_op=False)
        return work

    def numbers(self, received: torch.Tensor, mine: int) -> list[int]:
        """Read the number that each rank has sent; ``mine`` is that of this rank."""
        return [int(number) for number in received.tolist()]

    def turn(self, backend: Backend) -> Turn:
        """Decide who begins second steps: a thread if that may be at any time."""
        return Turn.THREAD if backend.sends_messages else Turn.NEXT_CALL

    def turn_over_hosts(self, backend: Backend) -> Turn:
        """Decide who takes the steps that follow waits for other hosts."""
        return self.turn(backend)


_current = Carrier()


def carrier() -> Carrier:
    """Return what transports of this process are made on."""
    return _current


@contextlib.contextmanager
def carried_by(other: Carrier) -> Iterator[None]:
    """Make all transports of this process on another carrier until the end of the block."""
    global _current
    before, _current = _current, other
    try:
        yield
    finally:
        _current = before
