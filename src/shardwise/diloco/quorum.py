"""Where replicas that come and go on their own meet, as a user says it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

TIMEOUT = 600.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """Replicas that are independent worlds, which come and go on their own.

    Pass one to :class:`~shardwise.diloco.DiLoCo` in place of a group, on every rank of the replica.
    The replicas have no process group in common: each has a default process group over its ranks
    alone, or none if it is a single process, and is started, stopped and restarted by itself. They
    meet at a :class:`~shardwise.diloco.QuorumServer`.

    Attributes:
        server: address and port of the server, such as ``"10.0.0.1:29400"``.
        replica: number of this replica, from 0; no two that run have the same.
        group: the ranks of this replica, in the order of its shards; ``None``: all of the default
            process group. If they are several, it needs a backend for tensors on the CPU.
        token: that of the server.
        timeout: seconds that an exchange may take, and that the server may be out of reach.
    """

    server: str
    replica: int
    group: dist.ProcessGroup | None = None
    token: str = ""
    timeout: float = TIMEOUT
