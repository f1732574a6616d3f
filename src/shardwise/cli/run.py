"""From a configuration to ranks at work, the same way for every recipe."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

from shardwise.launch.errors import UserError
from shardwise.launch.hosts import Nodes, Terms
from shardwise.launch.launcher import usable_cores
from shardwise.launch.rank import StopSignals, run_rank
from shardwise.launch.restarts import run_here, run_over_hosts
from shardwise.launch.world import World, find_world, launched_here
from shardwise.recipes.core.config import check_nproc, require


class Job(Protocol):
    """A recipe with its configuration."""

    def check(self, world: World) -> None:
        """Raise a ``UserError`` if the configuration is wrong, or does not fit the world."""

    def check_world(self, world: World) -> None:
        """Raise a ``UserError`` if the configuration does not fit the world; looks at no files."""

    def options(self) -> dict[str, Any]:
        """After ``check``: what all hosts have to be asked for alike, by the names of options."""

    def check_folder(self) -> str | None:
        """Raise a ``UserError`` if the run may not begin; say so if there is nothing to do."""

    def lock_folder(self) -> AbstractContextManager[None]:
        """After ``check_folder``: hold the run's folder, or raise a ``UserError``."""

    def run(self, world: World, signals: StopSignals) -> None:
        """Be one rank."""


def run(job: Job, nproc: int | None, nodes: Nodes | None = None, max_restarts: int = 0) -> NoReturn:
    """Be a rank of the world that the environment names, or start this host's part of a world.

    Args:
        job: what to run.
        nproc: ``--nproc``, None where not given.
        nodes: the hosts of the world; None: this one.
        max_restarts: how often to begin again when a rank or a host was lost.

    Raises:
        UserError: before any process is started.
    """
    world = find_world()
    processes = check_nproc(nproc, world)
    if world is not None:
        if not launched_here():
            count = "" if nodes is None else nodes.nnodes
            require(not count, "--nnodes", count, "none given: the environment has a world")
            require(not max_restarts, "--max-restarts", max_restarts, "none given: see torchrun's")
        job.check(world)
        run_rank(world, job.run)
    require(max_restarts >= 0, "--max-restarts", max_restarts, "0 or more")
    hosts = 1 if nodes is None else _expected_hosts(job, processes, nodes)
    job.check(_world(hosts, processes))
    with contextlib.ExitStack() as held:
        if nodes is None or nodes.rank == 0:
            # The others may see the folder that host 0 has made already.
            nothing_to_do = job.check_folder()
            if nothing_to_do is not None:
                print(nothing_to_do)
                sys.exit(0)
            held.enter_context(job.lock_folder())
        sys.exit(_launch(job, processes, nodes, max_restarts))


def _launch(job: Job, processes: int, nodes: Nodes | None, max_restarts: int) -> int:
    """Start this host's ranks, and wait for them."""
    threads = max(1, usable_cores() // processes)
    print(
        f"starting   {_number(processes, 'process', 'es')}, {_number(threads, 'thread', 's')}"
        f"{' each' if processes > 1 else ''}; importing torch takes a moment",
        flush=True,
    )
    if nodes is None:
        return run_here(_command, processes, max_restarts)
    if nodes.least is None:
        where = f"this is {nodes.rank} of {nodes.count}; meeting at {nodes.where}"
        print(f"hosts      {where}", flush=True)
        return run_over_hosts(_command, processes, nodes, max_restarts)
    print(f"hosts      {nodes.least} to {nodes.count}; meeting at {nodes.where}", flush=True)
    terms = Terms(job.options(), lambda hosts: _why_not(job, _world(hosts, processes)))
    return run_over_hosts(_command, processes, nodes, max_restarts, terms)


def _world(hosts: int, processes: int) -> World:
    """The world over so many hosts, as its first rank sees it."""
    return World(0, hosts * processes, 0, processes)


def _expected_hosts(job: Job, processes: int, nodes: Nodes) -> int:
    """The number of hosts to check the configuration with: of those that fit, the largest."""
    least = nodes.count if nodes.least is None else nodes.least
    fitting = (
        hosts
        for hosts in range(nodes.count, least - 1, -1)
        if _why_not(job, _world(hosts, processes)) is None
    )
    return next(fitting, nodes.count)


def _why_not(job: Job, world: World) -> str | None:
    """Why a job cannot run over a world, if it cannot."""
    try:
        job.check_world(world)
    except UserError as error:
        return str(error)
    return None


def _command(attempt: int) -> list[str]:
    """What a rank is started with: this command, in every attempt.

    Whether the attempt before had begun the run, only the run's folder tells: see
    :func:`shardwise.recipes.core.begin.decided`.
    """
    del attempt
    # -P: the current folder is the user's, not a place to import from.
    return [sys.executable, "-P", "-m", "shardwise", *sys.argv[1:]]


def _number(count: int, noun: str, plural: str) -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
