"""Two ranks save to S3 and are killed at random moments, many times, and each start goes on.

    python -m tests.checkpoint.stores.soak --kills 200 --seed 1

After each kill, all checkpoints that :func:`checkpoint.steps` lists must load with the values of
their step, no more may be complete than kills between a commit and the deletions after it explain,
and each file that no manifest names must be one that a mark tells of, so that it can be deleted. In
the end, a save must leave what one complete checkpoint needs, and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import moto.s3.models
import torch
import torch.distributed as dist

from shardwise import checkpoint, fully_shard
from shardwise.base.errors import lost_peer_behind
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk import store_commit, store_path
from shardwise.checkpoint.disk.entries import MANIFEST
from shardwise.checkpoint.disk.filenames import SHARD
from shardwise.checkpoint.disk.manifest import MAX_BYTES
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_path import StorePath
from tests.checkpoint.stores.server import Server, serving

RANKS = 2
KEPT = 2
ROOT = "s3://runs/soak"
PART = 256 << 10  # bytes; S3 itself takes no less than 5 MiB
TORN = 3  # an exit code
_SECONDS = 120  # for the ranks that were not killed to notice
_MOST_REQUESTS = 80  # before a kill: a start, and some three saves


@dataclasses.dataclass
class Tally:
    """What happened over all kills."""

    kills: int = 0
    victims: Counter[str] = dataclasses.field(default_factory=Counter)
    requests: Counter[str] = dataclasses.field(default_factory=Counter)  # that began when killed
    checked: int = 0  # loads of checkpoints that were complete after a kill
    newest: int = 0
    complete: int = 0  # checkpoints, after the last kill
    most_complete: int = 0
    most_objects: int = 0
    most_left: int = 0  # of them, files that no manifest names
    uploads: int = 0  # that nobody has ended, for the bucket's own rules
    slowest: float = 0.0  # seconds until the ranks that were not killed had ended
    finds: list[str] = dataclasses.field(default_factory=list)


def model() -> torch.nn.Module:
    """A model of which each rank's shards take two parts."""
    return torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))


def fill(one: torch.nn.Module, step: int) -> None:
    """Give each parameter a value of its own for a step."""
    with torch.no_grad():
        for number, each in enumerate(one.parameters()):
            each.fill_(10 * step + number)


def is_filled(one: torch.nn.Module, step: int) -> bool:
    """Whether these are the values of a step."""
    local = [getattr(each, "_local_tensor", each) for each in one.parameters()]
    return all(bool((each == 10 * step + number).all()) for number, each in enumerate(local))


def _rank(rank: int, meeting: str, environment: dict[str, str]) -> None:
    """Go on from the newest checkpoint, and save each step until this rank or the other dies."""
    os.environ.update(environment)
    store_path._PART = PART
    store_commit.LEFT = timedelta(0)  # whoever was killed before is dead
    torch.set_num_threads(1)
    try:
        _save_on(rank, meeting)
    except Exception as error:
        if lost_peer_behind(error) is None:
            print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        os._exit(1)


def _save_on(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", f"file://{meeting}", world_size=RANKS, rank=rank)
    one = fully_shard(model())
    newest, step = checkpoint.latest(ROOT), 0
    if newest is not None:
        checkpoint.load(newest, one)
        step = int(newest.name.rpartition("-")[2])
        if not is_filled(one, step):
            os._exit(TORN)
    while True:
        step += 1
        fill(one, step)
        checkpoint.save(checkpoint.step_folder(ROOT, step), one, keep_last=KEPT)


class _Kill:
    """Kills some of the processes at a moment after a request."""

    def __init__(self, choice: random.Random, server: Server, tally: Tally) -> None:
        self._left = choice.randint(1, _MOST_REQUESTS)
        self._wait = choice.choice([0.0, choice.uniform(0, 0.02), choice.uniform(0, 0.3)])
        self._ranks = choice.choice([[0], [1], [0, 1]])
        self._tally, self._server = tally, server
        self._lock = threading.Lock()
        self.processes: list[BaseProcess] = []
        self.done = threading.Event()
        server.on_request = self._on_request

    def _on_request(self, method: str, path: str) -> None:
        with self._lock:
            self._left -= 1
            if self._left != 0:
                return
        what = re.sub(r"\d+", "N", path.rpartition("/")[2].partition("?")[0][:9])
        self._tally.requests[f"{method} {what}"] += 1
        if self._wait:
            threading.Timer(self._wait, self._kill).start()
        else:
            self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            self.processes[rank].kill()
        self._tally.victims[" and ".join(f"rank {rank}" for rank in self._ranks)] += 1
        self.done.set()


def soak(kills: int, seed: int, server: Server) -> Tally:
    """Kill so many times, and look after each."""
    tally, choice = Tally(), random.Random(seed)
    os.environ.update(server.environment)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload", "tests.checkpoint.stores.server"])
    with tempfile.TemporaryDirectory() as folder:
        for number in range(kills):
            kill = _Kill(choice, server, tally)
            meeting = str(Path(folder, f"{number}"))
            kill.processes[:] = [
                context.Process(target=_rank, args=(rank, meeting, server.environment))
                for rank in range(RANKS)
            ]
            for each in kill.processes:
                each.start()
            _watch(kill, tally, number)
            server.on_request = lambda method, path: None
            tally.kills += 1
            _look(tally, number)
            if (number + 1) % 10 == 0:
                print(f"{number + 1} kills, step {tally.newest}", flush=True)
    _finish(tally, server)
    return tally


def _watch(kill: _Kill, tally: Tally, number: int) -> None:
    """Wait until all processes have ended, each within its time."""
    while not kill.done.wait(0.05):
        if not any(each.is_alive() for each in kill.processes):
            tally.finds.append(f"kill {number}: the ranks ended before")
            return
    began = time.monotonic()
    for rank, each in enumerate(kill.processes):
        each.join(max(0.0, began + _SECONDS - time.monotonic()))
        if each.is_alive():
            tally.finds.append(f"kill {number}: rank {rank} did not end in {_SECONDS} s")
            each.kill()
            each.join()
        if each.exitcode == TORN:
            tally.finds.append(f"kill {number}: rank {rank} loaded values of other steps")
    tally.slowest = max(tally.slowest, time.monotonic() - began)


def _look(tally: Tally, number: int) -> None:
    """Check what there is."""
    steps = checkpoint.steps(ROOT)
    for step in steps:
        loaded = model()
        try:
            checkpoint.load(checkpoint.step_folder(ROOT, step), loaded)
        except CheckpointError as error:
            tally.finds.append(f"kill {number}: step {step}: {error}")
            continue
        tally.checked += 1
        if not is_filled(loaded, step):
            tally.finds.append(f"kill {number}: step {step} has values of other steps")
    newest = max(steps, default=0)
    saved = newest - tally.newest
    if saved < 0:
        tally.finds.append(f"kill {number}: step {tally.newest} is not complete any more")
    # Whoever has committed twice has deleted old ones between. A kill may come before.
    most = KEPT + 1 if saved > 1 else max(KEPT, tally.complete) + saved
    if len(steps) > most:
        tally.finds.append(f"kill {number}: {len(steps)} complete checkpoints")
    tally.newest, tally.complete = newest, len(steps)
    tally.most_complete = max(tally.most_complete, tally.complete)
    found = [*_root().below()]
    marks = {name.rpartition(".")[2] for name in found if name.startswith(".partial/")}
    named = _named()
    left = [name for name in found if name not in named and not name.startswith(".partial/")]
    for name in left:
        match = SHARD.fullmatch(name.rpartition("/")[2])
        if match is None or match["nonce"] not in marks:
            tally.finds.append(f"kill {number}: no mark tells of {name}")
    tally.most_objects = max(tally.most_objects, len(found))
    tally.most_left = max(tally.most_left, len(left))


def _root() -> StorePath:
    place = place_of(ROOT)
    assert isinstance(place, StorePath)
    return place


def _named() -> set[str]:
    """The files of complete checkpoints."""
    named = set()
    for step in checkpoint.steps(ROOT):
        folder = checkpoint.step_folder(ROOT, step)
        text = (_root() / folder.name / MANIFEST).read_small(MAX_BYTES)
        named |= {f"{folder.name}/{name}" for name in (MANIFEST, *json.loads(text)["files"])}
    return named


def _finish(tally: Tally, server: Server) -> None:
    """Save once more, and look at what is left."""
    time.sleep(1.1)  # for marks of another second
    store_commit.LEFT = timedelta(0)
    one, step = model(), tally.newest + 1
    fill(one, step)
    checkpoint.save(checkpoint.step_folder(ROOT, step), one, keep_last=1)
    if more := {*_root().below()} ^ _named():
        tally.finds.append(f"in the end: {len(more)} objects too many or too few: {sorted(more)}")
    with urllib.request.urlopen(f"{server.url}/runs?uploads") as answer:
        tally.uploads = answer.read().count(b"<UploadId>")


def main() -> int:
    """The command line; its exit code: 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checkpoint.stores.soak", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = PART
    with serving() as server:
        tally = soak(options.kills, options.seed, server)
    for name, value in vars(tally).items():
        print(f"{name}: {dict(value) if isinstance(value, Counter) else value}")
    print(f"{time.monotonic() - began:,.0f} s")
    return 1 if tally.finds else 0


if __name__ == "__main__":
    sys.exit(main())
