"""What one host is told of a job over several, and what that means to its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.launch.addresses import join, split
from shardwise.launch.errors import UserError


@dataclass(frozen=True)
class Nodes:
    """A job over several hosts, as its user describes it on each of them.

    Attributes:
        count: number of hosts.
        rank: of this host, 0 .. count - 1; host 0 is where ``address`` is.
        address: of host 0, a name or a number.
        port: where the hosts meet.
        timeout: seconds to wait for all hosts.
    """

    count: int
    rank: int
    address: str
    port: int
    timeout: float = 300.0

    @classmethod
    def of(
        cls, count: int | None, rank: int | None, rdzv: str | None, timeout: float
    ) -> Nodes | None:
        """Read ``--nnodes``, ``--node-rank``, ``--rdzv`` and ``--rdzv-timeout``.

        Returns:
            None where none of them asks for several hosts.

        Raises:
            UserError: one of them is missing, or out of range.
        """
        if count is None:
            for option, found in (("--node-rank", rank), ("--rdzv", rdzv)):
                if found is not None:
                    raise UserError(f"{option}: found without --nnodes, expected --nnodes N too")
            return None
        if count < 1:
            raise UserError(f"--nnodes: found {count}, expected 1 or more")
        if rank is None or not 0 <= rank < count:
            raise UserError(f"--node-rank: found {rank}, expected 0 to {count - 1}")
        where = split(rdzv or "")
        if where is None:
            raise UserError(
                f"--rdzv: found {rdzv}, expected HOST:PORT, of the host of rank 0; an IPv6 address "
                "in brackets, as [2001:db8::1]:29400"
            )
        if not timeout > 0:
            raise UserError(f"--rdzv-timeout: found {timeout}, expected a number above 0")
        return cls(count, rank, *where, timeout)

    @property
    def where(self) -> str:
        """``HOST:PORT``."""
        return join(self.address, self.port)


def spans_hosts(nodes: Nodes | None) -> bool:
    """Whether a job was asked for over several hosts."""
    return nodes is not None and nodes.count > 1


@dataclass(frozen=True)
class Share:
    """The ranks of one host among all ranks of a round.

    Attributes:
        first: rank of its first process.
        world_size: ranks of all hosts.
        address: where rank 0 serves the store.
        port: where, on that host.
        interface: the network interface to the other hosts; None: not found.
    """

    first: int
    world_size: int
    address: str
    port: int
    interface: str | None
