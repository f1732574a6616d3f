"""The diagnosis: the hosts meet, the checks run in order, and each may take only so long.

They meet as the hosts of a job do, at a registry that host 0 serves, behind a token if there is
one. In each step, every host reports a value under a name that only host 0 gets, and host 0
publishes the values of all.

Every host that connects is admitted, even one with a rank that another has: reporting that is the
purpose. Without a token, it may be anybody. So the peers are not trusted. What they send enters
here, and nowhere else: texts are cut and made printable, numbers are finite and short enough to
show. And no peer is believed about where it can be reached: an address is the one that a connection
was made with.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    from shardwise.elastic.registry import Registry, RegistryClient
    from shardwise.elastic.store import GuardedStore


RENDEZVOUS = "rendezvous"
_ANSWER = 5.0  # seconds for one attempt to connect, and for an answer of the store
_RETRY = 0.3  # seconds between attempts to connect
_POLL = 0.02  # seconds between looks for what the others send
_SLACK = 3.0  # seconds that an answer of host 0 may take, beside what it waits for
_MOST_PEERS = 64  # hosts admitted for every one that is expected
_MOST_IN_ALL = 4096
_LONGEST = 200  # characters of a text
_LARGEST = 2.0**63
_DEEPEST = 8  # lists in lists
_MOST_BYTES = 2**19  # of all values in one step
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


@dataclass(frozen=True)
class DoctorReport:
    """What a host reports.

    Attributes:
        step: the number of the exchange, from 1; the same on all hosts.
        value: what it sends.
    """

    step: int
    value: Any


@dataclass(frozen=True)
class DoctorPlan:
    """What host 0 publishes.

    Attributes:
        step: the number of the last exchange that is over; 0: all hosts are there.
        values: what each host has sent, by index; None for those that are gone.
        addresses: where each comes from, by index; empty for host 0.
        names: a digest of the name of each, by index; empty for host 0.
    """

    step: int
    values: list[Any]
    addresses: list[str]
    names: list[str]


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
        self._step = 0
        self._registry: Registry[DoctorReport] | None = None  # on host 0
        self._names = [""]  # on host 0: of all hosts, by index
        self._client: RegistryClient[DoctorReport, DoctorPlan] | None = None
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
        self._step += 1
        if self._client is None:
            return self._collect(_sanitized(value), seconds)
        return self._ask_host_0(self._client, value, seconds)

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
        address_0 = "" if self._client is None else self._client.store.peer
        seen_at = [address_0, *self.addresses[1:]]
        endpoints = [_endpoint(*each, address_0) for each in zip(seen_at, ports, strict=True)]
        endpoints[self.index] = own, port
        return endpoints

    def close(self) -> None:
        """Leave. Host 0 waits a little until the others have read what it has published."""
        if self._client is not None:
            self._client.store.close()
        if self._registry is not None:
            deadline, store = time.monotonic() + _SLACK, self._registry.store
            while time.monotonic() < deadline and store.clients().keys() & {*self._names}:
                time.sleep(_POLL)
            self._registry.close()

    # -- on every host but host 0 ------------------------------------------------------------------

    def _join(self) -> None:
        from shardwise.elastic.registry import RegistryClient
        from shardwise.elastic.store import StoreTimeoutError

        nodes = self._nodes
        self._client = RegistryClient(_connect(nodes, self._name), self._name, DoctorPlan)
        # Host 0 publishes once it has waited for all hosts.
        limit = timedelta(seconds=nodes.timeout + _GRACE + _SLACK)
        self._client.store.set_timeout(limit)
        try:
            plan = self._client.news()
        except (ValueError, StoreTimeoutError):
            plan = None
        except OSError as error:
            raise self._lost(error) from None
        if plan is None or len(plan.addresses) > 1 + _most_peers(nodes):
            text = f"what answers at {nodes.where} is not the doctor"
            advice = "run the command on host 0, of the same version and with this port"
            raise RendezvousError(text, advice)
        if _digest(self._name) not in plan.names[1 : len(plan.addresses)]:
            text = f"host 0 at {nodes.where} has begun without this host"
            advice = "run the command on all hosts within --timeout, as many as --nnodes"
            raise RendezvousError(text, advice)
        self.index, self.addresses = plan.names.index(_digest(self._name), 1), plan.addresses

    def _ask_host_0(
        self, client: RegistryClient[DoctorReport, DoctorPlan], value: Any, seconds: float
    ) -> list[Any]:
        deadline = time.monotonic() + 2 * seconds + _SLACK  # it waits for the slowest host
        try:
            client.report(DoctorReport(self._step, value))
            while (plan := client.news()) is None or plan.step != self._step:
                if time.monotonic() > deadline:
                    raise TimeoutError("it does not answer")
                time.sleep(_POLL)
            if len(plan.values) != len(self.addresses):
                raise ValueError(f"found {len(plan.values)} values for {len(self.addresses)} hosts")
        except (OSError, ValueError) as error:  # the latter if it is not the doctor
            raise self._lost(error) from None
        values = [_sanitized(each) for each in plan.values]
        values[self.index] = _sanitized(value)
        return values

    def _lost(self, error: Exception) -> RendezvousError:
        where = f"host 0 at {self._nodes.where}"
        text = f"{where} left or went silent ({printable(str(error))})"
        return RendezvousError(text, "look at its output")

    # -- on host 0 ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Wait for all hosts, and tell each its place."""
        from shardwise.elastic.registry import Registry

        nodes, others = self._nodes, dict[str, str]()
        self._registry = Registry(_listen(nodes), nodes.token, DoctorReport)
        most = _most_peers(nodes)
        deadline, grace = time.monotonic() + nodes.timeout, math.inf
        while len(others) < most and time.monotonic() < min(deadline, grace):
            time.sleep(_POLL)
            found = self._registry.store.clients().items()
            others = {name: address for name, address in found if len(name) <= _LONGEST}
            if len(others) >= nodes.count - 1:
                grace = min(grace, time.monotonic() + _GRACE)
        self._names += [*others][:most]
        self.addresses += [*others.values()][:most]
        self._publish([])

    def _collect(self, own: Any, seconds: float) -> list[Any]:
        """Wait for what all hosts send in this step, and publish it."""
        if self._registry is None:
            return [own]
        values, deadline = {0: own}, time.monotonic() + seconds
        while True:
            late, presence = time.monotonic() > deadline, self._registry.look()
            for at, name in enumerate(self._names[1:], 1):
                said = presence.reports.get(name)
                if said is not None and said.step == self._step:
                    values.setdefault(at, _sanitized(said.value))
                elif name not in presence.silence:
                    values[at] = None  # it is gone
                elif late:
                    self._registry.store.drop(name, "it was silent for too long")
                    values[at] = None
            if len(values) == len(self._names):
                ordered = [values[at] for at in range(len(values))]
                self._publish(ordered)
                return ordered
            time.sleep(_POLL)

    def _publish(self, values: list[Any]) -> None:
        assert self._registry is not None
        most = _MOST_BYTES // max(1, len(values))
        sent = [each if len(json.dumps(each)) <= most else None for each in values]
        names = ["", *map(_digest, self._names[1:])]
        self._registry.publish(DoctorPlan(self._step, sent, self.addresses, names))


def _most_peers(nodes: Nodes) -> int:
    """Return how many hosts are admitted: all that are expected, and many others."""
    return max(nodes.count, min(_MOST_PEERS * nodes.count, _MOST_IN_ALL))


def _digest(name: str) -> str:
    """Return what tells the host of a name that it is meant, and nobody else the name."""
    return hashlib.sha256(name.encode()).hexdigest()[:20]


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
