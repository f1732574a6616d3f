"""The checks: facts and measurements in, findings out.

Every function takes all hosts, and returns at least one finding: what is wrong, or that nothing is.
"""

from __future__ import annotations

import enum
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.doctor.facts import Facts
from shardwise.doctor.measure import Link

RANKS, WORLD = "node ranks", "world size"
VERSIONS = "versions"
CLOCKS = "clocks"
INTERFACES = "interfaces"
LIMITS = "limits"
PORTS, LINKS, INSIDE = "ports", "links", "inside"
_LONGEST = 2000  # characters of a line, however many hosts it is about
MOST_SECONDS = 1.0  # beyond that, logs of several hosts are hard to compare
MOST_MS = 5.0
_OWN = 256  # files that a rank opens for itself, with room to spare
_PER_PEER = 4
_LEAST_SHM = 64 * 2**20
Links = Mapping[tuple[int, int], Link]


class Level(enum.Enum):
    """How severe a finding is."""

    OK = "ok"
    WARN = "warn"  # a job runs, but slower or at a risk
    FAIL = "fail"  # a job does not run


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        check: the name of the check, as the table in ``docs/multi-node.md`` has it.
        level: how severe it is.
        text: what was found.
        advice: what to do; empty if nothing is to be done.
    """

    check: str
    level: Level
    text: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f": {self.advice}" if self.advice else ""
        line = f"{self.level.value:<5}{self.check:<12}{self.text}{advice}"
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def shortened(items: Iterable[object], count: int, by: str = ", ") -> str:
    """Join the first 16 items for a message, and count the others.

    Args:
        items: all of them, or the first ones.
        count: how many there are.
        by: the separator.
    """
    shown = [str(item) for item, _ in zip(items, range(16), strict=False)]
    more = [f"{count - len(shown)} more"] if count > len(shown) else []
    return by.join([*shown, *more])


def ok(check: str, text: str) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, advice: str) -> Finding:
    """Return a finding with which a job would run, but not well."""
    return Finding(check, Level.WARN, text, advice)


def fail(check: str, text: str, advice: str) -> Finding:
    """Return a finding with which a job would not run."""
    return Finding(check, Level.FAIL, text, advice)


def check_ranks(hosts: Sequence[Facts], nnodes: int) -> list[Finding]:
    """Find node ranks that are missing or given twice."""
    counts = Counter(host.rank for host in hosts)
    found = []
    for rank in sorted(rank for rank, count in counts.items() if count > 1):
        names = [host.name for host in hosts if host.rank == rank]
        text = (
            f"rank {rank} is used by {counts[rank]} hosts ({shortened(names, len(names), ' and ')})"
        )
        found.append(fail(RANKS, text, "give every host a different --node-rank"))
    # Not a set of all ranks: a hostile peer may claim a million of them.
    missing = (rank for rank in range(nnodes) if rank not in counts)
    absent = nnodes - sum(1 for rank in counts if 0 <= rank < nnodes)
    if absent:
        shown = shortened(missing, absent)
        advice = "run the command there as well, within --timeout, with that --node-rank"
        found.append(fail(RANKS, f"no host has rank {shown}", advice))
    return found or [ok(RANKS, f"0 to {nnodes - 1}, each once")]


def check_world(hosts: Sequence[Facts]) -> list[Finding]:
    """Find hosts that expect another number of hosts or ranks."""
    sizes = {(host.nnodes, host.nproc): host for host in hosts}
    if len(sizes) == 1:
        [(nnodes, nproc)] = sizes
        return [ok(WORLD, f"{nnodes} x {nproc} ranks, on every host")]
    values = [f"{host.nnodes} x {host.nproc} on {host.label}" for host in hosts]
    text = f"hosts x ranks is {shortened(values, len(values))}"
    return [fail(WORLD, text, "pass the same --nnodes and --nproc everywhere")]


def check_versions(hosts: Sequence[Facts]) -> list[Finding]:
    """Find versions of Python, torch and shardwise that differ."""
    found = []
    for name in hosts[0].versions:
        if len({host.versions.get(name) for host in hosts}) > 1:
            values = [f"{host.versions.get(name)} on {host.label}" for host in hosts]
            advice = f"install the same {name} on all hosts"
            found.append(fail(VERSIONS, f"{name} is {shortened(values, len(values))}", advice))
    same = ", ".join(f"{name} {version}" for name, version in hosts[0].versions.items())
    return found or [ok(VERSIONS, same)]


def check_clocks(hosts: Sequence[Facts], ahead: Mapping[int, float]) -> list[Finding]:
    """Find clocks that differ from the clock of host 0.

    Args:
        hosts: the hosts.
        ahead: by index in ``hosts``, how far its clock is ahead of the clock of host 0, in seconds.
    """
    found = [
        warn(
            CLOCKS,
            f"{hosts[place].label} is {abs(seconds):.1f} s "
            f"{'ahead of' if seconds > 0 else 'behind'} host 0",
            "synchronize the clocks (chrony, ntpd), or logs of several hosts cannot be compared",
        )
        for place, seconds in ahead.items()
        if abs(seconds) > MOST_SECONDS
    ]
    largest = max((abs(seconds) for seconds in ahead.values()), default=0.0)
    return found or [ok(CLOCKS, f"within {largest:.2f} s of host 0")]


def check_interfaces(hosts: Sequence[Facts]) -> list[Finding]:
    """Check the interfaces towards host 0, and which ones gloo and NCCL would use under torchrun.

    ``shardwise train`` passes the right interface to both; torchrun leaves the choice to them.
    """
    found = []
    for host in hosts:
        named = [" ".join((name, *own)) for name, own in host.interfaces.items()]
        shown = shortened(named, len(named))
        if host.towards is None:
            advice = "bring up the interface to the other hosts, or give its address as --rdzv"
            found.append(
                fail(INTERFACES, f"{host.label}: no interface leads to host 0 ({shown})", advice)
            )
            continue
        found += _check_settings(host)
        takes = gloo_interface(host)
        if len(hosts) > 1 and takes != host.towards:
            text = (
                f"{host.label}: gloo would use {takes or 'none'} under torchrun, as the host's "
                f"name is {host.resolved}; the interface towards host 0 is {host.towards}"
            )
            found.append(
                warn(INTERFACES, text, f"export GLOO_SOCKET_IFNAME={shlex.quote(host.towards)}")
            )
    taken = ", ".join(
        f"{host.towards} on {host.label} (NCCL: {nccl_interface(host)})" for host in hosts
    )
    return found or [ok(INTERFACES, taken)]


def _check_settings(host: Facts) -> list[Finding]:
    """Find environment variables that name an interface which the host does not have."""
    found = []
    for variable, value in host.settings.items():
        names = [name.strip("=^") for name in value.split(",")]
        unknown = [name for name in names if not any(i.startswith(name) for i in host.interfaces)]
        if unknown and not value.startswith("^"):
            text = f"{host.label}: {variable}={value}, an interface that it does not have"
            known = shortened(host.interfaces, len(host.interfaces))
            found.append(fail(INTERFACES, text, f"unset it, or set it to one of {known}"))
    return found


def gloo_interface(host: Facts) -> str | None:
    """Return the interface that gloo uses: the one that is set, or that of the host's name."""
    value = host.settings.get("GLOO_SOCKET_IFNAME")
    if value is not None:
        return value.split(",")[0]
    return next((name for name, own in host.interfaces.items() if host.resolved in own), None)


def nccl_interface(host: Facts) -> str:
    """Return the interface that NCCL uses: the one that is set, else InfiniBand, else another."""
    value = host.settings.get("NCCL_SOCKET_IFNAME")
    if value is not None:
        return value
    names = [name for name in host.interfaces if not name.startswith(("lo", "docker", "virbr"))]
    first = [name for name in names if name.startswith("ib")] or names
    return first[0] if first else "none"


def files_needed(ranks: int) -> int:
    """Return how many open files one of ``ranks`` ranks should be allowed."""
    return _OWN + _PER_PEER * ranks


def check_limits(hosts: Sequence[Facts]) -> list[Finding]:
    """Check the limits on open files, on shared memory and on ``/dev/shm``."""
    found = []
    needed = files_needed(sum(host.nproc for host in hosts))
    for host in hosts:
        if host.files < needed:
            text = f"{host.label}: {host.files} open files per process, a rank may need {needed}"
            found.append(fail(LIMITS, text, f"run ulimit -n {needed} before the job"))
        if host.memory.error:
            advice = "fix it; otherwise ranks of the host send messages, which is slower"
            found.append(warn(LIMITS, f"{host.label}: shared memory: {host.memory.error}", advice))
        if 0 <= host.shm_free < _LEAST_SHM:
            text = f"{host.label}: {host.shm_free / 2**20:.0f} MiB free in /dev/shm"
            advice = "enlarge it (docker: --shm-size=1g); NCCL and data loaders use it"
            found.append(warn(LIMITS, text, advice))
    return found or [ok(LIMITS, f"{min(host.files for host in hosts)} files, shared memory works")]


def check_ports(hosts: Sequence[Facts], links: Links) -> list[Finding]:
    """Find pairs of hosts that cannot connect at a port which the kernel chose."""
    found = [
        fail(
            PORTS,
            f"{hosts[a].label} cannot connect to {hosts[b].label}: {link.error}",
            "allow all TCP ports between the hosts; backends use ports that the kernel chooses",
        )
        for (a, b), link in links.items()
        if link.error and a != b
    ]
    pairs = sum(1 for a, b in links if a != b)
    return found or [ok(PORTS, f"{pairs} connections between hosts work" if pairs else "one host")]


def check_links(hosts: Sequence[Facts], links: Links, least_gbit: float) -> list[Finding]:
    """Find slow connections between hosts.

    Args:
        hosts: the hosts.
        links: what they measured, by index of the sender and the receiver.
        least_gbit: the bandwidth to expect, in Gbit/s.
    """
    found = []
    between = {pair: link for pair, link in links.items() if not link.error and pair[0] != pair[1]}
    for (a, b), link in between.items():
        way = f"{hosts[a].label} to {hosts[b].label}: {link}"
        if link.gbit < least_gbit:
            advice = (
                f"expected {least_gbit:g} Gbit/s; train with --strategy hybrid, or find the cause"
            )
            found.append(warn(LINKS, way, advice))
        elif link.ms > MOST_MS:
            advice = f"expected {MOST_MS:g} ms; --strategy hybrid sends fewer, larger messages"
            found.append(warn(LINKS, way, advice))
        else:
            found.append(ok(LINKS, way))
    return found


def check_within_hosts(hosts: Sequence[Facts], links: Links) -> list[Finding]:
    """Report how fast ranks of one host exchange data: through shared memory, and as messages.

    On CPUs they use shared memory if they can; messages go through the host's own address.
    """
    found = []
    for (a, b), link in links.items():
        if a != b:
            continue
        if link.error:
            advice = "bring up the loopback device (ip link set lo up)"
            found.append(fail(INSIDE, f"{hosts[a].label}: {link.error}", advice))
        else:
            memory = hosts[a].memory
            shared = "no shared memory" if memory.error else f"shared memory {memory}"
            found.append(ok(INSIDE, f"{hosts[a].label}: {shared}; messages {link}"))
    return found
