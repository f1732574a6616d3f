"""Shared memory between the ranks of one host: who may share it, its size, and what is left."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise import PeerLostError, RanksDivergedError, fully_shard
from shardwise.base import libc, observe
from shardwise.base.observe import Activity, Memory
from shardwise.sharding.state import state_of
from shardwise.transport import memory
from shardwise.transport.base import Call, FullBuffers, Kind, Label, Reduce, Transport
from shardwise.transport.select import select_transport
from shardwise.transport.shm import handshake, sync
from shardwise.transport.shm import transport as shm
from shardwise.transport.shm.arena import Arena, Window
from shardwise.transport.shm.transport import ShmTransport
from tests.harness import run_ranks
from tests.sharding.nets import (
    Net,
    batches,
    check_backward,
    seeded,
)
from tests.test_observe import Notes
from tests.worlds import on_processes

CPU = torch.device("cpu")
NUMEL = 1_000_000
pytestmark = [
    pytest.mark.usefixtures("new_ranks"),
    pytest.mark.skipif(not libc.has_futex(), reason="needs Linux on x86-64"),
]


def _transport() -> ShmTransport:
    transport = select_transport(dist.group.WORLD, CPU, "shm")
    assert isinstance(transport, ShmTransport)
    return transport


def _gather(transport: Transport, numel: int = NUMEL, name: str = "some group") -> torch.Tensor:
    buffers = transport.full_buffers([numel * transport.world_size], [torch.float32], CPU)
    buffers.allocate()
    shard = torch.full((numel,), float(transport.rank))
    transport.all_gather([shard], buffers.tensors, Label(name)).wait()
    found = buffers.tensors[0][::numel].clone()
    buffers.free()
    return found


def _taken(transport: ShmTransport) -> int:
    """Bytes of the shared memory that are in use."""
    return os.fstat(transport._sync.connections.fd).st_blocks * 512


class _Waiting(Notes):
    """Lets a peer go on as soon as this rank is seen to wait for it."""

    def begin(self, activity: Activity, name: str, dimension: str, nbytes: int) -> int:
        if activity is Activity.PEER:
            dist.send(torch.ones(1), int(name))
        return super().begin(activity, name, dimension, nbytes)


@on_processes(2, pg_timeout=10)
def test_a_wait_for_a_peer_is_reported(rank: int, world_size: int) -> None:
    transport, notes = _transport(), _Waiting()
    if rank == 1:
        dist.recv(torch.ones(1), 0)
        _gather(transport)
        return
    with observe.observing(notes):
        _gather(transport)
    assert "end of wait for a peer of 1" in notes.lines


# -- memory ------------------------------------------------------------------------------------


@on_processes(2)
def test_groups_of_one_size_take_turns_in_the_memory_of_three(rank: int, world_size: int) -> None:
    transport = _transport()
    nbytes = 4 * NUMEL * world_size
    groups = [transport.full_buffers([NUMEL * world_size], [torch.float32], CPU) for _ in range(10)]
    dist.barrier()
    small = _taken(transport)
    for _ in range(3):  # steps, with one group looked ahead
        groups[0].allocate()
        for current, following in itertools.pairwise(groups):
            following.allocate()
            transport.all_gather([torch.full((NUMEL,), 1.0)], current.tensors).wait()
            assert current.tensors[0].sum() == NUMEL * world_size
            current.free()
        groups[-1].free()
    dist.barrier()
    # Two in use, one to spare, of ten; and a little of them is never written to.
    assert _taken(transport) - small <= 3 * nbytes + 2**20


#: By what a step has: sizes of groups, whether the first stays until the last is freed, and how
#: much memory they need at most.
TURNS = {
    # Those of other sizes take turns, too.
    "other sizes": ([NUMEL + 100_000 * i for i in range(8)], False, 2 * (NUMEL + 700_000)),
    # The large group alternates between two pieces. The others need two besides.
    "a large one around": ([4 * NUMEL, *[NUMEL] * 5], True, (2 * 4 + 2) * NUMEL),
    # An embedding, blocks, a head, the blocks again: one large piece for both, and two small ones
    # that take turns.
    "large ones between": (2 * [4 * NUMEL, *[NUMEL] * 4], False, (4 + 2) * NUMEL),
}


@pytest.mark.parametrize("name", TURNS)
@on_processes(2)
def test_groups_take_turns_in_memory_of_their_size(rank: int, world_size: int, name: str) -> None:
    transport = _transport()
    numels, first_stays, most = TURNS[name]
    groups = [transport.full_buffers([n * world_size], [torch.float32], CPU) for n in numels]
    dist.barrier()
    for _ in range(6):  # steps
        for buffers, numel in zip(groups, numels, strict=True):
            transport.all_gather([torch.ones(numel)], buffers.tensors).wait()
            assert buffers.tensors[0].sum() == numel * world_size
            if not first_stays or buffers is not groups[0]:
                buffers.free()
        if first_stays:
            groups[0].free()
    dist.barrier()
    assert _taken(transport) <= 4 * most * world_size + 2**20


@on_processes(3)
def test_the_memory_of_reductions_is_given_back_if_asked(rank: int, world_size: int) -> None:
    transport = _transport()
    fulls = [torch.arange(3.0 * NUMEL) + rank, torch.ones(5)]
    outs = [torch.empty(-(-full.numel() // world_size)) for full in fulls]
    before, notes = _taken(transport), Notes()
    reported: list[int] = []
    with observe.observing(notes):
        for _ in range(3):
            for reports in (reported, []):
                transport.reduce_scatter(fulls, outs, Reduce.SUM).wait()
                reports.append(notes.memory_now[Memory.TRANSPORT])
            expected = world_size * fulls[0] + sum(range(world_size)) - world_size * rank
            chunk = outs[0].numel()
            mine = expected[rank * chunk : (rank + 1) * chunk]
            assert torch.equal(outs[0][: mine.numel()], mine)
            transport.trim()
            for _ in range(2):
                _gather(transport, 100)
            dist.barrier()
            assert _taken(transport) - before < 2**20
            dist.barrier()
    assert reported == [reported[0]] * 3
    assert reported[0] > 4 * NUMEL
    # From then on, small reductions do not keep the memory of large ones either.
    transport.reduce_scatter(fulls, outs, Reduce.SUM).wait()
    for _ in range(4):
        transport.reduce_scatter(fulls[1:], outs[1:], Reduce.SUM).wait()
    dist.barrier()
    assert _taken(transport) - before < 2**20


@on_processes(3)
def test_full_parameters_that_are_too_large_for_the_next_group_are_given_back(
    rank: int, world_size: int
) -> None:
    transport = _transport()
    large, small = [
        transport.full_buffers([numel * world_size], [torch.float32], CPU)
        for numel in (4 * NUMEL, NUMEL)
    ]
    transport.trim()
    dist.barrier()
    before = _taken(transport)
    for step in range(3):
        for buffers, numel in ((large, 4 * NUMEL), (small, NUMEL)):
            shard = torch.full((numel,), float(rank + step))
            transport.all_gather([shard], buffers.tensors).wait()
            rows = buffers.tensors[0].view(world_size, -1)
            assert all(bool((row == each + step).all()) for each, row in enumerate(rows))
        dist.barrier()
        large.free()
        out = torch.empty(1)
        transport.reduce_scatter([torch.ones(world_size)], [out], Reduce.SUM).wait()
        assert out == world_size
        dist.barrier()
        assert _taken(transport) - before <= 4 * NUMEL * world_size + 2**20
        assert bool((small.tensors[0].view(world_size, -1)[rank] == rank + step).all())
        dist.barrier()
        small.free()


@on_processes(3)
def test_full_parameters_of_small_groups_are_given_back_while_there_is_a_large_one(
    rank: int, world_size: int
) -> None:
    transport = _transport()
    numels = [NUMEL, NUMEL, NUMEL, 4 * NUMEL]  # blocks, a head
    *blocks, head = [transport.full_buffers([n * world_size], [torch.float32], CPU) for n in numels]
    transport.trim()
    dist.barrier()
    before = _taken(transport)

    def gather(buffers: FullBuffers, numel: int, value: float) -> None:
        transport.all_gather([torch.full((numel,), rank + value)], buffers.tensors).wait()
        rows = buffers.tensors[0].view(world_size, -1)
        assert all(bool((row == each + value).all()) for each, row in enumerate(rows))

    for step in range(3):
        for block in blocks:
            gather(block, NUMEL, step)
            block.free()
        gather(head, 4 * NUMEL, step)
        gather(blocks[-1], NUMEL, step)  # prefetched for backward
        dist.barrier()
        assert _taken(transport) - before <= (4 + 1) * 4 * NUMEL * world_size + 2**20
        dist.barrier()
        head.free()
        for following, block in itertools.pairwise(reversed(blocks)):
            gather(block, NUMEL, step)
            following.free()
        blocks[0].free()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@on_processes()
def test_gradients_that_nobody_else_has_give_their_memory_back(rank: int, world_size: int) -> None:
    transport = _transport()
    sizes = [300_001, 17, 100_000]
    with patch.object(memory, "RETURNED_BYTES", 10_000), patch.object(shm, "_AT_ONCE", 2**16):
        for op in Reduce:
            for owned in ((), (0, 1), (0, 1, 2)):
                fulls = [torch.randn(size) for size in sizes]
                copies = [full.clone() for full in fulls]
                outs, expected = (
                    [torch.zeros(-(-size // world_size)) for size in sizes] for _ in range(2)
                )
                call = Call(
                    Kind.REDUCE_SCATTER, fulls, outs, op, Label("some group"), disposable=owned
                )
                transport.start(call).wait()
                transport.reduce_scatter(copies, expected, op).wait()
                for i, size in enumerate(sizes):
                    assert torch.equal(outs[i], expected[i])
                    changed = int((fulls[i] != copies[i]).sum())
                    # All whole pages of 1024 elements, but for those at the ends of parts.
                    gone = i in owned and size > 10_000
                    assert changed > size / 2 if gone else changed == 0, (i, owned, changed)


@on_processes(2)
def test_gradients_that_a_program_keeps_stay_what_they_are(rank: int, world_size: int) -> None:
    kept: list[torch.Tensor] = []

    class Keeping(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.register_post_accumulate_grad_hook(
                lambda param: kept.append(param.grad) if param.grad is not None else None
            )
            return super().forward(x)

    with patch.object(memory, "RETURNED_BYTES", 10_000):
        x = torch.arange(64.0).expand(4, 64) + rank
        for layer in (Keeping(64, 128, bias=False), torch.nn.Linear(64, 128, bias=False)):
            fully_shard(layer, transport="shm")
            layer(x).sum().backward()
            grad = layer.weight.grad
            assert grad is not None
            expected = (4 * (torch.arange(64.0) + 0.5)).expand(128, 64)
            assert torch.equal(grad.full_tensor(), expected)  # type: ignore[attr-defined]
        assert [torch.equal(each, x.sum(0).expand(128, 64)) for each in kept] == [True]


@on_processes(2)
def test_hundreds_of_collectives_under_way(rank: int, world_size: int) -> None:
    transport = _transport()
    works, outs = [], []
    for i in range(300):
        outs.append(torch.empty(10))
        full = torch.full((10 * world_size,), float(i + rank))
        works.append(transport.reduce_scatter([full], [outs[-1]], Reduce.SUM))
    for i, (work, out) in enumerate(zip(works, outs, strict=True)):
        work.wait()
        assert out.tolist() == [float(sum(i + each for each in range(world_size)))] * 10, i


@on_processes(2)
def test_too_many_collectives_under_way_are_an_error(rank: int, world_size: int) -> str:
    with patch.multiple(sync, CAPACITY=8):
        transport = _transport()
        works = [transport.all_reduce([torch.ones(1)], Reduce.SUM) for _ in range(20)]
        dist.barrier()
        with pytest.raises(RuntimeError, match="shared memory has room for 7 under way") as caught:
            works[0].wait()
        return str(caught.value)


@on_processes(2)
def test_an_entry_that_is_about_to_be_overwritten_is_not_read(rank: int, world_size: int) -> None:
    with patch.multiple(sync, CAPACITY=8):
        transport = _transport()
        works = [transport.all_reduce([torch.ones(1)], Reduce.SUM) for _ in range(8)]
        if rank == 1:  # as it is in the midst of the next one
            transport._sync.numbers.describe(9, 0, 2**20)
        dist.barrier()
        if rank == 0:
            with pytest.raises(RuntimeError, match="is 7 behind those of rank 1"):
                works[0].wait()
        dist.barrier()


def _new_groups(rank: int, world_size: int) -> list[int]:
    """Return how many descriptors are open after each of several groups was made and destroyed."""
    counts = []
    for _ in range(4):
        group = dist.new_group()
        transport = select_transport(group, CPU, "shm")
        transport.all_reduce([torch.ones(3)], Reduce.SUM).wait()
        dist.barrier()
        dist.destroy_process_group(group)
        del group, transport
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_a_destroyed_group_leaves_nothing() -> None:
    for counts in run_ranks(_new_groups, 2):
        assert counts[-1] <= counts[0], counts


def _once_per_host(rank: int, world_size: int) -> float:
    """Return this rank's share of the memory of a full parameter, in bytes."""
    transport = _transport()
    numel = 4 * NUMEL
    buffers = transport.full_buffers([numel * world_size], [torch.float32], CPU)
    before = _pss()
    buffers.allocate()
    transport.all_gather([torch.ones(numel)], buffers.tensors).wait()
    assert buffers.tensors[0].sum() == numel * world_size
    dist.barrier()
    share = _pss() - before
    dist.barrier()
    return share


def _pss() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss_Shmem:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return 1024 * int(found[1])


def test_a_full_parameter_exists_once_per_host() -> None:
    shares = run_ranks(_once_per_host, 2)
    whole = 4 * 4 * NUMEL * 2
    assert sum(shares) == pytest.approx(whole, rel=0.1)


@on_processes(2)
def test_a_group_that_gets_its_memory_again_maps_nothing(rank: int, world_size: int) -> None:
    transport = _transport()
    groups = [transport.full_buffers([NUMEL * world_size], [torch.float32], CPU) for _ in range(2)]
    with patch.object(
        Window, "open_private", autospec=True, side_effect=Window.open_private
    ) as opened:
        for _ in range(4):
            for group in groups:
                transport.all_gather([torch.ones(NUMEL)], group.tensors).wait()
                group.free()
    assert opened.call_count == len(groups)


# -- who may share it --------------------------------------------------------------------------


@on_processes(3)
def test_if_one_rank_cannot_share_memory_all_send_messages(rank: int, world_size: int) -> None:
    said = "(?s)^transport 'shm' is not available here: .*rank 1: shared memory is for Linux on x86"
    with patch.object(libc, "has_futex", lambda: rank != 1):
        assert select_transport(dist.group.WORLD, CPU, "auto").name == "gloo"
        with pytest.raises(ValueError, match=said):
            _transport()


@on_processes(2)
def test_a_process_without_the_token_is_rejected(rank: int, world_size: int) -> None:
    """It has found the socket."""
    real = handshake._listen

    @contextlib.contextmanager
    def listen() -> Iterator[tuple[socket.socket, str]]:
        with real() as (listener, name):

            def intrude() -> None:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as intruder:
                    intruder.connect(f"\0{name}")
                    intruder.sendall(handshake._HELLO.pack(1, b"0" * 32))
                    assert intruder.recv(1) == b"", (
                        "the connection is closed, and no memory was passed"
                    )

            threading.Thread(target=intrude, daemon=True).start()
            time.sleep(0.2)
            yield listener, name

    with patch.object(handshake, "_listen", listen) if rank == 0 else contextlib.nullcontext():
        assert _gather(_transport()).tolist() == [0.0, 1.0]


@on_processes(3)
def test_a_full_queue_keeps_no_rank_from_sharing_memory(rank: int, world_size: int) -> None:
    """Any user of the machine may fill the queue of a rank that does not accept yet."""
    real = handshake._listen

    @contextlib.contextmanager
    def listen() -> Iterator[tuple[socket.socket, str]]:
        with real() as (listener, name), contextlib.ExitStack() as crowd:
            with contextlib.suppress(BlockingIOError):
                while True:
                    each = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    each.setblocking(False)
                    each.connect(f"\0{name}")
                    each.send(handshake._HELLO.pack(1, b"0" * 32))
            yield listener, name

    with patch.object(handshake, "_listen", listen) if rank == 0 else contextlib.nullcontext():
        assert select_transport(dist.group.WORLD, CPU, "auto").name == "shm"


@on_processes(2)
def test_processes_of_another_user_are_rejected(rank: int, world_size: int) -> None:
    another = patch.object(handshake, "_credentials", lambda peer: (os.getpid(), os.geteuid() + 1))
    with another, pytest.raises(ValueError, match="belongs to user"):
        _transport()


# -- what is left ------------------------------------------------------------------------------


def _own_socket_names() -> list[str]:
    """The names of the Unix sockets that this process has open, as the system lists them."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own is closed by now
            found = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{entry}"))
            inodes |= {found[1]} if found else set()
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [line[7] for line in lines if len(line) > 7 and line[6] in inodes]


def _die_all(rank: int, world_size: int, folder: Path) -> None:
    transport = _transport()
    buffers = transport.full_buffers([NUMEL * world_size], [torch.float32], CPU)
    buffers.allocate()
    transport.all_gather([torch.ones(NUMEL)], buffers.tensors)
    (folder / f"{rank}").write_text("\n".join(_own_socket_names()))
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_when_all_ranks_are_killed(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    outcomes = run_ranks(_die_all, 2, tmp_path, expect_failures=True)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * 2
    # Other programs' semaphores come and go.
    left = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    assert left <= before
    names = {name for file in tmp_path.iterdir() for name in file.read_text().split()}
    assert any(name.startswith("@shardwise-") for name in names), names
    listed = Path("/proc/net/unix").read_text()
    assert [name for name in names if name in listed] == []


def _survive(rank: int, world_size: int, how: str, folder: Path) -> str:
    transport = _transport()
    _gather(transport)
    if rank == world_size - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "killed, with a child":
            # As a data loader's worker does, it holds what its parent had open.
            if (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            (folder / "child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    with pytest.raises(PeerLostError) as caught:
        _gather(transport, name="blocks.3")
    return str(caught.value)


@pytest.mark.parametrize("how", ["killed", "killed, with a child", "left"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_dead_peer_is_named_at_once(tmp_path: Path, world_size: int, how: str) -> None:
    # Nobody waits for the timeout: that would be too late for the test.
    outcomes = run_ranks(_survive, world_size, how, tmp_path, pg_timeout=600, expect_failures=True)
    if how == "killed, with a child":
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # it was there all the time
    for rank, outcome in enumerate(outcomes[:-1]):
        assert outcome.ok, outcome.describe(world_size)
        message = outcome.result
        last = world_size - 1
        assert re.match(rf"rank {rank} lost (rank|ranks .*) ?{last} during", message), message
        assert "the all-gather of blocks.3" in message


@on_processes(2, pg_timeout=2)
def test_a_stalled_peer_is_named_after_the_timeout_of_the_group(rank: int, world_size: int) -> None:
    transport = _transport()
    _gather(transport)
    if rank == 1:
        time.sleep(4)
        return
    said = "rank 0 lost rank 1 during the all-gather of blocks.3: no answer in time"
    with pytest.raises(PeerLostError, match=said):
        _gather(transport, name="blocks.3")


@on_processes(3, pg_timeout=2)
def test_a_peer_that_waits_for_the_stalled_one_itself_is_not_named(
    rank: int, world_size: int
) -> None:
    """Rank 1 stalls; rank 0 waits for it, and rank 2, which is further ahead, for both."""
    transport = _transport()
    if rank == 1:
        time.sleep(4)
        return
    works = [
        transport.all_reduce([torch.ones(3)], Reduce.SUM, Label(f"blocks.{i}"))
        for i in range(1 + rank)
    ]
    with pytest.raises(PeerLostError, match=f"rank {rank} lost rank 1 during the all-reduce"):
        works[-1].wait()


@on_processes(2)
def test_divergence_is_reported_with_the_calls_of_both_ranks(rank: int, world_size: int) -> None:
    transport = _transport()
    _gather(transport)
    with pytest.raises(RanksDivergedError) as caught:
        _gather(transport, name=f"blocks.{rank}")
    for each in range(world_size):
        assert f"the all-gather of blocks.{each}" in str(caught.value)


# -- many ranks, many meshes -------------------------------------------------------------------


def _trains(rank: int, world_size: int, shape: tuple[int, ...]) -> list[str]:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    net, whole = seeded(Net), seeded(Net)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    for step in range(2):
        x = batches(world_size, step)
        check_backward(net, whole, x, rank)
    mesh_of = state_of(net).groups[0].mesh
    return [mesh_of.shard.name, mesh_of.replicate.name if mesh_of.replicate else "none"]


@pytest.mark.parametrize(
    ("world_size", "shape", "names"),
    [(8, (8,), ["shm", "none"]), (6, (2, 3), ["shm", "shm"]), (4, (4, 1), ["local", "shm"])],
)
def test_more_ranks_than_cores_and_parts_of_meshes(
    world_size: int, shape: tuple[int, ...], names: list[str]
) -> None:
    assert run_ranks(_trains, world_size, shape) == [names] * world_size


@on_processes(2)
def test_ranks_that_wait_sleep(rank: int, world_size: int) -> None:
    transport = _transport()
    _gather(transport)
    start = time.process_time()
    if rank == 1:
        time.sleep(2)
    _gather(transport, 10)
    assert rank or time.process_time() - start < 0.5


def test_a_small_dev_shm_does_not_matter() -> None:
    """The memory is in no file system with a limited size, such as the one at /dev/shm."""
    descriptor = Arena.create()
    try:
        assert os.readlink(f"/proc/self/fd/{descriptor}") == "/memfd:shardwise (deleted)"
    finally:
        os.close(descriptor)
