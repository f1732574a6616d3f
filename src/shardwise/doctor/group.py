"""The group of hosts that run the doctor: each one's values reach all of them, through host 0.

Every host that connects is admitted, even one with a rank that another has: reporting that is the
purpose. So the peers are not trusted. What they send enters here, and nowhere else: texts are cut
and made printable, numbers are finite and short enough to show. And no peer is believed about where
it can be reached: an address is the one that a connection was made with.
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
_SLACK = 3.0  # seconds that an answer of host 0 may take, beside what it waits for
_MOST_PEERS = 64  # connections accepted for every host that is expected
_LONGEST = 200  # characters of a text
_LARGEST = 2.0**63
_DEEPEST = 8  # lists in lists
_PORTS = range(1024, 65536)  # that a kernel chooses from
_GRACE = 1.0  # seconds to wait for surplus hosts, once as many came as were expected


class RendezvousError(Exception):
    """The hosts did not come together.

    Attributes:
        finding: why.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class HostGroup:
    """All hosts that run the doctor; host 0 first, the others in the order of their connections.

    Args:
        nodes: the job, as this host was given it.

    Attributes:
        index: this host's place in what :meth:`all_gather` returns, known after the first call.

    Raises:
        RendezvousError: this host cannot take part.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.index = 0
        self._size = 0  # known after the first answer of host 0
        self._nodes = nodes
        self._peers: list[Connection | None] = []  # on host 0: all others
        self._host_0: Connection | None = None  # on the others
        if nodes.rank == 0:
            self._accept_peers()
        else:
            self._host_0 = _connect(nodes)

    def _accept_peers(self) -> None:
        nodes = self._nodes
        deadline = time.monotonic() + nodes.timeout
        with _listen(nodes) as listener:
            while len(self._peers) < _MOST_PEERS * nodes.count and time.monotonic() < deadline:
                if len(self._peers) == nodes.count - 1:
                    deadline = min(deadline, time.monotonic() + (_GRACE if nodes.count > 1 else 0))
                listener.settimeout(max(0.01, min(0.2, deadline - time.monotonic())))
                with contextlib.suppress(OSError):  # nobody came, or somebody who has left already
                    self._peers.append(Connection(listener.accept()[0]))

    def all_gather(self, value: Any, seconds: float) -> list[Any]:
        """Exchange a value with all hosts.

        Args:
            value: plain values, as JSON can carry them.
            seconds: the longest wait for the slowest host.

        Returns:
            The value of each host, by index; None for those that are gone.

        Raises:
            RendezvousError: host 0 is gone.
        """
        if self._host_0 is not None:
            return self._ask_host_0(value, seconds)
        values = self._receive_all(value, seconds)
        self._send_all(values)
        return values

    def endpoints(self, own: str, port: int, seconds: float) -> list[tuple[str, int] | None]:
        """Exchange where each host can be reached.

        A host reports its port, but not its address: host 0 uses the one from which the host
        connected. For host 0, whose address their users gave, the others use the one at which they
        reached it.

        Args:
            own: an address of this host, for itself.
            port: the port at which this host listens.
            seconds: as for :meth:`all_gather`.

        Returns:
            Address and port of each host, by index; None for those that are gone.

        Raises:
            RendezvousError: host 0 is gone.
        """
        address_0 = "" if self._host_0 is None else self._host_0.peer
        if self._host_0 is None:
            ports = self._receive_all(port, seconds)
            seen_at = ["", *("" if peer is None else peer.peer for peer in self._peers)]
            reported = [list(pair) for pair in zip(seen_at, ports, strict=True)]
            self._send_all(reported)
        else:
            reported = self._ask_host_0(port, seconds)
            first = reported[0]
            reported[0] = [address_0, *first[1:]] if isinstance(first, list) else None
        endpoints = [_endpoint(value, address_0) for value in reported]
        endpoints[self.index] = own, port
        return endpoints

    def clock_offsets(self, seconds: float) -> dict[int, float]:
        """Measure how far the clock of each other host is ahead of the clock of host 0.

        Args:
            seconds: the longest wait for one host; host 0 asks one after the other.

        Returns:
            Seconds by index, the same on all hosts; hosts that are gone are missing.

        Raises:
            RendezvousError: host 0 is gone.
        """
        if self._host_0 is not None:
            total = seconds * self._nodes.count
            self._next(total)
            self._host_0.send({"time": time.time()})
            reported = self._ask_host_0(None, total)[0]
            reported = reported if isinstance(reported, dict) else {}
            return {
                int(index): ahead
                for index, ahead in reported.items()
                if index.isdecimal() and isinstance(ahead, float | int)
            }
        offsets = {}
        for at in range(len(self._peers)):
            before = time.time()
            self._send(at, {"clock": True})
            answer = self._receive(at, time.monotonic() + seconds)
            if isinstance(answer, float | int):
                offsets[at + 1] = float(answer) - (before + time.time()) / 2
        self.all_gather(offsets, seconds)
        return offsets

    def close(self) -> None:
        """Close all connections."""
        for connection in (self._host_0, *self._peers):
            if connection is not None:
                connection.close()

    # -- on every host but host 0 ------------------------------------------------------------------

    def _ask_host_0(self, value: Any, seconds: float) -> list[Any]:
        assert self._host_0 is not None
        try:
            self._host_0.send({"value": value})
        except ClosedError as error:
            raise self._lost(str(error)) from None
        # Host 0 waits for the slowest host before it answers.
        answer = self._next(2 * seconds + _SLACK)
        index, values = answer.get("index"), answer.get("all")
        if (
            type(index) is not int
            or not isinstance(values, list)
            or not 0 < index < len(values) <= 1 + _MOST_PEERS * self._nodes.count
            or (self._size and (index, len(values)) != (self.index, self._size))
        ):
            text = f"what answers at {self._nodes.where} is not the doctor"
            advice = "run the command on host 0, of the same version and with this port"
            raise RendezvousError(fail(RENDEZVOUS, text, advice))
        self.index, self._size = index, len(values)
        received = [_sanitized(each) for each in values]
        received[index] = _sanitized(value)
        return received

    def _next(self, seconds: float) -> dict[str, Any]:
        assert self._host_0 is not None
        try:
            message = self._host_0.next(seconds)
        except ClosedError as error:
            raise self._lost(str(error)) from None
        if message is None:
            raise self._lost(f"no answer for {seconds:.0f} s")
        return message

    def _lost(self, why: str) -> RendezvousError:
        text = f"host 0 at {self._nodes.where} left or went silent ({why})"
        return RendezvousError(fail(RENDEZVOUS, text, "look at its output"))

    # -- on host 0 ---------------------------------------------------------------------------------

    def _receive_all(self, value: Any, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        peers = range(len(self._peers))
        return [_sanitized(value), *(self._receive(at, deadline) for at in peers)]

    def _receive(self, at: int, deadline: float) -> Any:
        peer = self._peers[at]
        if peer is None:
            return None
        with contextlib.suppress(ClosedError):
            message = peer.next(deadline - time.monotonic())
            if message:
                return _sanitized(next(iter(message.values())))
        self._drop(at, peer)
        return None

    def _send_all(self, values: list[Any]) -> None:
        for at in range(len(self._peers)):
            self._send(at, {"index": at + 1, "all": values})

    def _send(self, at: int, message: dict[str, Any]) -> None:
        peer = self._peers[at]
        if peer is not None:
            try:
                peer.send(message)
            except ClosedError:
                self._drop(at, peer)

    def _drop(self, at: int, peer: Connection) -> None:
        peer.close()
        self._peers[at] = None


def _sanitized(value: Any, depth: int = 0) -> Any:
    """Return what a peer sent as it may be computed with and shown, with None for the rest."""
    match value:
        case str():
            return printable(value[:_LONGEST])
        case int() | float() if not -_LARGEST < value < _LARGEST:  # nor NaN
            return None
        case list() | dict() if depth == _DEEPEST:
            return None
        case list():
            return [_sanitized(each, depth + 1) for each in value]
        case dict():
            return {
                _sanitized(str(key)): _sanitized(each, depth + 1) for key, each in value.items()
            }
    return value


def _endpoint(reported: Any, address_0: str) -> tuple[str, int] | None:
    """Return the address and port of a host; None for anything that leads to no other host.

    Args:
        reported: what host 0 sent.
        address_0: the address of host 0. Unless it is itself valid on one host only, as loopback
            is, the others must not be either. Empty on host 0, which has seen where they come from.
    """
    match reported:
        case [str(address), int(port)] if port in _PORTS and is_address(address):
            fits = not address_0 or scope_of(address) == scope_of(address_0)
            return (address, port) if fits else None
    return None


def _listen(nodes: Nodes) -> socket.socket:
    own = ", ".join(f"{each} on {name}" for name, of in addresses().items() for each in of)
    try:
        return listening(nodes.address, nodes.port)
    except OSError as error:
        text = f"host 0 cannot listen at {nodes.where} ({error.strerror or error})"
        advice = f"--rdzv must be an address of the host with --node-rank 0 ({own})"
        raise RendezvousError(fail(RENDEZVOUS, text, advice)) from None


def _connect(nodes: Nodes) -> Connection:
    try:
        return connect(nodes.address, nodes.port, nodes.timeout)
    except OSError as error:
        text = f"{nodes.where} cannot be reached from here ({error.strerror or error})"
        raise RendezvousError(fail(RENDEZVOUS, text, _advice(nodes, error))) from None


def _advice(nodes: Nodes, error: OSError) -> str:
    """Return what to do about an address that cannot be reached."""
    if isinstance(error, socket.gaierror):
        return "the name does not resolve here; pass the address of host 0"
    own = [address for each in addresses().values() for address in each]
    if nodes.address in own:
        return f"this is the address of this host, whose rank is {nodes.rank}; pass that of host 0"
    if isinstance(error, ConnectionRefusedError):
        return "the host is up, but nothing listens; run the command on host 0, check the port"
    if isinstance(error, TimeoutError):
        return "nothing answers; is the host up, and does a firewall drop the port?"
    if ":" in nodes.address and not any(":" in each and each != "::1" for each in own):
        return "it is an IPv6 address, and this host has none"
    return "no route leads there; is the address right, and the interface up?"
