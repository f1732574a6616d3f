"""The diagnosis: the hosts meet, the checks run in order, and each may take only so long.

They meet as the hosts of a job do: host 0 serves a store, behind a token if there is one. Each host
writes its values there under a name that only host 0 gets. Host 0 publishes them under keys that
no other host can write.

Every host that connects is admitted, even one with a rank that another has: reporting that is the
purpose. Without a token, it may be anybody. So the peers are not trusted. What they send enters
here, and nowhere else: texts are cut and made printable, numbers are finite and short enough to
show. And no peer is believed about where it can be reached: an address is the one that a connection
was made with.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shardwise.app.doctor import checks
from shardwise.app.doctor.checks import Finding, Level, fail, ok
from shardwise.app.doctor.facts import Facts, received
from shardwise.app.doctor.probe import (
    CONNECT,
    DRAIN,
    STREAM,
    EchoServer,
    PairLink,
    measure_connection,
)
from shardwise.base.units import counted, printable
from shardwise.elastic.hosts import Nodes
from shardwise.elastic.network import addresses, is_address, listening, scope_of

if TYPE_CHECKING:
    from shardwise.elastic.store import GuardedStore, StoreServer


RENDEZVOUS = "rendezvous"
_ANSWER = 5.0  # seconds for one attempt to connect, and for an answer of the store
_RETRY = 0.3  # seconds between attempts to connect
_POLL = 0.02  # seconds between looks for what the others send
_SLACK = 3.0  # seconds that an answer of host 0 may take, beside what it waits for
_MOST_PEERS = 64  # hosts admitted for every one that is expected
_LONGEST = 200  # characters of a text
_LARGEST = 2.0**63
_DEEPEST = 8  # lists in lists
_MOST_BYTES = 2**18  # of a value
_PORTS = range(1024, 65536)  # that a kernel chooses from
_GRACE = 1.0  # seconds to wait for surplus hosts, once as many came as were expected


class RendezvousError(Exception):
    """The hosts did not come together.

    Args:
        text: why.
        advice: what to do.

    Attributes:
        finding: why, as a finding.
    """

    def __init__(self, text: str, advice: str) -> None:
        self.finding = fail(RENDEZVOUS, text, advice)
        super().__init__(str(self.finding))


class HostGroup:
    """All hosts that run the doctor; host 0 first, the others in the order of their connections.

    A host alone needs no store, and no torch.

    Args:
        nodes: the job, as this host was given it.

    Attributes:
        index: this host's place in what :meth:`all_gather` returns.
        addresses: where each host comes from, as host 0 sees it, by index; empty for host 0.

    Raises:
        RendezvousError: this host cannot take part.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.index = 0
        self.addresses = [""]
        self._nodes = nodes
        self._name = f"doctor {secrets.token_hex(16)}"
        self._steps = 0
        self._server: StoreServer | None = None  # on host 0
        self._names: list[str | None] = []  # on host 0: of all others; None for those that are gone
        self._store: GuardedStore | None = None
        if nodes.count == 1:
            _listen(nodes).close()
            return
        _check_torch()
        try:
            if nodes.rank == 0:
                self._serve()
            else:
                self._join()
        except BaseException:
            self.close()
            raise

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
        self._steps += 1
        step = str(self._steps)  # of this exchange, the same on all hosts
        if self._nodes.rank == 0:
            deadline, peers = time.monotonic() + seconds, range(len(self._names))
            values = [_sanitized(value), *(self._receive(at, step, deadline) for at in peers)]
            self._publish(step, values)
            return values
        return self._ask_host_0(step, value, seconds)

    def endpoints(self, own: str, port: int, seconds: float) -> list[tuple[str, int] | None]:
        """Exchange where each host can be reached.

        A host reports its port, but not its address: that is the one from which it has connected to
        host 0. For host 0, whose address their users gave, the others use the one at which they
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
        ports = self.all_gather(port, seconds)
        address_0 = "" if self._nodes.rank == 0 or self._store is None else self._store.peer
        seen_at = [address_0, *self.addresses[1:]]
        endpoints = [_endpoint(*each, address_0) for each in zip(seen_at, ports, strict=True)]
        endpoints[self.index] = own, port
        return endpoints

    def close(self) -> None:
        """Leave. Host 0 waits a little until the others have read what it has published."""
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            deadline = time.monotonic() + _SLACK
            while time.monotonic() < deadline and self._server.clients().keys() & {*self._names}:
                time.sleep(_POLL)
            self._server.close()

    @contextlib.contextmanager
    def _reached(self) -> Iterator[GuardedStore]:
        """Use the store, and report it if host 0 is gone."""
        assert self._store is not None
        try:
            yield self._store
        except (OSError, ValueError, LookupError) as error:  # the last two if it is no store
            where = f"host 0 at {self._nodes.where}"
            text = f"{where} left or went silent ({printable(str(error))})"
            raise RendezvousError(text, "look at its output") from None

    # -- on every host but host 0 ------------------------------------------------------------------

    def _join(self) -> None:
        from shardwise.elastic.store import StoreTimeoutError

        nodes = self._nodes
        self._store = _connect(nodes, self._name)
        own = _index_key(self._name)
        found = index = None
        with self._reached() as store:
            # Host 0 writes both at once, after it has waited for all hosts.
            store.set_timeout(timedelta(seconds=nodes.timeout + _GRACE + _SLACK))
            with contextlib.suppress(StoreTimeoutError):
                found = _read(store.get(_ADDRESSES))
            if found is not None and not store.check([own]):
                text = f"host 0 at {nodes.where} has begun without this host"
                advice = "run the command on all hosts within --timeout, as many as --nnodes"
                raise RendezvousError(text, advice)
            if found is not None:
                index = _read(store.get(own))
        if (
            not isinstance(found, list)
            or not all(isinstance(each, str) for each in found)
            or type(index) is not int
            or not 0 < index < len(found) <= 1 + _MOST_PEERS * nodes.count
        ):
            text = f"what answers at {nodes.where} is not the doctor"
            advice = "run the command on host 0, of the same version and with this port"
            raise RendezvousError(text, advice)
        self.index, self.addresses = index, found

    def _ask_host_0(self, step: str, value: Any, seconds: float) -> list[Any]:
        keys = [_public_key(step, at) for at in range(len(self.addresses))]
        with self._reached() as store:
            store.set(f"{self._name}/{step}", json.dumps(value))
            # Host 0 waits for the slowest host before it answers.
            store.set_timeout(timedelta(seconds=2 * seconds + _SLACK))
            received = [_read(each) for each in store.multi_get(keys)]
        received[self.index] = _sanitized(value)
        return received

    # -- on host 0 ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        from shardwise.elastic.store import StoreServer

        nodes = self._nodes
        self._server = StoreServer(_listen(nodes), nodes.token)
        self._admit(self._server)

    def _admit(self, server: StoreServer) -> None:
        """Wait for all hosts, and tell each its place."""
        count, others = self._nodes.count, dict[str, str]()
        deadline, grace = time.monotonic() + self._nodes.timeout, math.inf
        while len(others) < _MOST_PEERS * count and time.monotonic() < min(deadline, grace):
            time.sleep(_POLL)
            found = server.clients().items()
            others = {name: address for name, address in found if len(name) <= _LONGEST}
            if len(others) >= count - 1:
                grace = min(grace, time.monotonic() + _GRACE)
        names = [*others][: _MOST_PEERS * count]
        self._names = [*names]
        self.addresses = ["", *(others[name] for name in names)]
        for at, name in enumerate(names, 1):
            server.put(_index_key(name), json.dumps(at).encode())
        server.put(_ADDRESSES, json.dumps(self.addresses).encode())

    def _receive(self, at: int, step: str, deadline: float) -> Any:
        """Return what a host sends; None once it is gone, or silent for too long."""
        name, server = self._names[at], self._server
        assert server is not None
        if name is None:
            return None
        key = f"{name}/{step}"
        while True:
            is_there = name in server.clients()  # before the look: what it wrote last counts
            sent = server.values(key).get("")
            if sent is not None:
                server.forget(key)
                return _read(sent)
            if not is_there or time.monotonic() > deadline:
                server.drop(name, "it was silent for too long")
                self._names[at] = None
                return None
            time.sleep(_POLL)

    def _publish(self, step: str, values: list[Any]) -> None:
        if self._server is not None:
            for at, value in enumerate(values):
                sent = json.dumps(value).encode()
                sent = sent if len(sent) <= _MOST_BYTES else b"null"
                self._server.put(_public_key(step, at), sent)


_ADDRESSES = "server/addresses"


def _index_key(name: str) -> str:
    return f"server/index/{name}"


def _public_key(step: str, index: int) -> str:
    return f"server/values/{step}/{index}"


def _read(sent: bytes) -> Any:
    """Read what another host sent; None for what cannot be read."""
    if len(sent) > _MOST_BYTES:
        return None
    try:
        return _sanitized(json.loads(sent))
    except (ValueError, RecursionError):
        return None


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


def _endpoint(address: Any, port: Any, address_0: str) -> tuple[str, int] | None:
    """Return the address and port of a host; None for anything that leads to no other host.

    Args:
        address: where host 0 has seen it.
        port: what it sent.
        address_0: the address of host 0. Unless it is itself valid on one host only, as loopback
            is, the others must not be either. Empty on host 0, which has seen where they come from.
    """
    if not isinstance(address, str) or type(port) is not int:
        return None
    if port not in _PORTS or not is_address(address):
        return None
    return (address, port) if not address_0 or scope_of(address) == scope_of(address_0) else None


def _listen(nodes: Nodes) -> socket.socket:
    own = ", ".join(f"{each} on {name}" for name, of in addresses().items() for each in of)
    try:
        return listening(nodes.address, nodes.port)
    except OSError as error:
        text = f"host 0 cannot listen at {nodes.where} ({error.strerror or error})"
        advice = f"--rdzv must be an address of the host with --node-rank 0 ({own})"
        raise RendezvousError(text, advice) from None


def _check_torch() -> None:
    """Check that the store can be imported. It is one of torch's kind.

    Raises:
        RendezvousError: it cannot.
    """
    try:
        importlib.import_module("shardwise.elastic.store")
    except (ImportError, OSError) as error:
        text = f"torch cannot be imported here ({printable(str(error))})"
        advice = "repair it; hosts meet at a store of torch's kind"
        raise RendezvousError(text, advice) from None


def _connect(nodes: Nodes, name: str) -> GuardedStore:
    """Connect to host 0, and retry for ``--timeout``, since its command may start later."""
    from shardwise.elastic.store import GuardedStore, StoreRefusedError, connect

    where = nodes.address, nodes.port, nodes.token, name, _ANSWER
    try:
        return connect(lambda: GuardedStore(*where), patience=nodes.timeout, pause=_RETRY)
    except StoreRefusedError as error:
        text, _, advice = printable(str(error)).partition("; ")
        raise RendezvousError(text, advice) from None
    except OSError as error:
        raise RendezvousError(*_unreachable(nodes, error)) from None


def _unreachable(nodes: Nodes, error: OSError) -> tuple[str, str]:
    """Return that an address cannot be reached, and what to do."""
    reason = printable(error.strerror or str(error))
    return f"{nodes.where} cannot be reached from here ({reason})", _advice(nodes, error)


def _advice(nodes: Nodes, error: OSError) -> str:
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


#: The longest that each step takes, in seconds, in addition to ``--timeout`` for all to come.
SECONDS = {"facts": 10.0, "links": CONNECT + STREAM + 2 * DRAIN + 1.5}


def diagnose(nodes: Nodes, own: Facts, least_gbit: float, say: Callable[[Finding], None]) -> bool:
    """Check this host and, together with all others, the connections between them.

    Args:
        nodes: the job, as this host was given it; a job of one host needs no other.
        own: what is true of this host.
        least_gbit: the bandwidth that a connection between two hosts should have, in Gbit/s.
        say: called with each finding as soon as it is known; all hosts have the same findings.

    Returns:
        Whether a job would run.
    """
    healthy = True

    def report(findings: Iterable[Finding]) -> None:
        nonlocal healthy
        for finding in findings:
            healthy = healthy and finding.level is not Level.FAIL
            say(finding)

    try:
        with contextlib.closing(HostGroup(nodes)) as hosts:
            _check_all(nodes, hosts, own, least_gbit, report)
    except RendezvousError as error:
        report([error.finding, *_check_each([own], {})])
    return healthy


def _check_each(hosts: Sequence[Facts], seen_at: Mapping[int, str]) -> Iterator[Finding]:
    """Check what can be checked of a host without the others."""
    yield from checks.check_start(hosts)
    yield from checks.check_devices(hosts)
    yield from checks.check_names(hosts, seen_at)
    yield from checks.check_interfaces(hosts)
    yield from checks.check_limits(hosts)


def _check_all(
    nodes: Nodes,
    group: HostGroup,
    own: Facts,
    least_gbit: float,
    report: Callable[[Iterable[Finding]], None],
) -> None:
    gathered = group.all_gather(asdict(own), SECONDS["facts"])
    read = [received(Facts, each) for each in gathered]
    read[group.index] = read[group.index] or own
    # Hosts whose facts cannot be read take no part in the checks; indices are of the others.
    places = [place for place, each in enumerate(read) if each is not None]
    hosts = [each for each in read if each is not None]
    gone = len(read) - len(hosts)
    text = f"found {counted(hosts, 'host')}"
    if nodes.count > 1:
        text += ", all with the token" if nodes.token else "; no token keeps others out"
    report([ok(RENDEZVOUS, text)])
    if gone:
        text = f"{gone} connected and sent nothing that can be read here"
        advice = "is another version of shardwise there, or does something else use the port?"
        report([fail(RENDEZVOUS, text, advice)])
    report(checks.check_ranks(hosts, hosts[0].nnodes))
    report(checks.check_world(hosts))
    report(checks.check_versions(hosts))
    seen_at = {at: group.addresses[place] for at, place in enumerate(places) if place}
    report(_check_each(hosts, seen_at))
    measured = _measure_all(group, own, [each is not None for each in read])
    links = {
        (places.index(a), places.index(b)): link
        for (a, b), link in measured.items()
        if a in places and b in places
    }
    report(checks.check_clocks(hosts, _ahead(measured, places)))
    report(checks.check_ports(hosts, links))
    report(checks.check_links(hosts, links, least_gbit))
    report(checks.check_within_hosts(hosts, links))


def _ahead(measured: Mapping[tuple[int, int], PairLink], places: Sequence[int]) -> dict[int, float]:
    """Return how far clocks are ahead of that of host 0, by index in ``places``, where known."""
    found: dict[int, float] = {}
    for at, place in enumerate(places):
        for pair, sign in (((place, 0), -1), ((0, place), 1)):  # what host 0 has seen comes first
            link = measured.get(pair)
            if place and link is not None and not link.error:
                found[at] = sign * link.ahead
    return found


def _measure_all(
    group: HostGroup, own: Facts, readable: Sequence[bool]
) -> dict[tuple[int, int], PairLink]:
    """Measure from every host to every other and to itself, by index of sender and receiver.

    In each round, every host sends to one other. Nothing is sent to peers whose facts could not be
    read: they may be anything.
    """
    found: dict[tuple[int, int], PairLink] = {}
    count = len(readable)
    with contextlib.closing(EchoServer()) as server:
        address = own.address or "127.0.0.1"
        endpoints = group.endpoints(address, server.port, SECONDS["facts"])
        for turn in range(count):
            other = (group.index + turn) % count
            endpoint = endpoints[other] if readable[other] else None
            own_link = PairLink("it left") if endpoint is None else measure_connection(*endpoint)
            gathered = group.all_gather(asdict(own_link), SECONDS["links"])
            for place, each in enumerate(gathered):
                link = received(PairLink, each)
                if link is not None:
                    found[place, (place + turn) % count] = link
    return found
