"""The hosts come together at host 0, and each learns what all others say.

Whoever comes is let in, also a host with a rank that another has: to say so is the purpose. So
what comes may be a stranger's. It enters here, and nowhere else: texts are cut and made printable,
numbers are finite and short enough to be shown. And no host is believed where it can be reached: an
address is the one that a connection was made with.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from shardwise.doctor.checks import Finding, fail
from shardwise.launch.hosts import Nodes
from shardwise.launch.network import (
    ClosedError,
    Connection,
    addresses,
    connect,
    is_address,
    listening,
    scope_of,
)
from shardwise.units import printable

RENDEZVOUS = "rendezvous"
_SLACK = 3.0  # seconds that an answer of host 0 may take beside what it waits for
_STRANGERS = 64  # for every host that is expected, as many may come
_LONGEST = 200  # characters of a text
_LARGEST = 2.0**63
_DEEPEST = 8  # lists in lists
_PORTS = range(1024, 65536)  # that a kernel chooses from
_GRACE = 1.0  # seconds more for hosts that come late, once as many came as were expected


class RendezvousError(Exception):
    """The hosts did not come together.

    Attributes:
        finding: why.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Table:
    """Where all hosts sit; host 0 first, the others in the order in which they came.

    Args:
        nodes: the job, as this host was told.

    Attributes:
        seat: this host's place in what :meth:`gather` returns, which tells it.

    Raises:
        RendezvousError: this host cannot take part.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.seat = 0
        self._count = 0  # of seats, once host 0 has told
        self._nodes = nodes
        self._guests: list[Connection | None] = []
        self._host: Connection | None = None
        if nodes.rank == 0:
            self._wait_for_guests()
        else:
            self._host = _reach(nodes)

    def _wait_for_guests(self) -> None:
        nodes = self._nodes
        deadline = time.monotonic() + nodes.timeout
        with _listen(nodes) as listener:
            while len(self._guests) < _STRANGERS * nodes.count and time.monotonic() < deadline:
                if len(self._guests) == nodes.count - 1:
                    deadline = min(deadline, time.monotonic() + (_GRACE if nodes.count > 1 else 0))
                listener.settimeout(max(0.01, min(0.2, deadline - time.monotonic())))
                with contextlib.suppress(OSError):  # none came, or one that has left already
                    self._guests.append(Connection(listener.accept()[0]))

    def gather(self, value: Any, seconds: float) -> list[Any]:
        """Tell all hosts a value, and hear theirs, in the order of seats.

        Args:
            value: plain.
            seconds: the most to wait for every one of them.

        Returns:
            A value from each host; None from those that are gone.

        Raises:
            RendezvousError: host 0 is gone.
        """
        if self._host is not None:
            return self._ask_host(value, seconds)
        values = self._hear_all(value, seconds)
        self._tell_all(values)
        return values

    def doors(self, own: str, port: int, seconds: float) -> list[tuple[str, int] | None]:
        """Where each host can be reached, in the order of seats; None for those that are gone.

        A host names its port, and not its address: host 0 takes the one from which it came. Of
        host 0, which their users have named, the others take the one at which they reached it.

        Args:
            own: an address of this host, for itself.
            port: at which this host listens.
            seconds: as in :meth:`gather`.

        Raises:
            RendezvousError: host 0 is gone.
        """
        beside = "" if self._host is None else self._host.peer
        if self._host is None:
            ports = self._hear_all(port, seconds)
            came_from = ["", *("" if guest is None else guest.peer for guest in self._guests)]
            told = [list(door) for door in zip(came_from, ports, strict=True)]
            self._tell_all(told)
        else:
            told = self._ask_host(port, seconds)
            told[0] = [beside, *told[0][1:]] if isinstance(told[0], list) else None
        doors = [_door(value, beside) for value in told]
        doors[self.seat] = own, port
        return doors

    def clocks(self, seconds: float) -> dict[int, float]:
        """By how many seconds each other host's clock is ahead of host 0's; told to all.

        Args:
            seconds: the most to wait for every one of them; host 0 asks one after the other.
        """
        if self._host is not None:
            whole = seconds * self._nodes.count
            self._next(whole)
            self._host.send({"time": time.time()})
            told = self._ask_host(None, whole)[0]
            told = told if isinstance(told, dict) else {}
            return {
                int(seat): ahead
                for seat, ahead in told.items()
                if seat.isdecimal() and isinstance(ahead, float | int)
            }
        ahead = {}
        for seat in range(len(self._guests)):
            before = time.time()
            self._tell(seat, {"clock": True})
            answer = self._hear(seat, time.monotonic() + seconds)
            if isinstance(answer, float | int):
                ahead[seat + 1] = float(answer) - (before + time.time()) / 2
        self.gather(ahead, seconds)
        return ahead

    def _ask_host(self, value: Any, seconds: float) -> list[Any]:
        assert self._host is not None
        try:
            self._host.send({"value": value})
        except ClosedError as error:
            raise self._alone(str(error)) from None
        # Host 0 waits for the slowest of us before it answers.
        answer = self._next(2 * seconds + _SLACK)
        seat, values = answer.get("seat"), answer.get("all")
        if (
            type(seat) is not int
            or not isinstance(values, list)
            or not 0 < seat < len(values) <= 1 + _STRANGERS * self._nodes.count
            or (self._count and (seat, len(values)) != (self.seat, self._count))
        ):
            text = f"what answers at {self._nodes.where} is no doctor"
            advice = "run the command on host 0, of the same version, and with this port"
            raise RendezvousError(fail(RENDEZVOUS, text, advice))
        self.seat, self._count = seat, len(values)
        heard = [_legible(each) for each in values]
        heard[seat] = _legible(value)
        return heard

    def _next(self, seconds: float) -> dict[str, Any]:
        assert self._host is not None
        try:
            message = self._host.next(seconds)
        except ClosedError as error:
            raise self._alone(str(error)) from None
        if message is None:
            raise self._alone(f"no answer for {seconds:.0f} s")
        return message

    def _alone(self, why: str) -> RendezvousError:
        text = f"host 0 at {self._nodes.where} left or went silent ({why})"
        return RendezvousError(fail(RENDEZVOUS, text, "look at what it says there"))

    def _hear_all(self, value: Any, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        guests = range(len(self._guests))
        return [_legible(value), *(self._hear(seat, deadline) for seat in guests)]

    def _hear(self, seat: int, deadline: float) -> Any:
        guest = self._guests[seat]
        if guest is None:
            return None
        with contextlib.suppress(ClosedError):
            message = guest.next(deadline - time.monotonic())
            if message:
                return _legible(next(iter(message.values())))
        self._part_with(seat, guest)
        return None

    def _tell_all(self, values: list[Any]) -> None:
        for seat in range(len(self._guests)):
            self._tell(seat, {"seat": seat + 1, "all": values})

    def _tell(self, seat: int, message: dict[str, Any]) -> None:
        guest = self._guests[seat]
        if guest is not None:
            try:
                guest.send(message)
            except ClosedError:
                self._part_with(seat, guest)

    def _part_with(self, seat: int, guest: Connection) -> None:
        guest.close()
        self._guests[seat] = None

    def close(self) -> None:
        """Leave."""
        for line in (self._host, *self._guests):
            if line is not None:
                line.close()


def _legible(value: Any, depth: int = 0) -> Any:
    """What another host says, as it may be computed with and shown; None in place of the rest."""
    match value:
        case str():
            return printable(value[:_LONGEST])
        case int() | float() if not -_LARGEST < value < _LARGEST:  # nor NaN
            return None
        case list() | dict() if depth == _DEEPEST:
            return None
        case list():
            return [_legible(each, depth + 1) for each in value]
        case dict():
            return {_legible(str(k)): _legible(each, depth + 1) for k, each in value.items()}
    return value


def _door(told: Any, beside: str) -> tuple[str, int] | None:
    """The address and port of a host; None for what is neither, or leads to no other host.

    Args:
        told: what host 0 says.
        beside: the address of host 0: where that is no address of one host alone, as loopback is,
            those of the others are none. Empty on host 0, which has seen where they came from.
    """
    match told:
        case [str(address), int(port)] if port in _PORTS and is_address(address):
            fits = not beside or scope_of(address) == scope_of(beside)
            return (address, port) if fits else None
    return None


def _listen(nodes: Nodes) -> socket.socket:
    own = ", ".join(f"{each} on {name}" for name, of in addresses().items() for each in of)
    try:
        return listening(nodes.address, nodes.port)
    except OSError as error:
        text = f"host 0 cannot listen at {nodes.where} ({error.strerror or error})"
        advice = f"--rdzv has to be an address of the host with --node-rank 0 ({own})"
        raise RendezvousError(fail(RENDEZVOUS, text, advice)) from None


def _reach(nodes: Nodes) -> Connection:
    try:
        return connect(nodes.address, nodes.port, nodes.timeout)
    except OSError as error:
        text = f"{nodes.where} cannot be reached from here ({error.strerror or error})"
        raise RendezvousError(fail(RENDEZVOUS, text, _advice(nodes, error))) from None


def _advice(nodes: Nodes, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "no host has that name here; give the address of host 0"
    own = [address for each in addresses().values() for address in each]
    if nodes.address in own:
        return f"that is this host's own address, and its rank is {nodes.rank}: give host 0's"
    if isinstance(error, ConnectionRefusedError):
        return "the host is there, and nobody listens: run the command on host 0, check the port"
    if isinstance(error, TimeoutError):
        return "nothing answers: is the host up, and does a firewall drop the port?"
    if ":" in nodes.address and not any(":" in each and each != "::1" for each in own):
        return "it is an IPv6 address, and this host has none"
    return "there is no way to it: is the address right, is the interface up?"
