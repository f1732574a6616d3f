"""What one host is told of a job over several, and what that means to its ranks."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwise.launch.errors import UserError

_SIOCGIFADDR = 0x8915  # linux/sockios.h
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
        address, _, port = (rdzv or "").rpartition(":")
        if not address or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"--rdzv: found {rdzv}, expected HOST:PORT, of the host of rank 0")
        if not timeout > 0:
            raise UserError(f"--rdzv-timeout: found {timeout}, expected a number above 0")
        return cls(count, rank, address.strip("[]"), int(port), timeout, least)

    @property
    def where(self) -> str:
        """``HOST:PORT``."""
        return f"{self.address}:{self.port}"

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
    numbers = [int(n) for n in ([least, most] if colon else [most]) if n.isdecimal()]
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


def own_address(towards: str) -> str:
    """The address from which this host sends to another; nothing is sent.

    Raises:
        OSError: the other has no address, or there is no way to it.
    """
    found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def addresses() -> dict[str, str]:
    """The IPv4 address of every network interface of this host that has one, by name."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_towards(towards: str) -> str | None:
    """The network interface through which this host reaches another, or has an address itself."""
    try:
        own = own_address(towards)
    except OSError:
        return None
    return next((name for name, address in addresses().items() if address == own), None)


def listening(address: str, port: int = 0) -> socket.socket:
    """A socket that listens.

    Args:
        address: of this host, a name or a number.
        port: 0: one that the kernel chooses.

    Raises:
        OSError: the address is none of this host's, or the port is taken.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener
