"""Is every host there, once, and of the same mind about the job?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwise.doctor.facts import Facts
from shardwise.doctor.finding import Finding, fail, good

RANKS, WORLD = "node ranks", "world size"


def check_ranks(hosts: Sequence[Facts], nnodes: int) -> list[Finding]:
    """Node ranks that are missing, or given twice."""
    counts = Counter(host.rank for host in hosts)
    found = []
    for rank in sorted(rank for rank, count in counts.items() if count > 1):
        names = " and ".join(host.name for host in hosts if host.rank == rank)
        text = f"rank {rank} is that of {counts[rank]} hosts ({names})"
        found.append(fail(RANKS, text, "give every host a --node-rank of its own"))
    missing = sorted(set(range(nnodes)) - set(counts))
    if missing:
        shown = ", ".join(map(str, missing))
        advice = "run the command there too, within --timeout, with that --node-rank"
        found.append(fail(RANKS, f"no host came as rank {shown}", advice))
    return found or [good(RANKS, f"0 to {nnodes - 1}, each once")]


def check_world(hosts: Sequence[Facts]) -> list[Finding]:
    """Hosts that expect another number of hosts or ranks."""
    sizes = {(host.nnodes, host.nproc): host for host in hosts}
    if len(sizes) == 1:
        [(nnodes, nproc)] = sizes
        return [good(WORLD, f"{nnodes} x {nproc} ranks, as every host says")]
    told = ", ".join(f"{host.nnodes} x {host.nproc} on {host.who}" for host in hosts)
    return [fail(WORLD, f"hosts x ranks is {told}", "say the same --nnodes and --nproc everywhere")]
