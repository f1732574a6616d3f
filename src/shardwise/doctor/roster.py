"""Is every host there, once, and of the same mind about the job?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwise.doctor.facts import Facts
from shardwise.doctor.finding import Finding, fail, good, listed

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
