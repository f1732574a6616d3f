"""Do all hosts run the same software?"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.doctor.facts import Facts
from shardwise.doctor.finding import Finding, fail, good, listed

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
