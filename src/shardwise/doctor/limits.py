"""May a process have the memory and files that ranks need?"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.doctor.facts import Facts
from shardwise.doctor.finding import Finding, fail, good, warn

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
