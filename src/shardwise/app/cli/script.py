"""``shardwise run``: any script as the ranks of a job, with the launch options of a training."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.app.cli.generate import Options, keyword_only, with_options
from shardwise.app.cli.run import LaunchConfig, meeting
from shardwise.elastic.errors import UserError, say
from shardwise.elastic.hosts import Terms
from shardwise.elastic.program import command_of
from shardwise.elastic.restarts import run_here, run_over_hosts
from shardwise.elastic.world import find_world
from shardwise.insight.schema.option import require
from shardwise.insight.schema.training import check_nproc

_TEXT = """Run a script of your own as the ranks of a job, on one host or several.

Every rank is a process that runs the script with the same arguments. It
finds torchrun's variables in its environment: RANK, WORLD_SIZE, LOCAL_RANK
and others. Options of this command come before the script.
"""

_EXAMPLES = """
[bold]Examples[/bold]

Four processes on this machine:
  [cyan]shardwise run --nproc 4 my_script.py --lr 3e-4[/cyan]

A module:
  [cyan]shardwise run --nproc 4 -m my_package.train --lr 3e-4[/cyan]

Two hosts, with restarts; on the second, --node-rank 1:
  [cyan]shardwise run --nproc 8 --nnodes 2 --node-rank 0 --rdzv host-a:29400 \\
    --max-restarts 3 my_script.py[/cyan]
"""

_WORDS = keyword_only(
    "words",
    Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT", help="The script, followed by its own arguments."),
    ],
)
_MODULE = keyword_only(
    "module",
    Annotated[
        bool,
        typer.Option("--module", "-m", help="SCRIPT is the name of a module, as for python -m."),
    ],
    False,
)


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the command."""
    launch = Options(
        default=LaunchConfig(),
        without=frozenset({"dry_run", "plan", "world_size"}),
        shows={
            "nproc": {"help": "Processes to start on this host."},
            "max_restarts": {
                "help": "How often to start the script again when a process or a host is lost, "
                "with the hosts that are left."
            },
        },
    )

    def act(given: Mapping[str, Any]) -> None:
        words = given["words"]
        sys.exit(_run(_module(words) if given["module"] else _file(words), launch.read(given)))

    cli.command(
        "run",
        epilog=_EXAMPLES,
        context_settings={"allow_interspersed_args": False},
    )(with_options(act, [launch], _TEXT, [_WORDS, _MODULE]))


def _file(words: list[str]) -> tuple[list[str], Terms]:
    """Check a script; return the words of a rank's command, and what hosts have to agree on."""
    path = Path(words[0])
    expected = "a Python file"
    require(path.exists(), "SCRIPT", f"{path}, which does not exist", expected)
    require(path.is_file(), "SCRIPT", f"{path}, which is no file", expected)
    require(os.access(path, os.R_OK), "SCRIPT", f"{path}, which is not readable", expected)
    # Its arguments may differ between hosts, which may keep data in different folders.
    contents = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return words, Terms({"SCRIPT": f"{path.name} with SHA-256 {contents}"})


def _module(words: list[str]) -> tuple[list[str], Terms]:
    name = words[0]
    is_name = all(part.isidentifier() for part in name.split("."))
    require(is_name, "--module", name, "the name of a module, such as my_package.train")
    return ["-m", *words], Terms({"--module": name})


def _run(program: tuple[list[str], Terms], launch: LaunchConfig) -> int:
    """Start this host's ranks, and wait for them; return their exit code."""
    words, terms = program
    nodes, world = launch.nodes(), find_world()
    if world is not None:
        raise UserError(
            f"environment: found rank {world.rank} of {world.size}, expected no RANK and "
            "WORLD_SIZE; what has set them starts the ranks, so give it the script itself"
        )
    processes = check_nproc(launch.nproc, None)
    command = command_of(words)
    if nodes is None:
        return run_here(lambda attempt: command, processes, launch.max_restarts)
    say(meeting(nodes))  # standard output is the script's
    return run_over_hosts(lambda attempt: command, processes, nodes, launch.max_restarts, terms)
