"""``shardwise launch-lines``: what to type on each host."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from typer import Argument, Option

from shardwise.launch.errors import UserError
from shardwise.launch.hosts import Layout, own_lines, slurm_script, torchrun_lines

EXAMPLES = """
[bold]Examples[/bold]

  [cyan]shardwise launch-lines --hosts a,b --nproc 8 -- train lm --strategy hybrid[/cyan]

  [cyan]shardwise launch-lines --slurm 4 --nproc 8 \\
    -- train lm --auto-resume > job.sh[/cyan]
"""


def launch_lines(
    *,
    arguments: Annotated[
        list[str] | None,
        Argument(metavar="-- COMMAND", help="What to start: train lm, with its options."),
    ] = None,
    hosts: Annotated[
        str | None, Option(help="Names of the hosts, by commas; they meet at the first.")
    ] = None,
    slurm: Annotated[
        int | None, Option(metavar="NODES", help="Print a script for sbatch, for so many nodes.")
    ] = None,
    nproc: Annotated[int, Option(help="Processes of each host.")] = 1,
    rdzv_port: Annotated[int, Option(help="Where the hosts meet.")] = 29400,
    nnodes: Annotated[
        str | None,
        Option(metavar="MIN:MAX", help="Hosts may be so few, and others may come later."),
    ] = None,
    torchrun: Annotated[bool, Option("--torchrun", help="Print lines for torchrun.")] = False,
) -> None:
    """Print the line that starts a job, for each host, or a script for Slurm."""
    names: tuple[str, ...] = ()
    if hosts:  # an IPv6 address may stand in its brackets, as with --rdzv
        names = tuple(re.sub(r"^\[(.*:.*)\]$", r"\1", name.strip()) for name in hosts.split(","))
    layout = Layout(names or ("host-a",), nproc, rdzv_port, tuple(arguments or ()), nnodes)
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
