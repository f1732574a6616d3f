"""The diagnosis: which checks run, in which order, and how long each may take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from shardwise.app.doctor import checks, group
from shardwise.app.doctor.checks import Finding, Level, fail, ok
from shardwise.app.doctor.facts import Facts, received
from shardwise.app.doctor.group import HostGroup, RendezvousError, check_backend
from shardwise.app.doctor.probe import (
    CONNECT,
    DRAIN,
    STREAM,
    EchoServer,
    PairLink,
    measure_connection,
)
from shardwise.base.units import counted
from shardwise.elastic.hosts import JobBackend, Nodes

#: The names of all checks, in the order in which they run.
CHECKS = (
    group.RENDEZVOUS,
    checks.RANKS,
    checks.WORLD,
    checks.VERSIONS,
    checks.START,
    checks.DEVICES,
    checks.NAMES,
    checks.INTERFACES,
    checks.LIMITS,
    checks.CLOCKS,
    checks.PORTS,
    checks.LINKS,
    checks.INSIDE,
)

#: The longest that each step takes, in seconds, in addition to ``--timeout`` for all to come.
SECONDS = {"facts": 10.0, "links": CONNECT + STREAM + 2 * DRAIN + 1.5}


def diagnose(nodes: Nodes, own: Facts, least_gbit: float, say: Callable[[Finding], None]) -> bool:
    """Check this host and, together with all others, the connections between them.

    With a backend of torch's, the hosts do not meet: its store is not the doctor's to write to.
    Each checks whether it reaches the address, and itself.

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

    if nodes.backend is not JobBackend.OURS:
        report([check_backend(nodes)])
        report(_check_alone(own))
        return healthy
    try:
        with contextlib.closing(HostGroup(nodes)) as hosts:
            _check_all(nodes, hosts, own, least_gbit, report)
    except RendezvousError as error:
        report([error.finding])
        report(_check_alone(own))
    return healthy


def _check_alone(own: Facts) -> Iterator[Finding]:
    """Check what can be checked without the other hosts."""
    yield from checks.check_start([own])
    yield from checks.check_devices([own])
    yield from checks.check_names([own], {})
    yield from checks.check_interfaces([own])
    yield from checks.check_limits([own])


def _check_all(
    nodes: Nodes,
    group_: HostGroup,
    own: Facts,
    least_gbit: float,
    report: Callable[[Iterable[Finding]], None],
) -> None:
    gathered = group_.all_gather(asdict(own), SECONDS["facts"])
    read = [received(Facts, each) for each in gathered]
    read[group_.index] = read[group_.index] or own
    # Hosts whose facts cannot be read take no part in the checks; indices are of the others.
    places = [place for place, each in enumerate(read) if each is not None]
    hosts = [each for each in read if each is not None]
    gone = len(read) - len(hosts)
    text = f"found {counted(hosts, 'host')}"
    if nodes.count > 1:
        text += ", all with the token" if nodes.token else "; no token keeps others out"
    report([ok(group.RENDEZVOUS, text)])
    if gone:
        text = f"{gone} connected and sent nothing that can be read here"
        advice = "is another version of shardwise there, or does something else use the port?"
        report([fail(group.RENDEZVOUS, text, advice)])
    report(checks.check_ranks(hosts, hosts[0].nnodes))
    report(checks.check_world(hosts))
    report(checks.check_versions(hosts))
    report(checks.check_start(hosts))
    report(checks.check_devices(hosts))
    seen_at = {at: group_.addresses[place] for at, place in enumerate(places) if place}
    report(checks.check_names(hosts, seen_at))
    report(checks.check_interfaces(hosts))
    report(checks.check_limits(hosts))
    measured = _measure_all(group_, own, [each is not None for each in read])
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
    group_: HostGroup, own: Facts, readable: Sequence[bool]
) -> dict[tuple[int, int], PairLink]:
    """Measure from every host to every other and to itself, by index of sender and receiver.

    In each round, every host sends to one other. Nothing is sent to peers whose facts could not be
    read: they may be anything.
    """
    found: dict[tuple[int, int], PairLink] = {}
    count = len(readable)
    with contextlib.closing(EchoServer()) as server:
        address = own.address or "127.0.0.1"
        endpoints = group_.endpoints(address, server.port, SECONDS["facts"])
        for turn in range(count):
            other = (group_.index + turn) % count
            endpoint = endpoints[other] if readable[other] else None
            own_link = PairLink("it left") if endpoint is None else measure_connection(*endpoint)
            gathered = group_.all_gather(asdict(own_link), SECONDS["links"])
            for place, each in enumerate(gathered):
                link = received(PairLink, each)
                if link is not None:
                    found[place, (place + turn) % count] = link
    return found
