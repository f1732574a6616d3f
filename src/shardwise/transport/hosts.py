"""On which host a process is, and whether the ranks of a group are on one."""

from __future__ import annotations

import platform
from pathlib import Path

from shardwise.transport.peers import Peers, polling

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")
_KEY = "shardwise/host"
_DOING = "the comparison of hosts for a wire"


def announce_host(peers: Peers) -> None:
    """Tell the others on which host this rank is, without waiting for them."""
    peers.once(_announce)


def spans_hosts(peers: Peers) -> bool:
    """Whether ranks of the group are on different hosts; each of them has announced its own.

    Ranks in different network namespaces of one host count as being on several: between them is a
    network.

    Raises:
        PeerLostError: one of them is gone, or did not come within the timeout of the group.
    """
    return peers.once(_compare)


def _announce(peers: Peers) -> None:
    peers.store.set(f"{_KEY}/{peers.rank}", _name())


def _compare(peers: Peers) -> bool:
    announce_host(peers)
    with peers.collective(_DOING):  # the store may go with the rank that keeps it
        store = peers.store
        keys = {rank: f"{_KEY}/{rank}" for rank in range(peers.size)}
        have_come = polling(lambda: bool(store.check(list(keys.values()))))
        peers.watch(_DOING).wait(
            have_come, lambda: [rank for rank, key in keys.items() if not store.check([key])]
        )
        return len({store.get(key) for key in keys.values()}) > 1


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
