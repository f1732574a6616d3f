"""A visit to all hosts: what is asked, in which order, and how long it may take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from shardwise.doctor import checks, table
from shardwise.doctor.checks import Finding, Level, fail, good
from shardwise.doctor.facts import Facts, look
from shardwise.doctor.measure import CONNECT, DRAIN, STREAM, Echo, Link, measure
from shardwise.doctor.table import RendezvousError, Table
from shardwise.launch.hosts import Nodes

#: Every check by name, in the order in which it is made.
CHECKS = (
    table.RENDEZVOUS,
    checks.RANKS,
    checks.WORLD,
    checks.VERSIONS,
    checks.CLOCKS,
    checks.INTERFACES,
    checks.LIMITS,
    checks.PORTS,
    checks.LINKS,
    checks.INSIDE,
)

#: The longest that each part of a visit takes, in seconds, beside ``--timeout`` for all to come.
SECONDS = {"facts": 10.0, "clocks": 5.0, "ways": CONNECT + STREAM + 2 * DRAIN + 1.5}


def visit(nodes: Nodes, nproc: int, least_gbit: float, say: Callable[[Finding], None]) -> bool:
    """Look at this host and, with all others, at the ways between them.

    Args:
        nodes: the job, as this host was told; a job of one host needs no other.
        nproc: ranks of this host.
        least_gbit: what the way between two hosts should carry, in Gbit/s.
        say: shows a finding as soon as there is one; all hosts show the same.

    Returns:
        Whether a job would run.
    """
    healthy = True

    def tell(findings: Iterable[Finding]) -> None:
        nonlocal healthy
        for finding in findings:
            healthy = healthy and finding.level is not Level.FAIL
            say(finding)

    mine = look(nodes, nproc)
    try:
        with contextlib.closing(Table(nodes)) as seats:
            _examine(seats, mine, least_gbit, tell)
    except RendezvousError as error:
        tell([error.finding])
        # What can be told of this host alone.
        tell([*checks.check_interfaces([mine]), *checks.check_limits([mine])])
    return healthy


def _examine(
    seats: Table, mine: Facts, least_gbit: float, tell: Callable[[Iterable[Finding]], None]
) -> None:
    told = [Facts.from_json(each) for each in seats.gather(mine.to_json(), SECONDS["facts"])]
    told[seats.seat] = told[seats.seat] or mine
    places = [place for place, each in enumerate(told) if each is not None]
    hosts = [each for each in told if each is not None]
    gone = len(told) - len(hosts)
    tell([good(table.RENDEZVOUS, f"{len(hosts)} {'host' if len(hosts) == 1 else 'hosts'} met")])
    if gone:
        text = f"{gone} came and said nothing that can be read here"
        advice = "is another version of shardwise there, or does something else use the port?"
        tell([fail(table.RENDEZVOUS, text, advice)])
    tell(checks.check_ranks(hosts, hosts[0].nnodes))
    tell(checks.check_world(hosts))
    tell(checks.check_versions(hosts))
    ahead = seats.clocks(SECONDS["clocks"])
    tell(checks.check_clocks(hosts, {places.index(p): s for p, s in ahead.items() if p in places}))
    tell(checks.check_interfaces(hosts))
    tell(checks.check_limits(hosts))
    ways = _measure(seats, mine, [each is not None for each in told])
    kept = {
        (places.index(a), places.index(b)): link
        for (a, b), link in ways.items()
        if a in places and b in places
    }
    tell(checks.check_ports(hosts, kept))
    tell(checks.check_links(hosts, kept, least_gbit))
    tell(checks.check_inside(hosts, kept))


def _measure(seats: Table, mine: Facts, readable: Sequence[bool]) -> dict[tuple[int, int], Link]:
    """Every host towards every other, and itself: in each round a host sends to one other.

    Whoever said nothing that can be read is none of the hosts: nothing is sent there.
    """
    found: dict[tuple[int, int], Link] = {}
    count = len(readable)
    with contextlib.closing(Echo()) as echo:
        doors = seats.doors(mine.address or "127.0.0.1", echo.port, SECONDS["facts"])
        for turn in range(count):
            other = (seats.seat + turn) % count
            door = doors[other] if readable[other] else None
            link = Link(error="it left") if door is None else measure(*door)
            for place, each in enumerate(seats.gather(asdict(link), SECONDS["ways"])):
                heard = Link.from_json(each)
                if heard is not None:
                    found[place, (place + turn) % count] = heard
    return found
