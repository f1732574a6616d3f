"""The hosts come together at host 0, and each learns what all others say.

Whoever comes is let in, also a host with a rank that another has: to say so is the purpose.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from shardwise.doctor.finding import Finding, fail
from shardwise.launch.addresses import addresses, listening
from shardwise.launch.hosts import Nodes
from shardwise.launch.wire import ClosedError, Line

RENDEZVOUS = "rendezvous"
_RETRY = 0.3
_CONNECT = 3.0  # seconds for one attempt
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

    Raises:
        RendezvousError: this host cannot take part.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._guests: list[Line | None] = []
        self._host: Line | None = None
        if nodes.rank == 0:
            self._wait_for_guests()
        else:
            self._host = _reach(nodes)

    def _wait_for_guests(self) -> None:
        nodes = self._nodes
        deadline = time.monotonic() + nodes.timeout
        with _listen(nodes) as listener:
            while len(self._guests) < 64 * nodes.count and time.monotonic() < deadline:
                if len(self._guests) == nodes.count - 1:
                    deadline = min(deadline, time.monotonic() + (_GRACE if nodes.count > 1 else 0))
                listener.settimeout(max(0.01, min(0.2, deadline - time.monotonic())))
                with contextlib.suppress(OSError):  # none came, or one that has left already
                    self._guests.append(Line(listener.accept()[0]))

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
        deadline = time.monotonic() + seconds
        values = [value, *(self._hear(seat, deadline) for seat in range(len(self._guests)))]
        for seat in range(len(self._guests)):
            self._tell(seat, {"seat": seat + 1, "all": values})
        return values

    @property
    def seat(self) -> int:
        """This host's place in what :meth:`gather` returns."""
        return self._seat if self._host is not None else 0

    def clocks(self, seconds: float) -> dict[int, float]:
        """By how many seconds each other host's clock is ahead of host 0's; told to all."""
        if self._host is not None:
            self._next(seconds)
            self._host.send({"time": time.time()})
            return {int(seat): ahead for seat, ahead in self._ask_host(None, seconds)[0].items()}
        ahead = {}
        for seat in range(len(self._guests)):
            before = time.time()
            self._tell(seat, {"clock": True})
            answer = self._hear(seat, time.monotonic() + seconds)
            if answer is not None:
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
        answer = self._next(2 * seconds + _CONNECT)
        self._seat = int(answer["seat"])
        return list(answer["all"])

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

    def _hear(self, seat: int, deadline: float) -> Any:
        guest = self._guests[seat]
        if guest is None:
            return None
        with contextlib.suppress(ClosedError):
            message = guest.next(deadline - time.monotonic())
            if message:
                return next(iter(message.values()))
        self._guests[seat] = None
        return None

    def _tell(self, seat: int, message: dict[str, Any]) -> None:
        guest = self._guests[seat]
        if guest is not None:
            try:
                guest.send(message)
            except ClosedError:
                self._guests[seat] = None

    def close(self) -> None:
        """Leave."""
        for line in (self._host, *self._guests):
            if line is not None:
                line.close()


def _listen(nodes: Nodes) -> socket.socket:
    own = ", ".join(f"{each} on {name}" for name, of in addresses().items() for each in of)
    try:
        return listening(nodes.address, nodes.port)
    except OSError as error:
        text = f"host 0 cannot listen at {nodes.where} ({error.strerror or error})"
        advice = f"--rdzv has to be an address of the host with --node-rank 0 ({own})"
        raise RendezvousError(fail(RENDEZVOUS, text, advice)) from None


def _reach(nodes: Nodes) -> Line:
    deadline = time.monotonic() + nodes.timeout
    while True:
        try:
            address = (nodes.address, nodes.port)
            return Line(socket.create_connection(address, timeout=_CONNECT))
        except OSError as error:
            reason = error
        if time.monotonic() > deadline:
            break
        time.sleep(_RETRY)
    text = f"{nodes.where} cannot be reached from here ({reason.strerror or reason})"
    raise RendezvousError(fail(RENDEZVOUS, text, _advice(nodes, reason)))


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
