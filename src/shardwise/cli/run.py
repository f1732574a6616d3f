"""From a configuration to ranks at work, the same way for every recipe."""

from __future__ import annotations

import sys
from typing import NoReturn, Protocol

from shardwise.launch.launcher import Launcher, usable_cores
from shardwise.launch.rank import run_rank
from shardwise.launch.signals import StopSignals
from shardwise.launch.world import World, find_world
from shardwise.recipes.config import check_nproc


class Job(Protocol):
    """A recipe with its configuration."""

    def check(self, world: World) -> None:
        """Raise a ``UserError`` if the configuration is wrong, or does not fit the world."""

    def check_folder(self) -> str | None:
        """Raise a ``UserError`` if the run may not begin; say so if there is nothing to do."""

    def run(self, world: World, signals: StopSignals) -> None:
        """Be one rank."""


def run(job: Job, nproc: int | None) -> NoReturn:
    """Be a rank of the world that the environment names, or start a world on this host.

    Args:
        job: what to run.
        nproc: ``--nproc``, None where not given.

    Raises:
        UserError: before any process is started.
    """
    world = find_world()
    processes = check_nproc(nproc, world)
    if world is not None:
        job.check(world)
        run_rank(world, job.run)
    job.check(World(0, processes, 0, processes))
    nothing_to_do = job.check_folder()
    if nothing_to_do is not None:
        print(nothing_to_do)
        sys.exit(0)
    threads = max(1, usable_cores() // processes)
    print(
        f"starting   {_number(processes, 'process', 'es')}, {_number(threads, 'thread', 's')}"
        f"{' each' if processes > 1 else ''}; importing torch takes a moment",
        flush=True,
    )
    # -P: the current folder is the user's, not a place to import from.
    command = [sys.executable, "-P", "-m", "shardwise", *sys.argv[1:]]
    sys.exit(Launcher(command, processes).run())


def _number(count: int, noun: str, plural: str) -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
