"""Which network interface carries the bytes, and which would backends take?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from shardwise.doctor.facts import Facts
from shardwise.doctor.finding import Finding, fail, good, listed, warn

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
