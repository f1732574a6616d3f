"""On which host a process is, and which ranks of a group share one."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise._torch import c10d
from shardwise.base.errors import RanksDivergedError
from shardwise.transport.peers import Peers, polling

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")
_KEY = "shardwise/host"
_DOING = "the comparison of hosts for a wire"


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


def announce(peers: Peers, wire: str) -> None:
    """Tell the others on which host this rank is, the first time, without waiting for them."""
    announced_wires = peers.once(_announced_wires)
    if not announced_wires:
        announced_wires.append(wire)
        if not c10d.has_shared_store(peers.group):
            return  # a simulated world: no other rank is there
        peers.store.set(f"{_KEY}/{peers.rank}", f"{_name()}\n{wire}")


def announced(peers: Peers) -> Sequence[Announced]:
    """Return what all ranks of the group have announced, in rank order.

    Raises:
        PeerLostError: one of them is gone, or did not come within the timeout of the group.
    """
    return peers.once(_read)


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
        store = peers.store
        keys = {rank: f"{_KEY}/{rank}" for rank in range(peers.size)}
        have_come = polling(lambda: bool(store.check(list(keys.values()))))
        peers.watch(_DOING).wait(
            have_come, lambda: [rank for rank, key in keys.items() if not store.check([key])]
        )
        return [Announced(*store.get(key).decode().split("\n")) for key in keys.values()]


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
