"""Which transport a mesh dimension gets.

By name, from the argument ``transport=`` or the environment variable ``SHARDWISE_TRANSPORT``:

    auto           shm if the ranks of the group can share memory, else c10d
    shm            shared memory, for CPU tensors and the ranks of one host
    c10d           torch.distributed, composed by backend: gloo, nccl, or else as collectives
    collectives    plain torch.distributed collectives, one per group and dtype

Where bytes leave the host, :mod:`shardwise.transport.encoded` encodes them, as a wire says, and
:mod:`shardwise.transport.two_levels` sends them once for each host.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.transport.base import LocalTransport, Transport
from shardwise.transport.carrier import carrier, check_wires, ranks_per_host
from shardwise.transport.peers import Peers, new_group
from shardwise.transport.wire import PLAIN, Wire

if TYPE_CHECKING:
    from shardwise.transport.all_to_all import AllToAll
    from shardwise.transport.custom import AllGather, ReduceScatter
    from shardwise.transport.encoded import EncodedTransport
    from shardwise.transport.runner import Runner

T = TypeVar("T")

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
    key = device, requested, PLAIN.common
    return _in_use(Peers(group), key, lambda: _CHOICES[requested](group, device))


@dataclass(frozen=True)
class ChannelOptions:
    """What is chosen of the collectives between the ranks of a mesh dimension.

    Attributes:
        transport: what they are made on; see :func:`select_transport`.
        wire: the formats of what leaves the host.
        all_gather: the user's own.
        reduce_scatter: the user's own.
    """

    transport: str | None = None
    wire: Wire = PLAIN.common
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None


def compose(
    group: dist.ProcessGroup | None,
    device: torch.device,
    options: ChannelOptions,
) -> Transport:
    """Return a transport of a mesh dimension: the same one as long as in use, unless it is custom.

    Bytes that do not leave the host are not encoded: nothing changes for ranks that share memory,
    or for devices of one host. If each host has as many ranks in a row, messages and encoded values
    cross once for each host; else, everything that a rank sends is encoded. A transport that was
    asked for by name, such as ``"c10d"``, counts as a network also on one host; only wires make
    two levels of it.

    Args:
        group: as for :func:`select_transport`.
        device: as there.
        options: what it consists of.

    Raises:
        ValueError: as there.
        PeerLostError: a rank was lost while hosts were compared.
        RanksDivergedError: ranks that share hosts have different wires.
    """
    made = select_transport(group, device, options.transport)
    if group is None or made.world_size == 1:
        return made
    if made.leaves_host:
        made = _over_hosts(made, group, device, options)
    if options.all_gather is None and options.reduce_scatter is None:
        return made
    from shardwise.transport.custom import CustomTransport

    return CustomTransport(made, group, options.all_gather, options.reduce_scatter)


def _over_hosts(
    plain: Transport, group: dist.ProcessGroup, device: torch.device, options: ChannelOptions
) -> Transport:
    peers, requested, wire = Peers(group), _checked(options.transport), options.wire
    carrier().announce(peers, str(wire))
    if wire.is_plain and not (requested == "auto" and plain.sends_to_each):
        return plain
    hosts = [each.host for each in carrier().announced(peers)]
    shares_hosts = ranks_per_host(hosts) not in (None, 1, len(hosts))
    if not shares_hosts and (wire.is_plain or (requested == "auto" and len(set(hosts)) == 1)):
        return plain

    def make() -> Transport:
        if shares_hosts:
            return _two_levels(peers, device, wire, requested)
        from shardwise.transport.runner import Runner

        runner = Runner(carrier().turn(carrier().backend(peers, device)))
        return _encoded(plain, group, device, wire, runner)

    return _in_use(peers, (device, requested, wire, shares_hosts), make)


def _encoded(
    plain: Transport, group: dist.ProcessGroup, device: torch.device, wire: Wire, runner: Runner
) -> EncodedTransport:
    from shardwise.transport.all_to_all import AllToAll
    from shardwise.transport.collectives import CollectivesTransport
    from shardwise.transport.encoded import EncodedTransport
    from shardwise.transport.gloo import GlooTransport

    log = plain.log if isinstance(plain, GlooTransport | CollectivesTransport) else None
    return EncodedTransport(plain, AllToAll(group, device, log), wire, device, runner)


def _two_levels(peers: Peers, device: torch.device, wire: Wire, requested: str) -> Transport:
    from shardwise.transport.runner import Runner
    from shardwise.transport.two_levels import TwoLevelTransport

    levels = peers.once(_levels)
    turn = carrier().turn_over_hosts(carrier().backend(peers, device))
    runner = levels.runners.setdefault(device, Runner(turn))
    across = select_transport(levels.across, device, "c10d" if requested == "auto" else requested)
    if not wire.is_plain:
        across = _encoded(across, levels.across, device, wire, runner)
    return TwoLevelTransport(
        across,
        select_transport(levels.gathers, device, requested),
        select_transport(levels.reductions, device, requested),
        device,
        runner,
    )


@dataclass(frozen=True)
class Levels:
    """The process groups of a dimension in which each host has as many ranks.

    Attributes:
        across: the ranks with this rank's number on all hosts.
        gathers: the ranks of this host.
        reductions: the same, in a group of their own: each is used in one thread.
        runners: what drives two levels, by device: for all wires, as they share a host's groups.
    """

    across: dist.ProcessGroup
    gathers: dist.ProcessGroup
    reductions: dist.ProcessGroup
    runners: dict[torch.device, Runner] = field(default_factory=dict)


def _levels(peers: Peers) -> Levels:
    """Make them, once in the life of a group: all of its ranks have to meet."""
    said = carrier().announced(peers)
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
    from shardwise.transport.collectives import CollectivesTransport, NcclTransport
    from shardwise.transport.gloo import GlooTransport

    backend = carrier().backend(Peers(group), device)
    if backend.sends_messages:
        return GlooTransport(group)
    if backend.coalesces and backend.gathers_in_place:
        return NcclTransport(group, backend)
    return CollectivesTransport(group, backend)


def all_to_all(group: dist.ProcessGroup, device: torch.device) -> AllToAll:
    """Return the all-to-all between the ranks of a process group, the same one while it is in use.

    Args:
        group: the process group.
        device: the device of what is sent.

    Raises:
        ValueError: the group has no backend for the device.
    """
    from shardwise.transport.all_to_all import AllToAll

    return _in_use(Peers(group), (device, "all-to-all"), lambda: AllToAll(group, device))


def _collectives(group: dist.ProcessGroup, device: torch.device) -> Transport:
    from shardwise.transport.collectives import CollectivesTransport

    return CollectivesTransport(group, carrier().backend(Peers(group), device))


def _shm(group: dist.ProcessGroup, device: torch.device) -> Transport:
    if device.type != "cpu":
        raise ValueError(f"transport 'shm' is for CPU tensors, not for tensors on {device.type}")
    found = Peers(group).once(carrier().share_memory)
    if isinstance(found, str):
        raise ValueError(f"transport 'shm' is not available here: {found}")
    return found


def _fastest(group: dist.ProcessGroup, device: torch.device) -> Transport:
    if carrier().backend(Peers(group), device).shares_memory:
        from shardwise.transport.shm.handshake import address_limit

        found = Peers(group).once(carrier().share_memory)
        if not isinstance(found, str):
            return found
        if address_limit() is not None:
            warnings.warn(
                f"ranks send messages, which is slower than shared memory: {found}. Raise the "
                "limit with 'ulimit -v unlimited', or pass transport='c10d' to expect messages",
                stacklevel=2,
            )
    return c10d_transport(group, device)


def _kept(peers: Peers) -> weakref.WeakValueDictionary[tuple[object, ...], Any]:
    """Keep what is in use of a process group, but not alive."""
    return weakref.WeakValueDictionary()


def _in_use(peers: Peers, key: tuple[object, ...], make: Callable[[], T]) -> T:
    """Return what is in use of a process group, or make it.

    Parameter groups that are sharded over the same ranks share a transport: its message tags, its
    scratch memory and what it lost belong to the process group.
    """
    kept = peers.once(_kept)
    found: T | None = kept.get(key)
    if found is None:
        found = kept[key] = make()
    return found


_CHOICES: dict[str, Callable[[dist.ProcessGroup, torch.device], Transport]] = {
    "auto": _fastest,
    "shm": _shm,
    "c10d": c10d_transport,
    "collectives": _collectives,
}
