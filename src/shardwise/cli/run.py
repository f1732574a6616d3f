"""From a configuration to running ranks, the same way for every recipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from shardwise.launch.errors import UserError
from shardwise.launch.hosts import Nodes, Terms, spans_hosts
from shardwise.launch.launcher import usable_cores
from shardwise.launch.rank import run_rank
from shardwise.launch.restarts import run_here, run_over_hosts
from shardwise.launch.world import World, find_world, launched_here
from shardwise.recipes.core.config import check_nproc, require
from shardwise.recipes.core.job import Job
from shardwise.recipes.core.option import HOSTS, option


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """The hosts of a job, as each of them is told."""

    nnodes: str | None = field(
        default=None,
        metadata=option(
            "Hosts of the job. Run the same command on each, with its own --node-rank. MIN:MAX: "
            "start with MIN or more; others may join later.",
            HOSTS,
            metavar="N|MIN:MAX",
            shown="1",
        ),
    )
    node_rank: int | None = field(
        default=None,
        metadata=option("Number of this host, from 0; with MIN:MAX only host 0 needs it.", HOSTS),
    )
    rdzv: str | None = field(
        default=None,
        metadata=option(
            "Address of host 0, where the hosts meet; [ADDRESS]:PORT for IPv6.",
            HOSTS,
            metavar="HOST:PORT",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(HostsConfig):
    """How many processes on how many hosts, and what happens when some are lost."""

    nproc: int | None = field(
        default=None,
        metadata=option(
            "Processes to start on this host. Not with torchrun, which starts them.", shown="1"
        ),
    )
    dry_run: bool = field(
        default=False, metadata=option("Show what every rank would hold, and exit.")
    )
    world_size: int | None = field(
        default=None, metadata=option("Number of ranks of the --dry-run.", shown="--nproc")
    )
    rdzv_timeout: float = field(
        default=300.0, metadata=option("Seconds to wait for all hosts.", HOSTS)
    )
    max_restarts: int = field(
        default=0,
        metadata=option(
            "How often to restart from the last checkpoint when a process or a host is lost, with "
            "the hosts that are left.",
            HOSTS,
        ),
    )

    def nodes(self) -> Nodes | None:
        """Return the hosts of the job; see :meth:`Nodes.of`."""
        return Nodes.of(self.nnodes, self.node_rank, self.rdzv, self.rdzv_timeout)


def run(job: Job, launch: LaunchConfig) -> None:
    """Be a rank of the world that the environment names, or start this host's part of a world.

    Args:
        job: what to run.
        launch: how many processes, and where.

    Raises:
        UserError: before any process is started.
        SystemExit: when all processes have ended.
    """
    nodes = launch.nodes()
    if launch.dry_run:
        _dry_run(job, launch, nodes)
        return
    size = launch.world_size
    require(size is None, "--world-size", f"{size} without --dry-run", "--nproc, or torchrun's")
    if spans_hosts(nodes):
        job.span_hosts()
    world = find_world()
    processes = check_nproc(launch.nproc, world)
    if world is not None:
        if not launched_here():
            _check_no_launcher(launch, nodes)
        job.check(world)
        run_rank(world, job.run)
    require(launch.max_restarts >= 0, "--max-restarts", launch.max_restarts, "0 or more")
    # Several hosts may each have a disk of their own, and would each choose for themselves.
    chosen = job.choose_folder() if nodes is None else None
    hosts = 1 if nodes is None else _expected_hosts(job, processes, nodes)
    job.check(_world(hosts, processes))
    with contextlib.ExitStack() as held:
        if nodes is None or nodes.rank == 0:
            # The other hosts may see the folder that host 0 has made already.
            nothing_to_do = job.check_folder()
            if chosen is not None:
                print(chosen)
            if nothing_to_do is not None:
                print(nothing_to_do)
                sys.exit(0)
            held.enter_context(job.lock_folder())
        sys.exit(_launch(job, processes, nodes, launch.max_restarts))


def _dry_run(job: Job, launch: LaunchConfig, nodes: Nodes | None) -> None:
    expected = "none with --dry-run: say --world-size, and --replicas for hybrid strategies"
    require(nodes is None, "--nnodes", launch.nnodes, expected)
    option, size = "--world-size", launch.world_size
    if size is None:
        option, size = "--nproc", 1 if launch.nproc is None else launch.nproc
    require(size >= 1, option, size, "1 or more")
    job.show_dry_run(World(0, size, 0, size))


def _check_no_launcher(launch: LaunchConfig, nodes: Nodes | None) -> None:
    """Check that nothing is asked of a launcher where torchrun is the launcher."""
    count = "" if nodes is None else nodes.nnodes
    require(not count, "--nnodes", count, "none given: the environment has a world")
    restarts = launch.max_restarts
    require(not restarts, "--max-restarts", restarts, "none given: see torchrun's")


def _launch(job: Job, processes: int, nodes: Nodes | None, max_restarts: int) -> int:
    """Start this host's ranks, and wait for them."""
    threads = max(1, usable_cores() // processes)
    print(
        f"starting   {_number(processes, 'process', 'es')}, {_number(threads, 'thread', 's')}"
        f"{' each' if processes > 1 else ''}; importing torch takes a moment",
        flush=True,
    )
    command = _command_of(job)
    if nodes is None:
        return run_here(command, processes, max_restarts)
    if nodes.least is None:
        where = f"this is {nodes.rank} of {nodes.count}; meeting at {nodes.where}"
        print(f"hosts      {where}", flush=True)
        return run_over_hosts(command, processes, nodes, max_restarts)
    print(f"hosts      {nodes.least} to {nodes.count}; meeting at {nodes.where}", flush=True)
    terms = Terms(job.options(), lambda hosts: _why_not(job, _world(hosts, processes)))
    return run_over_hosts(command, processes, nodes, max_restarts, terms)


def _world(hosts: int, processes: int) -> World:
    """Return the world over so many hosts, as its first rank sees it."""
    return World(0, hosts * processes, 0, processes)


def _expected_hosts(job: Job, processes: int, nodes: Nodes) -> int:
    """Return the number of hosts to check the configuration with: the largest one that fits."""
    least = nodes.count if nodes.least is None else nodes.least
    fitting = (
        hosts
        for hosts in range(nodes.count, least - 1, -1)
        if _why_not(job, _world(hosts, processes)) is None
    )
    return next(fitting, nodes.count)


def _why_not(job: Job, world: World) -> str | None:
    """Return why a job cannot run over a world; None: it can."""
    try:
        job.check_world(world)
    except UserError as error:
        return str(error)
    return None


def _command_of(job: Job) -> Callable[[int], list[str]]:
    """Return what a rank is started with: this command, in every attempt.

    Whether an earlier attempt has begun the run, only the run's folder says: see
    :func:`shardwise.recipes.core.begin.decided`.
    """
    words = sys.argv[1:]
    if job.chosen is not None:  # behind ``train RECIPE``: whatever follows a -- is no option
        at = next(i for i, word in enumerate(words) if word not in ("--", "train")) + 1
        words = [*words[:at], "--out", str(job.chosen), *words[at:]]
    # -P: the current folder is the user's, not a place to import from.
    return lambda attempt: [sys.executable, "-P", "-m", "shardwise", *words]


def _number(count: int, noun: str, plural: str) -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
