"""Thousands of random collectives over shared memory: no difference to the bit, and no hang.

    python -m tests.transport.test_stress --rounds 20000 --kills 200 --seed 7    # for longer

Only the timing differs from run to run. A failure names the seed of its stream.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise import PeerLostError
from shardwise._torch import c10d
from shardwise.base import libc
from shardwise.transport.base import FullBuffers, Label, Reduce
from tests.harness import Outcome, run_ranks
from tests.transport.conformance import Unread
from tests.transport.streams import CPU, Stream, over_shm, world_group
from tests.worlds import on_processes

pytestmark = [
    pytest.mark.usefixtures("new_ranks"),
    pytest.mark.skipif(not libc.has_futex(), reason="needs Linux on x86-64"),
]

# A mesh of one dimension is the world; of two, its rows and columns have streams of their own.
SHAPES: list[tuple[int, ...]] = [(2,), (3,), (2, 2), (4, 2)]
ROUNDS = {(2,): 300, (3,): 500, (2, 2): 400, (4, 2): 150}


# -- no difference -----------------------------------------------------------------------------


def _compare(rank: int, world_size: int, shape: tuple[int, ...], rounds: int, seed: int) -> int:
    streams = [over_shm(world_group(), f"{seed}, world")]
    if len(shape) > 1:
        names = ("columns", "rows")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        streams += [over_shm(mesh.get_group(name), f"{seed}, {name}") for name in names]
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


@pytest.mark.parametrize(
    "shape",
    [(2,), *(pytest.param(shape, marks=pytest.mark.long) for shape in SHAPES[1:])],
    ids=str,
)
def test_random_collectives_have_the_bits_of_one_process(
    shape: tuple[int, ...],
) -> None:
    assert compare(shape, ROUNDS[shape], seed=20) >= ROUNDS[shape]


# -- no hang -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """What a survivor observed.

    Attributes:
        message: the message of its error.
        seconds: the time since the beginning of the step that raised.
        file: the file that all ranks shared.
    """

    message: str
    seconds: float
    file: str


def _until_lost(stream: Stream) -> Loss:
    found = os.fstat(stream.transport._sync.connections.fd)
    while True:
        start = time.monotonic()
        try:
            stream.step()
        except PeerLostError as error:
            return Loss(str(error), time.monotonic() - start, f"{found.st_dev}:{found.st_ino}")


def _send_later(which: signal.Signals, seconds: float) -> None:
    """Send a signal to this process after a delay."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), which))
    timer.daemon = True
    timer.start()


def _lose(rank: int, world_size: int, victim: int, seconds: float, seed: int) -> Loss:
    stream = over_shm(world_group(), str(seed), Unread, largest=100_000)
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
    for seed in range(8):
        kill_one(seed)  # within the time of the test, of which the timeout is many times


@on_processes(2, pg_timeout=5)
def test_memory_is_not_taken_from_a_rank_that_is_late_to_free(rank: int, world_size: int) -> None:
    """Rank 1 keeps reading what rank 0 freed long ago."""
    transport = over_shm(world_group(), "late", Unread).transport
    first, *others = (
        transport.full_buffers([1000 * world_size], [torch.float32], CPU) for _ in range(6)
    )

    def gather(buffers: FullBuffers, value: float) -> None:
        buffers.allocate()
        transport.all_gather([torch.full((1000,), value + rank)], buffers.tensors).wait()
        rows = buffers.tensors[0].view(world_size, -1)
        assert rows[:, 0].tolist() == [value + each for each in range(world_size)]

    gather(first, 0.0)
    if rank == 0:
        first.free()
    for number, buffers in enumerate(others, start=1):
        gather(buffers, 10.0 * number)
        buffers.free()
    if rank == 1:
        assert first.tensors[0].view(world_size, -1)[:, 0].tolist() == [0.0, 1.0]
        first.free()
    gather(first, 7.0)


def _stop_one(rank: int, world_size: int, victim: int, seconds: float) -> Loss:
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    stream = over_shm(world_group(), "stopped", Unread)
    dist.barrier()
    if rank == victim:
        _send_later(signal.SIGSTOP, seconds)
    found = _until_lost(stream)
    if rank != victim:
        store = c10d.store_of(world_group())
        if store.add("raised", 1) == world_size - 1:  # the last one lets it go on, and find out
            os.kill(pids[victim], signal.SIGCONT)
    return found


def test_survivors_name_a_stopped_rank_and_the_group_after_the_timeout() -> None:
    victim = 1
    losses = run_ranks(_stop_one, 3, victim, 0.03, pg_timeout=2)
    for rank in (0, 2):
        message = losses[rank].message
        assert re.match(rf"rank {rank} lost rank {victim} during .*blocks\.\d+: no answer", message)
        assert losses[rank].seconds > 1.9


def _give_up_or_wait(rank: int, world_size: int) -> Loss | None:
    """Rank 2 is killed, rank 1 gives up but lives, and rank 0 waits for rank 1."""
    stream = over_shm(world_group(), "given up", Unread)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [
        stream.transport.all_reduce([torch.ones(3)], Reduce.SUM, Label(f"blocks.{i}"))
        for i in range(2 - rank)
    ]
    start = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        works[-1].wait()
    return Loss(str(caught.value), time.monotonic() - start, "")


def test_a_rank_that_waits_for_one_that_gave_up_reports_the_cause() -> None:
    outcomes = run_ranks(_give_up_or_wait, 3, pg_timeout=600, expect_failures=True)
    for rank in (0, 1):
        assert outcomes[rank].ok, outcomes[rank].describe(3)
        found = outcomes[rank].result
        assert found.message.startswith(f"rank {rank} lost rank 2 during the all-reduce of blocks.")


# -- for longer --------------------------------------------------------------------------------


def main() -> None:
    """Run the same as the tests, but for longer."""
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
