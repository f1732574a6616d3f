"""``shardwise train`` as a function for workers that another program starts, such as Ray Train.

See "On a Ray cluster" in ``docs/reference/hosts.md``, and ``examples/ray_recipe.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.app.cli.main import commands
from shardwise.app.cli.options import UsageError, describe
from shardwise.base.errors import UserError
from shardwise.elastic.world import WORKER_JOB, environment, find_world

__all__ = ["train"]


def train(arguments: Sequence[str], job: str) -> None:
    """Train a recipe as one rank of the world that RANK, WORLD_SIZE and so on describe.

    The process group is joined, or used if it is there. The function returns when the training has
    ended. It neither ends the process nor handles signals, and runs in any thread.

    Args:
        arguments: what follows ``shardwise train``: ``["lm", "--out", "/shared/run"]``.
        job: an id of the job, the same on all workers and after a restart, so that a restarted job
            continues its run. A new job needs another one.

    Raises:
        UserError: the arguments are wrong, or there is no world.
        PeerLostError: another worker was lost.
    """
    if find_world() is None:
        raise UserError("environment: found no RANK and WORLD_SIZE, expected those of a worker")
    with environment(**{WORKER_JOB: job}):
        try:
            words = ["train", *arguments]
            commands(words)(words, standalone_mode=False)
        except UsageError as error:
            raise UserError(describe(error)) from None
