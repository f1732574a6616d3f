"""``shardwise doctor`` and ``shardwise launch-lines``: before a job over several hosts."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from typer import Argument, Option

from shardwise.app.cli.generate import Options, with_options
from shardwise.app.cli.run import HostsConfig
from shardwise.app.cli.values import Integer
from shardwise.base.units import show
from shardwise.elastic.errors import UserError
from shardwise.elastic.hosts import (
    TOKEN,
    TOKEN_FILE,
    HostLayout,
    Nodes,
    own_lines,
    slurm_script,
    torchrun_lines,
)
from shardwise.insight.schema.option import (
    Bounds,
    Count,
    NotNegative,
    Seconds,
    check_number,
    option,
    require,
)

_DOCTOR = """
[bold]Examples[/bold]

This host alone:
  [cyan]shardwise doctor[/cyan]

Two hosts, before a job; on the second, --node-rank 1:
  [cyan]shardwise doctor --nnodes 2 --node-rank 0 --rdzv host-a:29400 --nproc 8[/cyan]
"""

_LAUNCH_LINES = """
[bold]Examples[/bold]

  [cyan]shardwise launch-lines --hosts a,b --nproc 8 -- train lm --strategy hybrid[/cyan]

  [cyan]shardwise launch-lines --slurm 4 --nproc 8 \\
    -- train lm --auto-resume > job.sh[/cyan]
"""


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the commands."""
    text = """Check what could go wrong with a job over several hosts. Run it on each of them.

    One line per finding, and what to do about it. Exits with code 1 if a job
    would not run.
    """
    options = Options(default=DoctorConfig())

    def doctor(given: Mapping[str, Any]) -> None:
        options.read(given).run()

    cli.command("doctor", epilog=_DOCTOR)(with_options(doctor, [options], text))
    cli.command(
        "launch-lines",
        epilog=_LAUNCH_LINES,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )(launch_lines)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(HostsConfig):
    """What ``shardwise doctor`` is asked for."""

    nproc: Count = field(default=1, metadata=option("Processes of the job on every host."))
    timeout: Seconds = field(default=60.0, metadata=option("Seconds to wait for all hosts."))
    least_gbit: NotNegative = field(
        default=1.0,
        metadata=option("Warn of links between hosts that are slower than this, in Gbit/s."),
    )

    def run(self) -> None:
        """Check the hosts, print the findings, and exit.

        Raises:
            UserError: an option is wrong.
            SystemExit: with code 1 if a job would not run.
        """
        # Here, and not before: other commands start without it.
        from shardwise.app.doctor import diagnose, facts, probe

        nodes = self.nodes_within(self.timeout)
        nodes = nodes or Nodes(1, 0, "127.0.0.1", 0, self.timeout)
        expected = "the number of hosts that run the doctor now"
        require(nodes.least is None, "--nnodes", self.nnodes, expected)
        own = facts.collect_facts(nodes, self.nproc, probe.probe_ranks())
        sys.exit(0 if diagnose.diagnose(nodes, own, self.least_gbit, show) else 1)


def launch_lines(
    *,
    arguments: Annotated[
        list[str] | None,
        Argument(metavar="-- COMMAND", help="What to start: train lm, with its options."),
    ] = None,
    hosts: Annotated[
        str | None,
        Option(help="Names of the hosts, separated by commas; they meet at the first one."),
    ] = None,
    slurm: Annotated[
        int | None, Integer(metavar="NODES", help="Print a script for sbatch, for this many nodes.")
    ] = None,
    nproc: Annotated[int, Integer(help="Processes on each host.")] = 1,
    rdzv_port: Annotated[int, Integer(help="Port where the hosts meet.")] = 29400,
    nnodes: Annotated[
        str | None,
        Option(metavar="MIN:MAX", help="Start with MIN hosts or more; others may join later."),
    ] = None,
    torchrun: Annotated[bool, Option("--torchrun", help="Print lines for torchrun.")] = False,
) -> None:
    """Print the line that starts a job, for each host, or a script for Slurm."""
    check_number("--nproc", nproc, Bounds(least=1))
    check_number("--slurm", 1 if slurm is None else slurm, Bounds(most=1 << 20))
    names: tuple[str, ...] = ()
    if hosts:  # an IPv6 address may stand in its brackets, as with --rdzv
        names = tuple(re.sub(r"^\[(.*:.*)\]$", r"\1", name.strip()) for name in hosts.split(","))
    layout = HostLayout(names or ("host-a",), nproc, rdzv_port, tuple(arguments or ()), nnodes)
    layout.check()
    if nnodes is not None and (slurm is not None or torchrun):
        expected = "none with --slurm and --torchrun, whose hosts are known"
        raise UserError(f"--nnodes: found {nnodes}, expected {expected}")
    if slurm is not None:
        if names or torchrun or slurm < 1:
            expected = "1 or more, and neither --hosts nor --torchrun"
            raise UserError(f"--slurm: found {slurm}, expected {expected}")
        typer.echo(slurm_script(layout, slurm), nl=False)
        return
    if not names:
        raise UserError("--hosts: found none, expected --hosts A,B or --slurm NODES")
    for host, line in torchrun_lines(layout) if torchrun else own_lines(layout):
        typer.echo(f"# on {host}\n{line}")
    has_token = any(word.partition("=")[0] == TOKEN_FILE for word in layout.arguments)
    if len(names) > 1 and not torchrun and not has_token:
        typer.echo(
            f"note: any host may join at the port; {TOKEN_FILE} FILE after --, or {TOKEN} in "
            "the environment of all hosts, keeps others out",
            err=True,
        )
