"""``shardwise doctor``: what would go wrong with a job over these hosts."""

from __future__ import annotations

import math
import sys
from typing import Annotated

from typer import Option

from shardwise.cli import options
from shardwise.launch.hosts import Nodes

EXAMPLES = """
[bold]Examples[/bold]

This host alone:
  [cyan]shardwise doctor[/cyan]

Two hosts, before a job; on the second, --node-rank 1:
  [cyan]shardwise doctor --nnodes 2 --node-rank 0 --rdzv host-a:29400 --nproc 8[/cyan]
"""


def doctor(
    *,
    nproc: Annotated[int, Option(help="Processes that the job has on every host.")] = 1,
    nnodes: options.Nnodes = None,
    node_rank: options.NodeRank = None,
    rdzv: options.Rdzv = None,
    timeout: Annotated[float, Option(help="Seconds to wait for all hosts.")] = 60.0,
    least_gbit: Annotated[
        float, Option(help="Warn of ways between hosts that carry less, in Gbit/s.")
    ] = 1.0,
) -> None:
    """Look for what goes wrong with a job over several hosts. Run it on each of them.

    A line a verdict, and what to do. Ends with exit code 1 if a job would not
    run.
    """
    # Here, and not before: other commands start without it.
    from shardwise.doctor.checks import Finding
    from shardwise.doctor.diagnose import diagnose
    from shardwise.recipes.core.config import require

    require(nproc >= 1, "--nproc", nproc, "1 or more")
    require(0 < timeout < math.inf, "--timeout", timeout, "seconds, above 0")
    require(0 <= least_gbit < math.inf, "--least-gbit", least_gbit, "0 or more")
    nodes = Nodes.of(nnodes, node_rank, rdzv, timeout) or Nodes(1, 0, "127.0.0.1", 0, timeout)
    expected = "the number of hosts that run the doctor now"
    require(nodes.least is None, "--nnodes", nnodes, expected)

    def show(finding: Finding) -> None:
        print(finding, flush=True)

    sys.exit(0 if diagnose(nodes, nproc, least_gbit, show) else 1)
