"""From options to running ranks: of a training, and of any script with ``shardwise run``."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.app.cli.options import Options, keyword_only, with_options
from shardwise.app.recipes.core.job import TrainingJob
from shardwise.app.recipes.core.rundir import locked
from shardwise.app.recipes.rank import command_of
from shardwise.base.errors import UserError
from shardwise.base.say import say
from shardwise.base.units import counted, show
from shardwise.elastic import program
from shardwise.elastic.fork_server import ForkServer
from shardwise.elastic.hosts import HERE, TOKEN, TOKEN_FILE, Command, Nodes, OnJoin
from shardwise.elastic.output import Shown
from shardwise.elastic.rank import importing, run_rank, run_worker
from shardwise.elastic.restarts import run_job
from shardwise.elastic.world import (
    LOCKED,
    WORKER_JOB,
    ReplicaWorld,
    World,
    environment,
    find_world,
    launched_here,
    usable_cores,
)
from shardwise.insight.planning.settings import MOST_RANKS
from shardwise.insight.schema.option import (
    HOSTS,
    OUTPUT,
    Bounds,
    Config,
    Count,
    Natural,
    OnResume,
    Seconds,
    require,
    setting,
)
from shardwise.insight.schema.training import check_nproc, read_nproc
from shardwise.insight.schema.words import own_option


@dataclass(frozen=True, kw_only=True)
class HostsConfig(Config):
    """The hosts of a job, as each of them is given them."""

    nnodes: str | None = setting(
        None,
        "Hosts of the job. Run the same command on each, with its own --node-rank. MIN:MAX: "
        "start with MIN or more; others may join later.",
        HOSTS,
        metavar="N|MIN:MAX",
        shown="1",
    )
    node_rank: Natural | None = setting(
        None,
        "Number of this host, from 0; with MIN:MAX only host 0 needs it.",
        HOSTS,
        on_resume=OnResume.START,
    )
    rdzv: str | None = setting(
        None,
        "Address of host 0, where the hosts meet; [ADDRESS]:PORT for IPv6.",
        HOSTS,
        metavar="HOST:PORT",
    )
    rdzv_token_file: Path | None = setting(
        None,
        "File with the token that lets a host take part, the same on all of them; or set "
        "SHARDWISE_RDZV_TOKEN.",
        HOSTS,
        metavar="FILE",
    )

    def nodes_within(self, timeout: float) -> Nodes | None:
        """Return the hosts of the job, which come within ``seconds``; see :meth:`Nodes.of`."""
        return Nodes.of(self.nnodes, self.node_rank, self.rdzv, timeout, self.rdzv_token_file)


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(HostsConfig):
    """How many processes on how many hosts, and what happens when some are lost."""

    nproc: Count | None = setting(
        None,
        "Processes to start on this host: a number, gpu or cpu for one each, or auto. Not with "
        "torchrun, which starts them.",
        metavar="N",
        shown="1",
        reads=read_nproc,
    )
    dry_run: bool = setting(
        False,
        "Show what ranks would hold and a step needs, and exit.",
        on_resume=OnResume.START,
    )
    plan: bool = setting(
        False,
        "Say first what the training needs and how fast it will be; stop if it cannot fit.",
        on_resume=OnResume.START,
    )
    world_size: Annotated[int, Bounds(least=1, most=MOST_RANKS)] | None = setting(
        None,
        "Number of ranks of the --dry-run.",
        shown="--nproc",
        on_resume=OnResume.START,
    )
    rdzv_timeout: Seconds = setting(300.0, "Seconds to wait for all hosts.", HOSTS)
    max_restarts: Natural = setting(
        0,
        "How often to restart from the last checkpoint when a process or a host is lost, with "
        "the hosts that are left.",
        HOSTS,
    )

    def nodes(self) -> Nodes | None:
        """Return the hosts of the job; see :meth:`Nodes.of`."""
        return self.nodes_within(self.rdzv_timeout)


@dataclass(frozen=True, kw_only=True)
class ScriptConfig(LaunchConfig):
    """How the ranks of a script are started, and what of their output is shown."""

    tee: str = setting(
        "3",
        "What ranks write that is shown, each line behind its rank: 1 standard output, 2 standard "
        "error, 3 both, 0 nothing; or for ranks of this host, as 0:3,1:2.",
        OUTPUT,
        metavar="STREAMS",
    )
    log_dir: Path | None = setting(
        None,
        "Keep what ranks write, in a folder for this job: attempt_N/RANK/stdout.log, stderr.log.",
        OUTPUT,
        metavar="FOLDER",
    )

    def shown(self, processes: int) -> Shown:
        """Return what of the output is shown and kept.

        Args:
            processes: of this host.

        Raises:
            UserError: an option is wrong.
        """
        expected = "0, 1, 2 or 3, or such as 0:3,1:2: a rank of this host, and one of these"
        require(bool(_TEE.fullmatch(self.tee)), "--tee", repr(self.tee), expected)
        if ":" in self.tee:
            ranks = [int(part.partition(":")[0]) for part in self.tee.split(",")]
            expected = f"ranks of this host, 0 to {processes - 1}, each once"
            fits = max(ranks) < processes and len(ranks) == len({*ranks})
            require(fits, "--tee", repr(self.tee), expected)
        folder = None
        if self.log_dir is not None:
            folder = self.log_dir.absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--log-dir: {folder}: {error.strerror}") from None
        return Shown(self.tee, folder)


_TEE = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")


def run(job: TrainingJob, launch: LaunchConfig) -> None:
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
    if nodes is not None and nodes.count > 1:
        job.span_hosts()
    world = find_world()
    processes = check_nproc(launch.nproc, world)
    if world is not None:
        if not launched_here():
            _check_no_launcher(launch, nodes)
            expected = "none given: a launcher of Shardwise starts such replicas, with --nproc"
            require(job.deadline is None, "--diloco-deadline", job.deadline, expected)
        job.check(world)
        if launch.plan and world.rank == 0 and not launched_here():
            held = contextlib.ExitStack()
            held.enter_context(job.plan(world))
            atexit.register(held.close)
        if WORKER_JOB in os.environ:
            out = job.config.train.output.out
            expected = "an absolute path, since workers may run in folders of their own"
            is_fixed = not isinstance(out, Path) or out.is_absolute()  # a URL is
            require(is_fixed, "--out", out, expected)
            run_worker(world, job.run)
            return
        run_rank(world, job.run)
    expected = "none given with --nnodes: replicas that are worlds of their own are on one host"
    require(nodes is None or job.deadline is None, "--diloco-deadline", job.deadline, expected)
    if (store := job.config.files.store) is not None:
        store.reach()
    hosts = 1
    if nodes is not None:
        nodes = replace(nodes, why_not=lambda hosts: _why_not(job, _world(hosts, processes)))
        hosts = nodes.most(nodes.count)[0] or nodes.count
    job.check(_world(hosts, processes))
    with contextlib.ExitStack() as held:
        if nodes is None or nodes.rank == 0:
            # The other hosts may see the folder that host 0 has made already.
            nothing_to_do = job.check_folder()
            if job.chosen is not None:
                show(job.chosen)
            if nothing_to_do is not None:
                show(nothing_to_do)
                sys.exit(0)
            if launch.plan:
                held.enter_context(job.plan(_world(hosts, processes)))
        if nodes is None:
            # Over several hosts rank 0 locks it, which may be on another host after a restart.
            held.enter_context(locked(job.config.files))
            held.enter_context(environment(**{LOCKED: "1"}))
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-job-"))
        # The same in every attempt: whether one before it has begun the run, its folder says.
        command = ForkServer(command_of(job, _words(job), Path(folder)))
        if job.deadline is not None:
            code = _launch_replicas(job, command, processes, job.deadline, launch.max_restarts)
        else:
            code = _launch(job, command, processes, nodes, launch.max_restarts)
    if code and nodes is None:
        from shardwise.app.recipes.core.journal import write_report_of_lost

        write_report_of_lost(job.config.files)  # whose lock is free again
    sys.exit(code)


def _dry_run(job: TrainingJob, launch: LaunchConfig, nodes: Nodes | None) -> None:
    expected = "none with --dry-run: say --world-size, and --replicas for hybrid strategies"
    require(nodes is None, "--nnodes", launch.nnodes, expected)
    size = launch.world_size or launch.nproc or 1
    job.show_dry_run(World(0, size, 0, size))


def _check_no_launcher(launch: LaunchConfig, nodes: Nodes | None) -> None:
    """Check that nothing is asked of a launcher where torchrun is the launcher."""
    count = "" if nodes is None else nodes.nnodes
    require(not count, "--nnodes", count, "none given: the environment has a world")
    restarts = launch.max_restarts
    require(not restarts, "--max-restarts", restarts, "none given: see torchrun's")


def _launch(
    job: TrainingJob, command: Command, processes: int, nodes: Nodes | None, max_restarts: int
) -> int:
    """Start this host's ranks of a training, and wait for them."""
    _say_starting(processes)
    if nodes is not None:
        on_join = OnJoin.STAY if job.config.train.diloco is None else OnJoin.RESTART
        nodes = replace(nodes, options=job.options(), on_join=on_join)
        show(_meeting(nodes))
    return run_job(command, processes, max_restarts, nodes or HERE)


def _launch_replicas(
    job: TrainingJob, command: Command, processes: int, deadline: float, max_restarts: int
) -> int:
    """Start every replica as a world of its own, and wait for them."""
    count = job.replicas(_world(1, processes))
    _say_starting(processes)
    with importing():  # here, and not before: it takes seconds
        from shardwise.app.recipes.core.replicas import RoundsFile
        from shardwise.diloco import QuorumServer
        from shardwise.diloco.coordinator import Event, EventKind
        from shardwise.elastic.replicas import ReplicaLauncher
    with contextlib.ExitStack() as held:
        file = RoundsFile(job.begin_folder().quorum, count)
        held.callback(file.close)
        token = secrets.token_hex()

        def report(event: Event) -> None:
            if event.kind is EventKind.LOST and launcher.is_stopping:
                event = replace(event, kind=EventKind.LEFT)  # in order, as it was asked to
            file.happened(event)
            if event.attempt is not None:
                launcher.made_round(tuple(event.attempt.members))

        server = held.enter_context(
            QuorumServer(count, deadline=deadline, token=token, report=report)
        )
        launcher = ReplicaLauncher(
            command,
            ReplicaWorld(0, count, f"127.0.0.1:{server.port}", token, 0),
            processes // count,
            max_restarts,
            started=file.started,
            lost=file.lost,
        )
        code = launcher.run()
        if launcher.finished and 0 not in launcher.finished:
            first = min(launcher.finished)
            show(f"run        {job.config.train.output.out}/replicas/{first} has the model")
        return code


def _meeting(nodes: Nodes) -> str:
    """Return lines that say where the hosts meet, and whether strangers may take part."""
    who = f"{nodes.least} to {nodes.count}"
    if nodes.least is None:
        who = f"this is {nodes.rank} of {nodes.count}"
    lines = [f"hosts      {who}; meeting at {nodes.where}"]
    if not nodes.token:
        lines.append(
            f"hosts      warning: no token, so anyone who reaches {nodes.where} may take part; set "
            f"{TOKEN} or {TOKEN_FILE} on all hosts"
        )
    return "\n".join(lines)


def _say_starting(processes: int) -> None:
    threads = counted(max(1, usable_cores() // processes), "thread")
    each = " each" if processes > 1 else ""
    many = counted(processes, "process", "processes")
    show(f"starting   {many}, {threads}{each}; importing torch takes a moment")


def _world(hosts: int, processes: int) -> World:
    """Return the world over n hosts, as its first rank sees it."""
    return World(0, hosts * processes, 0, processes)


def _why_not(job: TrainingJob, world: World) -> str | None:
    """Return why a job cannot run over a world; None: it can."""
    try:
        job.config.check_world(world)
    except UserError as error:
        return str(error)
    return None


def _words(job: TrainingJob) -> list[str]:
    """Return the command line with the folder that was chosen in place of the default one."""
    words = sys.argv[1:]
    if job.chosen is None:
        return words
    # Behind ``train RECIPE``: whatever follows a -- is no option.
    at = next(i for i, word in enumerate(words) if word not in ("--", "train")) + 1
    return [*words[:at], "--out", str(job.config.train.output.out), *words[at:]]


# -- shardwise run ---------------------------------------------------------------------------------

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
        default=ScriptConfig(),
        without=frozenset({"dry_run", "plan", "world_size"}),
        shows={
            "nproc": {"help": "Processes to start on this host: a number, gpu, cpu or auto."},
            "max_restarts": {
                "help": "How often to start the script again when a process or a host is lost, "
                "with the hosts that are left."
            },
        },
    )

    def act(given: Mapping[str, Any]) -> None:
        words, options = (_module if given["module"] else _file)(given["words"])
        config = launch.read(given)
        late = [word for word in given["words"][1:] if _sets_nproc(word)]
        if late and config.nproc is None:
            say(
                f"note       {late[0]} is passed to {given['words'][0]}, and one process is "
                "started: options of shardwise run come before the script"
            )
        sys.exit(_run_script(words, options, config))

    cli.command(
        "run",
        epilog=_EXAMPLES,
        context_settings={"allow_interspersed_args": False},
    )(with_options(act, [launch], _TEXT, [_WORDS, _MODULE]))


def _sets_nproc(word: str) -> bool:
    """Whether a word is the option for the number of processes, also as other launchers call it."""
    name = word.partition("=")[0]
    return name.startswith("--") and own_option(name[2:]) == "nproc"


def _file(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Check a script; return the words of a rank's command, and what hosts have to agree on."""
    path = Path(words[0])
    expected = "a Python file"
    require(path.exists(), "SCRIPT", f"{path}, which does not exist", expected)
    require(path.is_file(), "SCRIPT", f"{path}, which is not a file", expected)
    require(os.access(path, os.R_OK), "SCRIPT", f"{path}, which is not readable", expected)
    # Its arguments may differ between hosts, which may keep data in different folders.
    contents = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return words, {"SCRIPT": f"{path.name} with SHA-256 {contents}"}


def _module(words: list[str]) -> tuple[list[str], dict[str, str]]:
    name = words[0]
    is_name = all(part.isidentifier() for part in name.split("."))
    require(is_name, "--module", name, "the name of a module, such as my_package.train")
    return ["-m", *words], {"--module": name}


def _run_script(words: Sequence[str], options: dict[str, str], launch: ScriptConfig) -> int:
    nodes, world = launch.nodes(), find_world()
    if world is not None:
        raise UserError(
            f"environment: found rank {world.rank} of {world.size}, expected no RANK and "
            "WORLD_SIZE; what has set them starts the ranks, so give it the script itself"
        )
    processes, command = check_nproc(launch.nproc, None), program.command_of(words)
    if nodes is not None:
        nodes = replace(nodes, options=options)
        say(_meeting(nodes))  # standard output is the script's
    shown, restarts = launch.shown(processes), launch.max_restarts
    return run_job(lambda attempt: command, processes, restarts, nodes or HERE, shown)
