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

_LONGEST = 2000  # characters of a line, however many hosts have something to say


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"  # a job runs, slower or at a risk
    FAIL = "fail"  # a job does not run


@dataclass(frozen=True)
class Finding:
    """One verdict.

    Attributes:
        check: which check, as the table in ``docs/multi-node.md`` names it.
        level: how bad it is.
        text: what was found.
        advice: what to do; empty where nothing is to be done.
    """

    check: str
    level: Level
    text: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f": {self.advice}" if self.advice else ""
        line = f"{self.level.value:<5}{self.check:<12}{self.text}{advice}"
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def listed(items: Iterable[object], count: int, by: str = ", ") -> str:
    """The first few of some items for people, and how many more there are.

    Args:
        items: as many as there are, or the first of them.
        count: how many there are.
        by: what stands between two.
    """
    shown = [str(item) for item, _ in zip(items, range(16), strict=False)]
    more = [f"{count - len(shown)} more"] if count > len(shown) else []
    return by.join([*shown, *more])


def good(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, advice: str) -> Finding:
    """A job would run, but not well."""
    return Finding(check, Level.WARN, text, advice)


def fail(check: str, text: str, advice: str) -> Finding:
    """A job would not run."""
    return Finding(check, Level.FAIL, text, advice)


RANKS, WORLD = "node ranks", "world size"


def check_ranks(hosts: Sequence[Facts], nnodes: int) -> list[Finding]:
    """Node ranks that are missing, or given twice."""
    counts = Counter(host.rank for host in hosts)
    found = []
    for rank in sorted(rank for rank, count in counts.items() if count > 1):
        names = [host.name for host in hosts if host.rank == rank]
        text = f"rank {rank} is that of {counts[rank]} hosts ({listed(names, len(names), ' and ')})"
        found.append(fail(RANKS, text, "give every host a --node-rank of its own"))
    # Not a set of all ranks: whoever says how many there are may say a million.
    missing = (rank for rank in range(nnodes) if rank not in counts)
    absent = nnodes - sum(1 for rank in counts if 0 <= rank < nnodes)
    if absent:
        shown = listed(missing, absent)
        advice = "run the command there too, within --timeout, with that --node-rank"
        found.append(fail(RANKS, f"no host came as rank {shown}", advice))
    return found or [good(RANKS, f"0 to {nnodes - 1}, each once")]


def check_world(hosts: Sequence[Facts]) -> list[Finding]:
    """Hosts that expect another number of hosts or ranks."""
    sizes = {(host.nnodes, host.nproc): host for host in hosts}
    if len(sizes) == 1:
        [(nnodes, nproc)] = sizes
        return [good(WORLD, f"{nnodes} x {nproc} ranks, as every host says")]
    told = [f"{host.nnodes} x {host.nproc} on {host.who}" for host in hosts]
    text = f"hosts x ranks is {listed(told, len(told))}"
    return [fail(WORLD, text, "say the same --nnodes and --nproc everywhere")]


VERSIONS = "versions"


def check_versions(hosts: Sequence[Facts]) -> list[Finding]:
    """Versions of Python, torch and shardwise that differ."""
    found = []
    for name in hosts[0].versions:
        if len({host.versions.get(name) for host in hosts}) > 1:
            told = [f"{host.versions.get(name)} on {host.who}" for host in hosts]
            advice = f"install the same {name} on all hosts"
            found.append(fail(VERSIONS, f"{name} is {listed(told, len(told))}", advice))
    same = ", ".join(f"{name} {version}" for name, version in hosts[0].versions.items())
    return found or [good(VERSIONS, same)]


CLOCKS = "clocks"
MOST = 1.0  # seconds: more makes logs of several hosts hard to read together


def check_clocks(hosts: Sequence[Facts], ahead: Mapping[int, float]) -> list[Finding]:
    """Clocks that differ from host 0's.

    Args:
        hosts: the hosts.
        ahead: by place in ``hosts``: seconds by which its clock is ahead of host 0's.
    """
    found = [
        warn(
            CLOCKS,
            f"{hosts[place].who} is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} "
            "host 0",
            "synchronise clocks (chrony, ntpd): logs of several hosts are read by them",
        )
        for place, seconds in ahead.items()
        if abs(seconds) > MOST
    ]
    largest = max((abs(seconds) for seconds in ahead.values()), default=0.0)
    return found or [good(CLOCKS, f"within {largest:.2f} s of host 0")]


INTERFACES = "interfaces"


def check_interfaces(hosts: Sequence[Facts]) -> list[Finding]:
    """Interfaces towards host 0, and what gloo and NCCL take under torchrun.

    ``shardwise train`` names the interface to both of them; torchrun leaves it to them.
    """
    found = []
    for host in hosts:
        named = [" ".join((name, *own)) for name, own in host.interfaces.items()]
        shown = listed(named, len(named))
        if host.towards is None:
            advice = "bring up the interface to the other hosts, or give its address as --rdzv"
            found.append(fail(INTERFACES, f"{host.who}: none leads to host 0 ({shown})", advice))
            continue
        found += _named(host)
        takes = gloo_takes(host)
        if len(hosts) > 1 and takes != host.towards:
            text = (
                f"{host.who}: gloo would take {takes or 'none'} under torchrun, as the host's "
                f"name is {host.resolved}; the way to host 0 is {host.towards}"
            )
            found.append(
                warn(INTERFACES, text, f"export GLOO_SOCKET_IFNAME={shlex.quote(host.towards)}")
            )
    taken = ", ".join(f"{host.towards} on {host.who} (NCCL: {nccl_takes(host)})" for host in hosts)
    return found or [good(INTERFACES, taken)]


def _named(host: Facts) -> list[Finding]:
    found = []
    for variable, value in host.settings.items():
        names = [name.strip("=^") for name in value.split(",")]
        unknown = [name for name in names if not any(i.startswith(name) for i in host.interfaces)]
        if unknown and not value.startswith("^"):
            text = f"{host.who}: {variable}={value}, which it does not have"
            known = listed(host.interfaces, len(host.interfaces))
            found.append(fail(INTERFACES, text, f"unset it, or name one of {known}"))
    return found


def gloo_takes(host: Facts) -> str | None:
    """The interface that gloo takes: the one it is told, or that of the host's own name."""
    told = host.settings.get("GLOO_SOCKET_IFNAME")
    if told is not None:
        return told.split(",")[0]
    return next((name for name, own in host.interfaces.items() if host.resolved in own), None)


def nccl_takes(host: Facts) -> str:
    """The interface that NCCL takes: one it is told, else InfiniBand, else any but these."""
    told = host.settings.get("NCCL_SOCKET_IFNAME")
    if told is not None:
        return told
    names = [name for name in host.interfaces if not name.startswith(("lo", "docker", "virbr"))]
    first = [name for name in names if name.startswith("ib")] or names
    return first[0] if first else "none"


LIMITS = "limits"
_OWN = 256  # files that a rank has open for itself, with room to spare
_PER_PEER = 4
_LEAST_SHM = 64 * 2**20


def files_needed(ranks: int) -> int:
    """Open files that one of so many ranks should be allowed."""
    return _OWN + _PER_PEER * ranks


def check_limits(hosts: Sequence[Facts]) -> list[Finding]:
    """Open files, anonymous shared memory, ``/dev/shm``."""
    found = []
    needed = files_needed(sum(host.nproc for host in hosts))
    for host in hosts:
        if host.files < needed:
            text = f"{host.who}: {host.files} open files a process, a rank may need {needed}"
            found.append(fail(LIMITS, text, f"ulimit -n {needed} or more, before the job"))
        if host.memory.error:
            advice = "mend it; else ranks of the host send messages, which is slower"
            found.append(warn(LIMITS, f"{host.who}: shared memory: {host.memory.error}", advice))
        if 0 <= host.shm_free < _LEAST_SHM:
            text = f"{host.who}: {host.shm_free / 2**20:.0f} MiB free in /dev/shm"
            advice = "enlarge it (docker: --shm-size=1g): NCCL and data loaders use it"
            found.append(warn(LIMITS, text, advice))
    return found or [
        good(LIMITS, f"{min(host.files for host in hosts)} files, shared memory works")
    ]


PORTS, LINKS, INSIDE = "ports", "links", "inside"
MOST_MS = 5.0


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
