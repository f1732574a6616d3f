"""The rank and the world of this process, as its environment describes them.

The variables are torch's own (``torchrun`` sets the same ones): RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.base import plain
from shardwise.base.errors import UserError

# Set by our launcher for its children, in addition to torch's variables.
PARENT_PID = "SHARDWISE_PARENT_PID"  # the process that must outlive the rank
REPORT = "SHARDWISE_REPORT"  # file for this rank's stages and its Report
LOCKED = "SHARDWISE_LOCKED"  # set if the launcher holds the lock of the run's folder
EARLY = "SHARDWISE_EARLY"  # set if the rank is started before its world is known
STAYS = "SHARDWISE_STAYS"  # set if the rank may go on over other hosts
LOST = "SHARDWISE_LOST"  # who was lost before this generation of ranks began
JOB = "SHARDWISE_JOB"  # id of the job, the same after a restart

# Set by our launcher for the ranks of a replica that is a world of its own.
REPLICA = "SHARDWISE_REPLICA"  # the ReplicaWorld

# Set while a worker of another program is a rank: it neither ends its process nor handles signals.
WORKER_JOB = "SHARDWISE_WORKER_JOB"  # id of the job, the same after a restart


# Set by a user who wants more ranks on a host than it can carry.
MOST_RANKS = "SHARDWISE_MOST_RANKS"
_PER_CORE = 16  # ranks; a job on trial has more ranks than cores, and they mostly wait
_PER_RANK = 2**28  # bytes, of a rank that has imported torch


@dataclass(frozen=True)
class World:
    """This process among all processes of the run.

    Attributes:
        rank: 0 .. size - 1.
        size: number of processes of the run.
        local_rank: 0 .. local_size - 1 on this host.
        local_size: number of processes on this host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def hosts(self) -> int:
        """The number of hosts, if every host runs the same number of processes."""
        return max(1, self.size // self.local_size)


def find_world() -> World | None:
    """Return the world that the environment describes, or None if it describes none.

    Raises:
        UserError: a variable is missing, is not a number, or is out of range.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(
                f"environment: found no {name}, expected RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT together; start with torchrun, or pass --nproc and set none of them"
            )
    size = _number("WORLD_SIZE", None, low=1)
    rank = _number("RANK", None, low=0, below=size)
    local_size = _number("LOCAL_WORLD_SIZE", size, low=1)
    local_rank = _number("LOCAL_RANK", rank, low=0, below=local_size)
    return World(rank, size, local_rank, local_size)


@dataclass(frozen=True)
class ReplicaWorld:
    """A replica that is a world of its own, among those that train together.

    Attributes:
        number: 0 .. count - 1.
        count: number of replicas.
        server: address and port where they meet.
        token: what lets a replica take part.
        restarts: how often this one was restarted.
    """

    number: int
    count: int
    server: str
    token: str
    restarts: int

    def among_all(self, own: World) -> World:
        """Return a rank of this replica among the ranks of all of them, all on one host."""
        rank, size = self.number * own.size + own.rank, self.count * own.size
        return World(rank, size, rank, size)

    def environment(self) -> dict[str, str]:
        """Return the variables that :func:`find_replica` reads."""
        return {REPLICA: plain.written(self).decode()}


def find_replica() -> ReplicaWorld | None:
    """Return the replica that this process is a rank of, if that is a world of its own."""
    text = os.environ.get(REPLICA)
    return None if text is None else plain.read(ReplicaWorld, text.encode())


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables during the context, and put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    try:
        os.environ.update(values)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_of_a_rank(ranks: int) -> str:
    """Return the ``OMP_NUM_THREADS`` of each of ``ranks`` ranks, which share this host's cores."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))


def most_ranks() -> tuple[int, str]:
    """Return how many ranks this host can carry, and that in words.

    Raises:
        UserError: the variable by which the user says it is no number.
    """
    if MOST_RANKS in os.environ:
        most = _number(MOST_RANKS, None, low=1)
        return most, f"at most {most}, as {MOST_RANKS} says"
    cores, memory = usable_cores(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(1, min(_PER_CORE * cores, memory // _PER_RANK))
    return most, (
        f"at most {most}: this host has {cores} cores, for {_PER_CORE} ranks each, and memory for "
        f"{memory // _PER_RANK} ranks; to start more, set {MOST_RANKS} to their number"
    )


def launched_here() -> bool:
    """Whether this process is a rank that our own launcher started."""
    return PARENT_PID in os.environ


def job_id() -> str | None:
    """Return the id of the job that this process is a rank of, which stays the same over restarts.

    Our launcher hands one down, and so does a program that runs ranks in workers of its own. Under
    torchrun it is the process that starts the ranks, again after
    one failed: run ids are names, and two jobs may have the same one. None if nothing restarts the
    job, or if that process cannot be identified.
    """
    if launched_here():
        return os.environ.get(JOB)
    if WORKER_JOB in os.environ:
        return os.environ[WORKER_JOB]
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    agent = os.getppid()
    started = start_of(agent)
    if started is None:
        return None
    return f"{run_id}, process {agent} on {socket.gethostname()}, started at tick {started}"


def start_of(process: int) -> int | None:
    """Return when a process has started, in ticks since the system has; None: it does not run.

    Process ids are reused; together with this they are unique.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _number(name: str, default: int | None, *, low: int, below: int | None = None) -> int:
    text = os.environ.get(name, str(default))
    expected = f"at least {low}" if below is None else f"{low} to {below - 1}"
    if not text.isdecimal() or int(text) < low or (below is not None and int(text) >= below):
        raise UserError(f"environment: found {name}={text}, expected {expected}")
    return int(text)
