"""Do the hosts agree about the time?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.doctor.facts import Facts
from shardwise.doctor.finding import Finding, good, warn

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
