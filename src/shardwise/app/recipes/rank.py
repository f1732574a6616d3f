"""A rank of a training, which the launcher starts: it gets the training as a value.

    python -P -m shardwise.app.recipes.rank FILE

The launcher alone has read a command line and files of options. What they say later cannot change
what a rank trains that is started again.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shardwise.app.recipes.core.job import TrainingJob
from shardwise.elastic.errors import MovedOn, Parted
from shardwise.elastic.fork_server import serve_forks
from shardwise.elastic.rank import StopSignals, run_rank
from shardwise.elastic.world import EARLY, World, find_replica, find_world


def command_of(job: TrainingJob, words: Sequence[str], folder: Path) -> list[str]:
    """Return the command of a rank, and write the job for it.

    Args:
        job: what it trains.
        words: the command line that asks for it, which the run only shows.
        folder: a folder of the launcher's, which only this user can write to.
    """
    file = folder / "job"
    file.write_bytes(pickle.dumps((job, words)))
    # -P: the current folder is the user's, not a place to import from.
    return [sys.executable, "-P", "-m", "shardwise.app.recipes.rank", str(file)]


def main() -> NoReturn:
    """Be the rank that the environment names."""
    given: tuple[TrainingJob, Sequence[str]] = pickle.loads(Path(sys.argv[1]).read_bytes())
    job, sys.argv[1:] = given
    serve_forks(job.preload)
    world = find_world()
    assert world is not None, "this is no rank"
    # The name of a file may be what no text can hold; it is shown nevertheless.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]

    def train(world: World, signals: StopSignals) -> None:
        replica = find_replica()
        if replica is not None:
            job.be_replica(replica)
        if os.environ.pop(EARLY, ""):
            job.prepare()
            world = signals.next_world()
        before = None
        while True:
            job.check(world if replica is None else replica.among_all(world))
            try:
                job.run(world, signals, before)
                return
            except MovedOn as error:
                moved = error.with_traceback(None)  # which holds the model
            before = moved.departure
            if not isinstance(moved, Parted):
                signals.hold()  # for nothing is saved
            gc.collect()  # the model in the world before, and what its ranks shared
            world = signals.next_world(moved)

    run_rank(world, train)


if __name__ == "__main__":
    main()
