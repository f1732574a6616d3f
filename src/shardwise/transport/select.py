"""Which transport a mesh dimension gets.

By name, from the argument ``transport=`` or the environment variable ``SHARDWISE_TRANSPORT``:

    auto           shm if the ranks of the group can share memory, else c10d
    shm            shared memory, for CPU tensors and the ranks of one host
    c10d           torch.distributed, composed by backend: gloo, nccl, or else as collectives
    collectives    plain torch.distributed collectives, one per group and dtype

A :class:`~shardwise.Wire` puts :mod:`shardwise.transport.encoded` around it, where bytes leave the
host.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.devices import Backend
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Transport
from shardwise.transport.collective_log import CollectiveLog
from shardwise.transport.collectives import CollectivesTransport, NcclTransport
from shardwise.transport.encoded import EncodedTransport
from shardwise.transport.gloo import GlooTransport
from shardwise.transport.hosts import (
    Announced,
    announce,
    announced,
    check_wires,
    ranks_per_host,
)
from shardwise.transport.local import LocalTransport
from shardwise.transport.peers import Peers, new_group
from shardwise.transport.runner import Runner, Turn
from shardwise.transport.shm.handshake import (
    SharedMemoryUnavailableError,
    address_limit,
    shake_hands,
)
from shardwise.transport.shm.transport import ShmTransport
from shardwise.transport.two_levels import TwoLevelTransport
from shardwise.transport.wire import Wire

#: The environment variable that is read if no transport is requested by argument.
VARIABLE = "SHARDWISE_TRANSPORT"


def select_transport(
    group: dist.ProcessGroup | None, device: torch.device, requested: str | None = None
) -> Transport:
    """Return the transport of one mesh dimension, the same one as long as it is in use.

    Args:
        group: the process group of the dimension; ``None`` if it has one rank only.
        device: the device of the full tensors.
        requested: ``"auto"`` (the fastest that is available), ``"shm"`` (shared memory, for the
            ranks of one host), ``"c10d"`` (``torch.distributed``, composed by backend),
            ``"collectives"`` (plain ``torch.distributed`` collectives), or ``None``: the
            environment variable ``SHARDWISE_TRANSPORT`` decides, and ``"auto"`` if it is unset or
            empty. A dimension of one rank needs no collective and always gets the local transport.

    Raises:
        ValueError: the name is unknown; the group has no backend for the device; or shared memory
            is requested but unavailable, with the reason.
        PeerLostError: a rank was lost in the handshake of shared memory.
    """
    requested = _checked(requested)
    if group is None or group.size() == 1:
        return LocalTransport()
    in_use = Peers(group).once(_in_use)
    transport = in_use.get((device, requested))
    if transport is None:
        transport = in_use[device, requested] = _CHOICES[requested](group, device)
    return transport


def encoded_transport(
    group: dist.ProcessGroup | None,
    device: torch.device,
    wire: Wire,
    requested: str | None = None,
) -> Transport:
    """Return the transport of a mesh dimension that has a wire, the same one as long as in use.

    Bytes that do not leave the host are not encoded: nothing changes for ranks that share memory,
    or for devices of one host. If each host has as many ranks in a row, values cross between hosts
    once for each of them; else, everything that a rank sends is encoded. A transport that was asked
    for by name, such as ``"c10d"``, counts as a network also on one host.

    Args:
        group: as for :func:`select_transport`.
        device: as there.
        wire: the formats on the wire.
        requested: as there.

    Raises:
        ValueError: as there.
        PeerLostError: a rank was lost while hosts were compared.
        RanksDivergedError: ranks that share hosts have different wires.
    """
    inner = select_transport(group, device, requested)
    if group is None or isinstance(inner, LocalTransport | ShmTransport):
        return inner
    peers, requested = Peers(group), _checked(requested)
    _factory.announce(peers, str(wire))
    if wire.is_plain:
        return inner
    hosts = [each.host for each in _factory.announced(peers)]
    if requested == "auto" and len(set(hosts)) == 1:
        return inner
    in_use = peers.once(_encoded_in_use)
    key = (device, requested, wire)
    found = in_use.get(key)
    if found is None:
        if ranks_per_host(hosts) in (None, 1, len(hosts)):
            found = _one_level(group, device, wire, inner, _factory.background)
        else:
            found = _two_levels(peers, device, wire, requested)
        in_use[key] = found
    return found


def _one_level(
    group: dist.ProcessGroup,
    device: torch.device,
    wire: Wire,
    inner: Transport,
    background: Callable[[AllToAll], Runner],
) -> EncodedTransport:
    log = inner.log if isinstance(inner, GlooTransport | CollectivesTransport) else None
    exchange = _factory.all_to_all(group, device, log)
    return EncodedTransport(inner, exchange, wire, device, background(exchange))


def _two_levels(
    peers: Peers, device: torch.device, wire: Wire, requested: str
) -> TwoLevelTransport:
    levels, followers = peers.once(_levels), peers.once(_followers)

    def follower(exchange: AllToAll) -> Runner:
        return followers.setdefault(device, _factory.follower(exchange))

    between = select_transport(levels.across, device, "c10d" if requested == "auto" else requested)
    return TwoLevelTransport(
        _one_level(levels.across, device, wire, between, follower),
        select_transport(levels.gathers, device, requested),
        select_transport(levels.reductions, device, requested),
        device,
    )


@dataclass(frozen=True)
class Levels:
    """The process groups of a dimension in which each host has as many ranks.

    Attributes:
        across: the ranks with this rank's number on all hosts.
        gathers: the ranks of this host.
        reductions: the same, in a group of their own: each is used in one thread.
    """

    across: dist.ProcessGroup
    gathers: dist.ProcessGroup
    reductions: dist.ProcessGroup


def _levels(peers: Peers) -> Levels:
    """Make them, once in the life of a group: all of its ranks have to meet."""
    said = _factory.announced(peers)
    check_wires(peers, said)
    local = ranks_per_host([each.host for each in said])
    assert local is not None
    members, number = peers.members, peers.rank % local
    own = members[peers.rank - number :][:local]
    made = Levels(new_group(members[number::local]), new_group(own), new_group(own))
    Peers(made.across).name_dimension(f"{peers.dimension} across hosts".strip())
    for group in (made.gathers, made.reductions):
        Peers(group).name_dimension(f"{peers.dimension} inside a host".strip())
    return made


def _followers(peers: Peers) -> dict[torch.device, Runner]:
    """Keep who follows up, by device: one for all wires, as they share what is inside a host."""
    return {}


def _checked(requested: str | None) -> str:
    """Return the name of the transport that is asked for, by argument or by the environment."""
    source = "transport"
    if requested is None:
        source, requested = VARIABLE, os.environ.get(VARIABLE) or "auto"
    if requested not in _CHOICES:
        raise ValueError(f"{source}={requested!r} is unknown: choose one of {', '.join(_CHOICES)}")
    return requested


def c10d_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Make the fastest ``torch.distributed`` transport that is known for the backend.

    Args:
        group: the process group of a mesh dimension.
        device: the device of the full tensors. If the group has several backends, such as
            ``"cpu:gloo,cuda:nccl"``, the one for this type of device counts.

    Raises:
        ValueError: the group has no backend for the device.
    """
    backend = backend_for(group, device)
    if backend.sends_messages:
        return _factory.gloo(group)
    if backend.coalesces and backend.gathers_in_place:
        return _factory.nccl(group, backend)
    return _factory.collectives(group, backend)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """Return the backend of a process group for a device; in a rehearsal, the planned one.

    Raises:
        ValueError: the group has no backend for the device.
    """
    return _factory.backend(group, device)


def all_to_all(group: dist.ProcessGroup, device: torch.device) -> AllToAll:
    """Return the all-to-all between the ranks of a process group, the same one while it is in use.

    Args:
        group: the process group.
        device: the device of what is sent.

    Raises:
        ValueError: the group has no backend for the device.
    """
    in_use = Peers(group).once(_all_to_alls)
    found = in_use.get(device)
    if found is None:
        found = in_use[device] = _factory.all_to_all(group, device, None)
    return found


def _collectives(group: dist.ProcessGroup, device: torch.device) -> Transport:
    return _factory.collectives(group, backend_for(group, device))


def _shm(group: dist.ProcessGroup, device: torch.device) -> Transport:
    if device.type != "cpu":
        raise ValueError(f"transport 'shm' is for CPU tensors, not for tensors on {device.type}")
    found = Peers(group).once(_factory.share_memory)
    if isinstance(found, str):
        raise ValueError(f"transport 'shm' is not available here: {found}")
    return found


def _fastest(group: dist.ProcessGroup, device: torch.device) -> Transport:
    if backend_for(group, device).sends_messages:
        found = Peers(group).once(_factory.share_memory)
        if not isinstance(found, str):
            return found
        if address_limit() is not None:
            warnings.warn(
                f"ranks send messages, which is slower than shared memory: {found}. Raise the "
                "limit with 'ulimit -v unlimited', or pass transport='c10d' to expect messages",
                stacklevel=2,
            )
    return c10d_transport(group, device)


def _share_memory(peers: Peers) -> ShmTransport | str:
    """Make the transport of ranks that share memory, or say why they cannot.

    All ranks have to meet at once, so this happens once in the life of a process group: not
    whenever a transport is needed again, which depends on when each rank has let go of the last
    one.
    """
    try:
        return ShmTransport.over(peers, shake_hands(peers))
    except SharedMemoryUnavailableError as error:
        return str(error)


def _backend(group: dist.ProcessGroup, device: torch.device) -> Backend:
    return Peers(group).backend(device)


def _all_to_all(
    group: dist.ProcessGroup, device: torch.device, log: CollectiveLog | None
) -> AllToAll:
    return AllToAll(group, device, log=log)


def _background(exchange: AllToAll) -> Runner:
    """Make a thread if its calls may come at any time; else, the next call does its work."""
    return Runner(Turn.THREAD if exchange.sends_messages else Turn.NEXT_CALL)


@dataclass(frozen=True)
class TransportFactory:
    """What transports are made from. A rehearsal puts another one in place, for it is alone.

    Attributes:
        backend: finds the backend of a process group for a device.
        share_memory: makes the transport of ranks that share memory, or says why they cannot.
        gloo: makes the transport of a group that sends messages.
        nccl: makes the transport of a group that gathers in place and coalesces.
        collectives: makes the transport of any other group.
        all_to_all: makes the all-to-all of any group, with the log of a transport if it has one.
        background: makes what works while the program computes, beside an all-to-all.
        follower: the same, for what follows waits for other hosts.
        announce: tells the others on which host this rank is, and its wire.
        announced: returns what the ranks of a group have told.
    """

    backend: Callable[[dist.ProcessGroup, torch.device], Backend] = _backend
    share_memory: Callable[[Peers], Transport | str] = _share_memory
    gloo: Callable[[dist.ProcessGroup], Transport] = GlooTransport
    nccl: Callable[[dist.ProcessGroup, Backend], Transport] = NcclTransport
    collectives: Callable[[dist.ProcessGroup, Backend], Transport] = CollectivesTransport
    all_to_all: Callable[[dist.ProcessGroup, torch.device, CollectiveLog | None], AllToAll] = (
        _all_to_all
    )
    background: Callable[[AllToAll], Runner] = _background
    follower: Callable[[AllToAll], Runner] = _background
    announce: Callable[[Peers, str], None] = announce
    announced: Callable[[Peers], Sequence[Announced]] = announced


_factory = TransportFactory()


@contextlib.contextmanager
def made_by(factory: TransportFactory) -> Iterator[None]:
    """Make all transports of this process with another factory until the end of the block."""
    global _factory
    before, _factory = _factory, factory
    try:
        yield
    finally:
        _factory = before


_InUse = weakref.WeakValueDictionary[tuple[torch.device, str], Transport]


def _in_use(peers: Peers) -> _InUse:
    """Keep the transports in use, by device and request.

    Parameter groups that are sharded over the same ranks share one: its message tags and its
    scratch memory belong to the process group. This keeps no transport alive.
    """
    return weakref.WeakValueDictionary()


def _encoded_in_use(
    peers: Peers,
) -> weakref.WeakValueDictionary[tuple[torch.device, str, Wire], Transport]:
    """Keep the transports with wires in use: what they lost belongs to all that share one."""
    return weakref.WeakValueDictionary()


def _all_to_alls(peers: Peers) -> weakref.WeakValueDictionary[torch.device, AllToAll]:
    """Keep the all-to-alls in use, by device. This keeps none alive."""
    return weakref.WeakValueDictionary()


_CHOICES: dict[str, Callable[[dist.ProcessGroup, torch.device], Transport]] = {
    "auto": _fastest,
    "shm": _shm,
    "c10d": c10d_transport,
    "collectives": _collectives,
}
