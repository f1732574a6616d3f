"""The checks: facts and measurements in, findings out.

Every function takes all hosts, and returns at least one finding: what is wrong, or that nothing is.
"""

from __future__ import annotations

import enum
import ipaddress
import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.app.doctor.facts import Facts
from shardwise.app.doctor.probe import PairLink

RANKS, WORLD = "node ranks", "world size"
VERSIONS = "versions"
START, DEVICES = "start", "devices"
CLOCKS = "clocks"
NAMES, INTERFACES = "names", "interfaces"
LIMITS = "limits"
PORTS, LINKS, INSIDE = "ports", "links", "inside"
_LONGEST = 2000  # characters of a line, however many hosts it is about
MOST_SECONDS = 1.0  # beyond that, logs of several hosts are hard to compare
# Under torchrun, hosts write the time of each heartbeat into the rendezvous, every 5 seconds, and
# take a host for dead that has missed three by their own clock. Our own compares no clocks.
DEAD_SECONDS = 15.0
MOST_MS = 5.0
_OWN = 256  # files that a rank opens for itself, with room to spare
_PER_PEER = 4
_TASKS = 64  # processes and threads of a rank: of torch, of backends, of data loaders
_LEAST_SHM = 64 * 2**20
_LEAST_TEMPORARY = 64 * 2**20
_CPUS = "CPUs"
_SAME = ("NCCL", "RCCL")  # ranks with different versions do not communicate
Links = Mapping[tuple[int, int], PairLink]


class Level(enum.Enum):
    """How severe a finding is."""

    OK = "ok"
    WARN = "warn"  # a job runs, but slower or at a risk
    FAIL = "fail"  # a job does not run


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        check: the name of the check, as the table in ``docs/reference/hosts.md`` has it.
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


def _on_hosts(values: Iterable[object], hosts: Sequence[Facts]) -> str:
    """Describe what each host has: ``2.11 on host 0 (a), 2.12 on host 1 (b)``."""
    shown = [f"{value} on {host.label}" for value, host in zip(values, hosts, strict=True)]
    return shortened(shown, len(shown))


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
    text = f"hosts x ranks is {_on_hosts((f'{h.nnodes} x {h.nproc}' for h in hosts), hosts)}"
    return [fail(WORLD, text, "pass the same --nnodes and --nproc everywhere")]


def check_versions(hosts: Sequence[Facts]) -> list[Finding]:
    """Find versions of Python, torch and shardwise that differ."""
    found = []
    for name in hosts[0].versions:
        values = [host.versions.get(name) for host in hosts]
        if len(set(values)) > 1:
            advice = f"install the same {name} on all hosts"
            found.append(fail(VERSIONS, f"{name} is {_on_hosts(values, hosts)}", advice))
    same = ", ".join(f"{name} {version}" for name, version in hosts[0].versions.items())
    return found or [ok(VERSIONS, same)]


def check_start(hosts: Sequence[Facts]) -> list[Finding]:
    """Find hosts on which a process that is started as a rank ends, or sees no torch."""
    found = [
        fail(
            START,
            f"{host.label}: a process started as a rank failed ({host.probe.error})",
            "run python -P -m shardwise --version there, and import torch; repair what fails",
        )
        for host in hosts
        if host.probe.error
    ]
    return found or [ok(START, "a process started as a rank imports torch, on every host")]


def check_devices(hosts: Sequence[Facts]) -> list[Finding]:
    """Name the accelerators and their software, and find what differs between hosts.

    Hosts on which no rank starts are left out.
    """
    hosts = [host for host in hosts if not host.probe.error]
    found = [
        warn(
            DEVICES,
            f"{host.label}: torch finds no accelerator: {host.probe.problem}",
            "install a torch that is built for the driver, or the driver that this torch needs",
        )
        for host in hosts
        if host.probe.problem
    ]
    if hosts:
        found += _check_models(hosts)
    names = dict.fromkeys(name for host in hosts for name in host.probe.versions)
    for name in names:
        values = [host.probe.versions.get(name, "missing") for host in hosts]
        if len(set(values)) > 1:
            text = f"{name} is {_on_hosts(values, hosts)}"
            if name in _SAME:
                advice = f"load the same {name} on all hosts; ranks refuse to communicate"
                found.append(fail(DEVICES, text, advice))
            else:
                found.append(warn(DEVICES, text, f"install the same {name} on all hosts"))
    return found


def _check_models(hosts: Sequence[Facts]) -> list[Finding]:
    """Compare numbers and models, and which device the ranks of each host take by default."""
    models = [_models(host) for host in hosts]
    takes = [_default_device(host) for host in hosts]
    text = _on_hosts(models, hosts)
    if len(set(takes)) > 1:
        text = f"{text}; ranks would compute on {_on_hosts(takes, hosts)}"
        advice = "use hosts with an accelerator for each rank, or pass the same --device to the job"
        return [fail(DEVICES, text, advice)]
    if len(set(models)) > 1:
        advice = "the slowest sets the pace of all, and the smallest memory the size of the model"
        return [warn(DEVICES, text, advice)]
    found = hosts[0].probe
    text = models[0] + (" on every host" if len(hosts) > 1 else "")
    if found.models and takes == [_CPUS] * len(hosts):
        advice = f"pass --nproc {len(found.models)}, or leave accelerators unused"
        return [warn(DEVICES, f"{text}: too few for {hosts[0].nproc} ranks", advice)]
    same = [
        f"{name} {version}"
        for name, version in found.versions.items()
        if all(host.probe.versions.get(name) == version for host in hosts)
    ]
    return [ok(DEVICES, "; ".join([text, *([", ".join(same)] if same else [])]))]


def _default_device(host: Facts) -> str:
    """Return what the ranks of a host compute on, unless they are given ``--device``."""
    found = host.probe
    return found.kind if found.kind and len(found.models) >= host.nproc else _CPUS


def _models(host: Facts) -> str:
    """Describe the accelerators of a host: ``8 x NVIDIA A100 (39.4 GiB)``."""
    counts = Counter(host.probe.models)
    named = [
        f"{count} x {name}" + (f" ({memory / 2**30:.1f} GiB)" if memory else "")
        for (name, memory), count in counts.items()
    ]
    return shortened(named, len(named)) or "no accelerators"


def check_clocks(hosts: Sequence[Facts], ahead: Mapping[int, float]) -> list[Finding]:
    """Find clocks that differ from the clock of host 0.

    Args:
        hosts: the hosts.
        ahead: by index in ``hosts``, how far its clock is ahead of the clock of host 0, in seconds.
    """
    found = []
    for place, seconds in ahead.items():
        if abs(seconds) <= MOST_SECONDS:
            continue
        way = "ahead of" if seconds > 0 else "behind"
        text = f"{hosts[place].label} is {abs(seconds):.1f} s {way} host 0"
        advice = (
            "synchronize the clocks (chrony, ntpd), or logs of several hosts cannot be compared"
        )
        if abs(seconds) > DEAD_SECONDS:
            advice += "; torchrun takes hosts for dead whose clocks differ that much"
        found.append(warn(CLOCKS, text, advice))
    if len(hosts) > 1 and not ahead:
        return [ok(CLOCKS, "not compared, since no connection to host 0 works")]
    largest = max((abs(seconds) for seconds in ahead.values()), default=0.0)
    return found or [ok(CLOCKS, f"within {largest:.2f} s of host 0")]


def check_names(hosts: Sequence[Facts], seen_at: Mapping[int, str]) -> list[Finding]:
    """Check what torch's agent looks up, and the address that others are given for a host.

    torchrun takes a port of ``localhost``, and its c10d rendezvous looks up the name of the host to
    find out which host serves it; an unknown name ends it. Our own agent uses addresses.

    Args:
        hosts: the hosts.
        seen_at: by index in ``hosts``, the address from which it has connected to host 0.
    """
    found = []
    for at, host in enumerate(hosts):
        own = [host.address, *itertools.chain(*host.interfaces.values())]
        seen = seen_at.get(at)
        if seen is not None and _plain(seen) not in map(_plain, own):
            text = f"{host.label} connects from {seen}, and its own address is {host.address}"
            advice = "ranks get its own; join the hosts without translation of addresses (NAT)"
            found.append(fail(NAMES, text, advice))
        if host.localhost:
            text = f"{host.label}: no port of localhost can be taken ({host.localhost})"
            advice = (
                "write 127.0.0.1 localhost into /etc/hosts (ip link set lo up); torchrun needs it"
            )
            found.append(warn(NAMES, text, advice))
        if host.nnodes > 1 and not any(host.resolved in own for own in host.interfaces.values()):
            text = f"{host.label}: its name leads to {host.resolved}, which is not this host"
            advice = "write both into /etc/hosts; torchrun looks it up"
            found.append(warn(NAMES, text, advice))
    return found or [ok(NAMES, "localhost and the name of each host lead to it")]


def _plain(address: str) -> str:
    """Return an address in its usual spelling, without its link, and IPv4 as such."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(getattr(found, "ipv4_mapped", None) or found)


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
    """Check the limits on files, on processes, on temporary files and on shared memory."""
    found = []
    needed = files_needed(sum(host.nproc for host in hosts))
    for host in hosts:
        if host.files < needed:
            text = f"{host.label}: {host.files} open files per process, a rank may need {needed}"
            found.append(fail(LIMITS, text, f"run ulimit -n {needed} before the job"))
        tasks = _TASKS * host.nproc
        if 0 <= host.tasks < tasks:
            text = f"{host.label}: {host.tasks} more processes and threads can be started"
            advice = f"{host.nproc} ranks need up to {tasks}; raise ulimit -u, or --pids-limit"
            found.append(fail(LIMITS, text, f"{advice} of the container"))
        found += _check_temporary(host)
        if host.probe.memory.error:
            advice = "fix it; otherwise ranks of the host send messages, which is slower"
            found.append(
                warn(LIMITS, f"{host.label}: shared memory: {host.probe.memory.error}", advice)
            )
        if 0 <= host.shm_free < _LEAST_SHM:
            text = f"{host.label}: {host.shm_free / 2**20:.0f} MiB free in /dev/shm"
            advice = "enlarge it (docker: --shm-size=1g); NCCL and data loaders use it"
            found.append(warn(LIMITS, text, advice))
    return found or [ok(LIMITS, f"{min(host.files for host in hosts)} files, shared memory works")]


def _check_temporary(host: Facts) -> list[Finding]:
    """Check the folder of the reports and logs of ranks."""
    if host.temporary:
        text = f"{host.label}: the temporary folder cannot be written to ({host.temporary})"
        return [
            fail(LIMITS, text, "set TMPDIR to a folder that can; ranks report their errors there")
        ]
    if host.temporary_free < _LEAST_TEMPORARY:
        text = f"{host.label}: {host.temporary_free / 2**20:.0f} MiB free in the temporary folder"
        return [warn(LIMITS, text, "make room, or set TMPDIR; logs and errors of ranks go there")]
    return []


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
            memory = hosts[a].probe.memory
            shared = "no shared memory" if memory.error else f"shared memory {memory}"
            found.append(ok(INSIDE, f"{hosts[a].label}: {shared}; messages {link}"))
    return found
