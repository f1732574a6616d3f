"""Can every pair of hosts connect at any port, and how fast is the way between them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint.disk.strict import Fields
from shardwise.doctor.facts import Facts
from shardwise.doctor.finding import Finding, fail, good, warn
from shardwise.errors import CheckpointError

PORTS, LINKS, INSIDE = "ports", "links", "inside"
MOST_MS = 5.0


@dataclass(frozen=True)
class Link:
    """What one host measured towards another.

    Attributes:
        error: why no connection was made; empty where one was.
        gbit: bits sent a second, in 10^9.
        ms: there and back of a small message, median, in milliseconds.
    """

    error: str = ""
    gbit: float = 0.0
    ms: float = 0.0

    @staticmethod
    def from_json(values: Any) -> Link | None:
        """What another host has measured; None where something else came."""
        try:
            fields = Fields(values, "link")
            return Link(fields.text("error"), fields.real("gbit"), fields.real("ms"))
        except CheckpointError:
            return None

    def __str__(self) -> str:
        return f"{self.gbit:.2f} Gbit/s, {self.ms:.2f} ms"


Links = Mapping[tuple[int, int], Link]


def check_ports(hosts: Sequence[Facts], links: Links) -> list[Finding]:
    """Pairs that cannot connect at a port which the kernel chose."""
    found = [
        fail(
            PORTS,
            f"{hosts[a].who} cannot connect to {hosts[b].who}: {link.error}",
            "let all TCP ports pass between the hosts: backends take ports that the kernel chooses",
        )
        for (a, b), link in links.items()
        if link.error and a != b
    ]
    pairs = sum(1 for a, b in links if a != b)
    return found or [good(PORTS, f"{pairs} ways between hosts are open" if pairs else "one host")]


def check_links(hosts: Sequence[Facts], links: Links, least_gbit: float) -> list[Finding]:
    """Ways between hosts that are slow."""
    found = []
    between = {pair: link for pair, link in links.items() if not link.error and pair[0] != pair[1]}
    for (a, b), link in between.items():
        way = f"{hosts[a].who} to {hosts[b].who}: {link}"
        if link.gbit < least_gbit:
            advice = (
                f"expected {least_gbit:g} Gbit/s; train with --strategy hybrid, or find out why"
            )
            found.append(warn(LINKS, way, advice))
        elif link.ms > MOST_MS:
            advice = f"expected {MOST_MS:g} ms; fewer, larger messages: --strategy hybrid"
            found.append(warn(LINKS, way, advice))
        else:
            found.append(good(LINKS, way))
    return found


def check_inside(hosts: Sequence[Facts], links: Links) -> list[Finding]:
    """What ranks of a host hand each other: through memory, and as messages.

    On CPUs it is memory, where ranks can share it; messages go through the host's own address.
    """
    found = []
    for (a, b), link in links.items():
        if a != b:
            continue
        if link.error:
            advice = "bring up the loopback device: ip link set lo up"
            found.append(fail(INSIDE, f"{hosts[a].who}: {link.error}", advice))
        else:
            memory = hosts[a].memory
            shared = "no shared memory" if memory.error else f"shared memory {memory}"
            found.append(good(INSIDE, f"{hosts[a].who}: {shared}; messages {link}"))
    return found
