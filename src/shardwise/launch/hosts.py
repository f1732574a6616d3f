"""What one host is told of a job over several, and what that means to its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwise.launch.addresses import join, split
from shardwise.launch.errors import UserError

UNNUMBERED = -1  # rank of a host that host 0 gives one


@dataclass(frozen=True)
class Nodes:
    """A job over several hosts, as its user describes it on each of them.

    Attributes:
        count: number of hosts; the most there may be where ``least`` is given.
        rank: of this host, 0 .. count - 1; host 0 is where ``address`` is. :data:`UNNUMBERED`:
            host 0 chooses, where ``least`` is given.
        address: of host 0, a name or a number.
        port: where the hosts meet.
        timeout: seconds to wait for all hosts, or for ``least`` of them.
        least: the fewest hosts that the job goes on with; others may come later. None: hosts are
            ``count`` from the beginning, and none come later.
    """

    count: int
    rank: int
    address: str
    port: int
    timeout: float = 300.0
    least: int | None = None

    @classmethod
    def of(
        cls, nnodes: int | str | None, rank: int | None, rdzv: str | None, timeout: float
    ) -> Nodes | None:
        """Read ``--nnodes``, ``--node-rank``, ``--rdzv`` and ``--rdzv-timeout``.

        Returns:
            None where none of them asks for several hosts.

        Raises:
            UserError: one of them is missing, or out of range.
        """
        if nnodes is None:
            for option, found in (("--node-rank", rank), ("--rdzv", rdzv)):
                if found is not None:
                    raise UserError(f"{option}: found without --nnodes, expected --nnodes N too")
            return None
        least, count = numbers_of_hosts(str(nnodes))
        if rank is None and least is not None:
            rank = UNNUMBERED
        elif rank is None or not 0 <= rank < count:
            raise UserError(f"--node-rank: found {rank}, expected 0 to {count - 1}")
        where = split(rdzv or "")
        if where is None:
            raise UserError(
                f"--rdzv: found {rdzv}, expected HOST:PORT, of the host of rank 0; an IPv6 address "
                "in brackets, as [2001:db8::1]:29400"
            )
        if not timeout > 0:
            raise UserError(f"--rdzv-timeout: found {timeout}, expected a number above 0")
        return cls(count, rank, *where, timeout, least)

    @property
    def where(self) -> str:
        """``HOST:PORT``."""
        return join(self.address, self.port)

    @property
    def nnodes(self) -> str:
        """How many hosts, as it is written: ``2``, or ``1:4``."""
        return str(self.count) if self.least is None else f"{self.least}:{self.count}"


def numbers_of_hosts(nnodes: str) -> tuple[int | None, int]:
    """Read ``N`` or ``MIN:MAX``: the fewest hosts, None for ``N``, and the most.

    Raises:
        UserError: it is neither.
    """
    least, colon, most = nnodes.rpartition(":")
    numbers = [int(n) for n in ([least, most] if colon else [most]) if n.isdecimal() and len(n) < 7]
    if len(numbers) != 1 + len(colon) or not 1 <= numbers[0] <= numbers[-1]:
        expected = "1 or more, or MIN:MAX with 1 <= MIN <= MAX"
        raise UserError(f"--nnodes: found {nnodes}, expected {expected}")
    return (numbers[0] if colon else None), numbers[-1]


@dataclass(frozen=True)
class Terms:
    """What a host that comes later has to agree with.

    Attributes:
        options: what all hosts have to be asked for alike, by the names of the options.
        why_not: of so many hosts: why the job cannot run over them; None: it can.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    why_not: Callable[[int], str | None] = lambda hosts: None


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
        round: how often the job has begun again before.
    """

    first: int
    world_size: int
    address: str
    port: int
    interface: str | None
    round: int = 0
