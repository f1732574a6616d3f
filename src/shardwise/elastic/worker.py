"""A rank in a process that belongs to another program, such as a worker of Ray Train."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from shardwise.base.errors import lost_peer_behind
from shardwise.elastic.rank import StopSignals
from shardwise.elastic.torchrun import PATIENCE
from shardwise.elastic.world import WORKER_JOB, World


def run_worker(world: World, body: Callable[[World, StopSignals], None]) -> None:
    """Run ``body`` as one rank, and return or raise when it has ended.

    Unlike :func:`~shardwise.elastic.rank.run_rank` it neither ends the process nor handles signals,
    which only the main thread may. The program that started the workers takes the first error that
    it sees for the cause. So a rank that has only lost a peer waits before it raises.

    Raises:
        BaseException: what ``body`` raises.
    """
    try:
        body(world, StopSignals())
    except BaseException as error:
        if lost_peer_behind(error) is not None:
            time.sleep(PATIENCE)
        raise


@contextlib.contextmanager
def working_for(job: str) -> Iterator[None]:
    """Let this process be a worker of a job, which may start it again.

    Args:
        job: an id of the job, the same on all workers and after a restart.
    """
    before = os.environ.get(WORKER_JOB)
    os.environ[WORKER_JOB] = job
    try:
        yield
    finally:
        del os.environ[WORKER_JOB]
        if before is not None:
            os.environ[WORKER_JOB] = before
