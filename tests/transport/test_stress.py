"""Thousands of random collectives over shared memory: no difference to gloo, no leak, no hang.

    python -m tests.transport.test_stress --rounds 20000 --kills 200 --seed 7    # for longer

What differs from run to run is only who waits for whom. A failure names the seed of its stream.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise import PeerLostError, _torch
from shardwise.transport import futex
from tests.harness import Outcome, run_ranks
from tests.transport.streams import Stream

pytestmark = pytest.mark.skipif(not futex.is_available(), reason="needs Linux on x86-64")

# A mesh of one dimension is the world; of two, its rows and columns have streams of their own.
SHAPES: list[tuple[int, ...]] = [(2,), (3,), (2, 2), (4, 2)]
ROUNDS = {(2,): 1200, (3,): 800, (2, 2): 600, (4, 2): 250}


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


# -- no difference -----------------------------------------------------------------------------


def _compare(rank: int, world_size: int, shape: tuple[int, ...], rounds: int, seed: int) -> int:
    streams = [Stream(_world(), f"{seed}, world")]
    if len(shape) > 1:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("columns", "rows"))
        streams += [Stream(mesh.get_group(name), f"{seed}, {name}") for name in ("columns", "rows")]
    turns = random.Random(seed)
    for _ in range(rounds):
        turns.choice(streams).step()
    for stream in streams:
        stream.finish()
    return sum(stream.started for stream in streams)


def compare(shape: tuple[int, ...], rounds: int, seed: int) -> int:
    """Run random collectives over a mesh; return how many every rank took part in."""
    world_size = 1
    for size in shape:
        world_size *= size
    return int(run_ranks(_compare, world_size, shape, rounds, seed, timeout=36000)[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_collectives_give_the_bits_that_gloo_gives(shape: tuple[int, ...]) -> None:
    assert compare(shape, ROUNDS[shape], seed=20) >= ROUNDS[shape]


# -- no leak -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a process holds.

    Attributes:
        in_common: bytes that the file in common takes.
        descriptors: number of open ones.
        windows: mappings of the file.
        mappings: all.
    """

    in_common: int
    descriptors: int
    windows: int
    mappings: int

    @staticmethod
    def now(fd: int | None = None) -> Held:
        """What this process holds, with file ``fd``."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        return Held(
            512 * os.fstat(fd).st_blocks if fd is not None else 0,
            len(os.listdir("/proc/self/fd")),
            sum("memfd:shardwise" in line for line in maps),
            len(maps),
        )


def _repeat(rank: int, world_size: int, rounds: int, repeats: int) -> list[Held]:
    """Return what is held after each of several repeats of the very same collectives."""
    stream = Stream(_world(), "leaks", compared=False, largest=20_000)
    seen = []
    for _ in range(repeats):
        stream.rewind()
        for number in range(rounds):
            stream.start()
            if number % 4 == 3:  # in step, so that each takes the same memory every time
                stream.finish()
                dist.barrier()
        gc.collect()
        seen.append(Held.now(stream.transport._meeting.fd))
        dist.barrier()
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_held_does_not_grow_with_the_number_of_collectives(world_size: int) -> None:
    for first, *later in run_ranks(_repeat, world_size, 200, 3):
        for each in later:
            assert each.in_common == first.in_common
            assert each.descriptors == first.descriptors
            assert each.windows == first.windows
            # The allocator and the threads of gloo have mappings of their own.
            assert each.mappings <= first.mappings + 10


def _drop_all(rank: int, world_size: int) -> tuple[Held, Held]:
    before = Held.now()
    stream = Stream(_world(), "dropped", compared=False)
    for _ in range(30):
        stream.step()  # some of it is not waited for, some not freed
    dist.barrier()
    del stream
    dist.destroy_process_group()
    gc.collect()
    return before, Held.now()


def test_nothing_stays_mapped_when_all_is_dropped() -> None:
    for before, after in run_ranks(_drop_all, 3):
        assert after.windows == 0
        assert after.descriptors <= before.descriptors


# -- no hang -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """What a survivor found.

    Attributes:
        message: of its error.
        seconds: from the beginning of the step that raised.
        file: that all ranks had in common.
    """

    message: str
    seconds: float
    file: str


def _until_lost(stream: Stream) -> Loss:
    found = os.fstat(stream.transport._meeting.fd)
    while True:
        start = time.monotonic()
        try:
            stream.step()
        except PeerLostError as error:
            return Loss(str(error), time.monotonic() - start, f"{found.st_dev}:{found.st_ino}")


def _send_later(which: signal.Signals, seconds: float) -> None:
    """Have a signal end or stop this process, whatever it does then."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), which))
    timer.daemon = True
    timer.start()


def _lose(rank: int, world_size: int, victim: int, seconds: float, seed: int) -> Loss:
    stream = Stream(_world(), str(seed), compared=False, largest=100_000)
    dist.barrier()
    if rank == victim:
        _send_later(signal.SIGKILL, seconds)
    return _until_lost(stream)


def _holders(file: str) -> list[str]:
    """The processes that have a file open or mapped."""
    device, inode = file.split(":")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = [os.stat(each) for each in (process / "fd").iterdir()]
            maps = (process / "maps").read_text()
        except OSError:  # it ended, or is not ours
            continue
        has_open = any((each.st_dev, each.st_ino) == (int(device), int(inode)) for each in held)
        if has_open or re.search(rf" {inode} +/memfd:shardwise", maps):
            found.append(process.name)
    return found


def kill_one(seed: int) -> float:
    """Kill a rank of a small world at a random moment; return how long survivors took."""
    drawn = random.Random(seed)
    world_size = drawn.randrange(2, 5)
    victim, seconds = drawn.randrange(world_size), drawn.uniform(0, 0.1)
    outcomes: list[Outcome] = run_ranks(
        _lose, world_size, victim, seconds, seed, pg_timeout=600, expect_failures=True
    )
    assert outcomes[victim].exitcode == -signal.SIGKILL, f"seed {seed}"
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    for outcome in survivors:
        assert outcome.ok, f"seed {seed}: {outcome.describe(world_size)}"
        expected = rf"rank {outcome.rank} lost rank {victim} during .*blocks\.\d+"
        assert re.match(expected, outcome.result.message), f"seed {seed}: {outcome.result.message}"
    assert not _holders(survivors[0].result.file), f"seed {seed}"
    return max(float(outcome.result.seconds) for outcome in survivors)


def test_survivors_name_a_rank_that_is_killed_at_any_moment() -> None:
    longest = max(kill_one(seed) for seed in range(20))
    assert longest < 5  # the aim is one, the machine may be busy


def _stop_one(rank: int, world_size: int, victim: int, seconds: float) -> Loss:
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    stream = Stream(_world(), "stopped", compared=False)
    dist.barrier()
    if rank == victim:
        _send_later(signal.SIGSTOP, seconds)
    found = _until_lost(stream)
    if rank != victim:
        store = _torch.store_of(_world())
        if store.add("raised", 1) == world_size - 1:  # the last one lets it go on, and find out
            os.kill(pids[victim], signal.SIGCONT)
    return found


@pytest.mark.parametrize("seconds", [0.03, 0.1])
def test_survivors_name_a_stopped_rank_and_the_group_after_the_timeout(seconds: float) -> None:
    victim = 1
    losses = run_ranks(_stop_one, 3, victim, seconds, pg_timeout=2)
    for rank in (0, 2):
        message = losses[rank].message
        assert re.match(rf"rank {rank} lost rank {victim} during .*blocks\.\d+: no answer", message)
        assert 1.9 < losses[rank].seconds < 10


# -- for longer --------------------------------------------------------------------------------


def main() -> None:
    """Run what the tests run, but for longer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5000, help="collectives of each mesh (5000)")
    parser.add_argument("--kills", type=int, default=20, help="worlds that lose a rank (20)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (0)")
    options = parser.parse_args()
    for shape in SHAPES if options.rounds else []:
        start = time.monotonic()
        count = compare(shape, options.rounds, options.seed)
        print(f"{shape}: {count} collectives, {time.monotonic() - start:.0f} s", flush=True)
    took = [kill_one(seed) for seed in range(options.seed, options.seed + options.kills)]
    if took:
        print(f"{len(took)} ranks killed: survivors took at most {max(took):.3f} s")


if __name__ == "__main__":
    # Ranks import what they run by this name.
    from tests.transport import test_stress

    test_stress.main()
