"""What carries bytes between ranks, and what is known about who they are.

Transports of all kinds are made of the same parts, in a training and in a rehearsal of one. Only
what is below them differs: a rehearsed rank is alone, so it has another :class:`Carrier`.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from shardwise._torch import c10d
from shardwise.base.devices import Backend
from shardwise.base.errors import RanksDivergedError
from shardwise.transport.base import Transport
from shardwise.transport.peers import Peers

if TYPE_CHECKING:
    from shardwise.transport.runner import Turn
    from shardwise.transport.waiter import Launched

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")
_KEY = "shardwise/host"
_DOING = "the comparison of hosts"


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


@dataclass(frozen=True)
class Announced:
    """What a rank tells the others of its process group.

    Attributes:
        host: a name that the ranks of a host, and no others, have in common. Ranks in different
            network namespaces of one host count as being on several: between them is a network.
        wire: the first wire that it has for the group.
    """

    host: str
    wire: str


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
        from shardwise.transport.shm.arena import Arena, PageMap
        from shardwise.transport.shm.handshake import SharedMemoryUnavailableError, shake_hands
        from shardwise.transport.shm.transport import ShmTransport

        try:
            return ShmTransport(peers, shake_hands(peers), Arena, [peers.rank], PageMap())
        except SharedMemoryUnavailableError as error:
            return str(error)

    def announce(self, peers: Peers, wire: str) -> None:
        """Tell the others on which host this rank is, the first time, without waiting for them."""
        announced_wires = peers.once(_announced_wires)
        if not announced_wires:
            announced_wires.append(wire)
            if c10d.has_shared_store(peers.group):  # else no other rank is there
                peers.store.set(f"{_KEY}/{peers.rank}", f"{_name()}\n{wire}")

    def announced(self, peers: Peers) -> Sequence[Announced]:
        """Return what all ranks of the group have announced, in rank order.

        Raises:
            PeerLostError: one of them is gone, or did not come within the timeout of the group.
        """
        return peers.once(_read)

    def ends(self, group: dist.ProcessGroup) -> Ends:
        """Return where messages between the ranks of a group leave and arrive."""
        return group

    def check_threads(self) -> None:
        """Check that other threads of a rank may call collectives.

        Raises:
            RuntimeError: they may not.
        """

    def watches(self, backend: Backend) -> bool:
        """Whether peers are watched while collectives on the host are waited for."""
        return backend.sends_messages

    def launch(
        self, calls: Sequence[Collective], group: dist.ProcessGroup | None = None
    ) -> Launched:
        """Launch a collective; or several at once, over a group whose backend does that."""
        if group is None:
            (call,) = calls
            return call.start(async_op=True)
        with c10d.coalesced(group) as work:
            for call in calls:
                call.start(async_op=False)
        return work

    def numbers(self, received: torch.Tensor, mine: int) -> list[int]:
        """Read the number that each rank has sent; ``mine`` is that of this rank."""
        return [int(number) for number in received.tolist()]

    def turn(self, backend: Backend) -> Turn:
        """Decide who begins second steps: a thread if that may be at any time."""
        from shardwise.transport.runner import Turn

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
    before = _current
    try:
        try:
            _current = other
            yield
        finally:
            _current = before
    finally:
        if _current is other:  # Ctrl-C has ended the first attempt
            _current = before


# -- who is on which host --------------------------------------------------------------------------


def ranks_per_host(hosts: Sequence[str]) -> int | None:
    """Return on how many ranks in a row each host has; ``None`` if some have others.

    Args:
        hosts: by rank.
    """
    local = sum(host == hosts[0] for host in hosts)
    rows = [set(hosts[first : first + local]) for first in range(0, len(hosts), local)]
    is_even = len(hosts) % local == 0 and all(len(row) == 1 for row in rows)
    return local if is_even and len(set.union(*rows)) == len(rows) else None


def check_wires(peers: Peers, said: Sequence[Announced]) -> None:
    """Check that all ranks have the same wire before they meet because of it.

    Raises:
        RanksDivergedError: they have not.
    """
    for rank, theirs in enumerate(said):
        if theirs.wire != said[peers.rank].wire:
            members = peers.members
            raise RanksDivergedError(
                f"ranks have diverged: between ranks {members}, rank {members[peers.rank]} has the "
                f"wire {said[peers.rank].wire} and rank {members[rank]} has {theirs.wire}. All "
                "ranks have to shard the same modules in the same order, with the same wires"
            )


def _announced_wires(peers: Peers) -> list[str]:
    """Keep what this rank has announced."""
    return []


def _read(peers: Peers) -> Sequence[Announced]:
    if not c10d.has_shared_store(peers.group):
        return [Announced(_name(), peers.once(_announced_wires)[0])] * peers.size
    with peers.collective(_DOING):  # the store may go with the rank that keeps it
        found = peers.read({rank: f"{_KEY}/{rank}" for rank in range(peers.size)}, _DOING)
        return [Announced(*found[rank].split("\n")) for rank in range(peers.size)]


def host_by(namespace: str) -> str:
    """Name this host and one of its namespaces: the same for all processes that share both.

    Args:
        namespace: the kind of namespace, as the kernel calls it: ``"net"``, ``"time"``.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return platform.node()
    try:
        return f"{boot} {(_NAMESPACES / namespace).readlink()}"
    except OSError:  # a kernel without such namespaces
        return boot


def _name() -> str:
    return host_by("net")
