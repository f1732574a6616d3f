"""A job from its first generation to its last, on one host."""

from __future__ import annotations

import contextlib
import os

from shardwise.elastic.fork_server import running
from shardwise.elastic.hosts import HERE, Command, Nodes
from shardwise.elastic.outcome import exit_codes
from shardwise.elastic.output import Shown
from shardwise.elastic.rank import importing
from shardwise.elastic.world import environment

_FIRST = Shown()


def run_job(
    command: Command, nproc: int, restarts: int, nodes: Nodes = HERE, shown: Shown = _FIRST
) -> int:
    """Run this host's part of a job.

    Args:
        command: gives the command of a generation.
        nproc: ranks of this host.
        restarts: how often to restart after a rank or a host was lost.
        nodes: the job; by default on this host alone.
        shown: what of the output of ranks is shown; by default rank 0 writes to the user.

    Returns:
        The exit code of this host's last generation.

    Raises:
        UserError: the hosts did not come together, or were lost.
    """
    # torch warns of every address that has no name, once torch is imported.
    quiet = environment(TORCH_CPP_LOG_LEVEL=os.environ.get("TORCH_CPP_LOG_LEVEL") or "ERROR")
    with exit_codes(), running(command, nproc):
        # Here, and not before: it imports torch, which takes seconds.
        with quiet, importing():
            from shardwise.elastic.agent import Agent, Signals, agents_environment
            from shardwise.elastic.rendezvous import Rendezvous

        with contextlib.closing(Signals()) as signals, agents_environment():
            rendezvous = Rendezvous(nodes, nproc, restarts, lambda: signals.end_waiting)
            return Agent(command, rendezvous, signals, shown).run_job()
