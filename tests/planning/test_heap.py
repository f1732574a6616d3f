"""What glibc's heap takes for the memory of a step."""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys

import pytest

from shardwise.base.observe import Memory
from shardwise.insight.planning.events import Change, Log, Op, StepPhase, StorageRegion
from shardwise.insight.planning.heap import Heap, process_bytes, shared_bytes

MIB = 2**20


def test_a_heap_grows_by_what_is_allocated_and_keeps_what_is_freed() -> None:
    heap = Heap()
    held = [heap.allocate(10 * MIB) for _ in range(3)]
    assert 30 * MIB < heap.nbytes < 31 * MIB
    for address in held:
        heap.free(address)
    heap.allocate(30 * MIB)
    assert heap.nbytes < 31 * MIB, "the three have become one"


def test_only_a_smaller_tensor_fits_where_one_was_freed() -> None:
    heap = Heap()
    first, _ = heap.allocate_aligned(MIB), heap.allocate_aligned(MIB)
    heap.free(first)
    assert heap.allocate_aligned(MIB) > first, "it would need room to move to an aligned address"
    assert heap.allocate_aligned(MIB - 256) <= first + 64


def test_a_small_object_keeps_free_memory_apart() -> None:
    heap = Heap()
    first, small, second = heap.allocate(MIB), heap.allocate(2000), heap.allocate(MIB)
    heap.allocate(2000)
    heap.free(first)
    heap.free(second)
    assert heap.allocate(3 * MIB // 2) > second
    heap.free(small)
    assert heap.allocate(3 * MIB // 2) == first


def test_of_large_chunks_of_one_size_the_last_freed_is_taken() -> None:
    heap = Heap()
    held = [(heap.allocate(MIB), heap.allocate(2000))[0] for _ in range(3)]
    for at in (1, 0, 2):
        heap.free(held[at])
    assert [heap.allocate(MIB) for _ in range(3)] == [held[2], held[0], held[1]]


def test_a_large_tensor_is_mapped_apart_unless_it_fits_into_the_heap() -> None:
    heap = Heap()
    large = heap.allocate_aligned(40 * MIB)
    assert (heap.nbytes, heap.mapped // MIB) == (0, 40)
    heap.free(large)
    assert heap.mapped == 0
    for address in [heap.allocate(30 * MIB) for _ in range(2)]:
        heap.free(address)
    heap.allocate_aligned(40 * MIB)
    assert heap.mapped == 0


def _program(count: int) -> list[tuple[str, int, int]]:
    """Random requests: what to do, the number of the chunk, and its size."""
    draw = random.Random(0)
    program: list[tuple[str, int, int]] = []
    held: list[int] = []
    for number in range(count):
        if len(held) > 200 or (held and draw.random() < 0.4):
            at = draw.randrange(len(held)) if draw.random() < 0.3 else -1
            program.append(("free", held.pop(at), 0))
        elif draw.random() < 0.6:
            program.append(("small", number, draw.choice((16, 24, 96, 176, 312))))
            held.append(number)
        else:
            program.append(("tensor", number, draw.choice((2**18, 2**19, MIB, 3 * MIB // 2))))
            held.append(number)
    return program


_REAL = """
import ctypes, json, sys
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.aligned_alloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.aligned_alloc.argtypes = [ctypes.c_size_t], [ctypes.c_size_t] * 2
libc.free.argtypes, libc.sbrk.argtypes = [ctypes.c_void_p], [ctypes.c_ssize_t]
program = json.load(sys.stdin)
libc.mallopt(-3, 32 * 2**20), libc.mallopt(-1, 2**31 - 1)
held, before = {}, libc.sbrk(0)
for what, number, nbytes in program:
    if what == "free":
        libc.free(held.pop(number))
    else:
        held[number] = libc.malloc(nbytes) if what == "small" else libc.aligned_alloc(64, nbytes)
print(libc.sbrk(0) - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_heap_grows_as_that_of_the_c_library() -> None:
    program = _program(4000)
    heap, held = Heap(), {}
    for what, number, nbytes in program:
        if what == "free":
            heap.free(held.pop(number))
        else:
            allocate = heap.allocate if what == "small" else heap.allocate_aligned
            held[number] = allocate(nbytes)
    done = subprocess.run(
        [sys.executable, "-c", _REAL],
        input=json.dumps(program),
        capture_output=True,
        text=True,
        check=True,
    )
    assert heap.nbytes == pytest.approx(int(done.stdout), rel=0.1)


def _log(storages: tuple[Change, ...], *events: Change | Op) -> Log:
    return Log(rank=0, before={}, events=events, tokens=1, flops=0, storages=storages)


def _op(phase: StepPhase) -> Op:
    return Op("aten.mm.default", "", phase, 0, 0, (), "float32", runtime=False)


def _tensor(
    number: int, nbytes: int, moment: str = "", place: StorageRegion = StorageRegion.OWN
) -> Change:
    return Change(Memory.OTHER, nbytes, "", moment, number, place)


def test_a_log_needs_its_tensors_and_shared_memory_counts_apart() -> None:
    storages = (
        Change(Memory.PARAMETERS, 8 * MIB, "", "", 1),
        Change(Memory.OPTIMIZER, 16 * MIB, "", "", 2),
        _tensor(3, 64 * MIB, place=StorageRegion.SHARED),
    )
    log = _log(storages, _tensor(4, 4 * MIB), _tensor(4, -4 * MIB), _op(StepPhase.OPTIMIZER))
    optimizes = _tensor(5, MIB, "optimizer"), _tensor(5, -MIB, "optimizer")
    log = _log(storages, *log.events, *optimizes)
    assert 28 * MIB < process_bytes(log) < 56 * MIB
    assert shared_bytes(log) == 64 * MIB


def test_every_thread_of_a_backend_keeps_its_largest_tensor() -> None:
    copies = [
        _tensor(nbytes, sign * nbytes, place=StorageRegion.THREADS)
        for nbytes in (2 * MIB, 6 * MIB, 40 * MIB)
        for sign in (1, -1)
    ]
    own = _tensor(1, 4 * MIB)
    alone = process_bytes(_log((own,), own))
    assert process_bytes(_log((own,), *copies, own)) - alone == 2 * 6 * MIB


def test_what_autograd_notes_is_forgotten_after_backward() -> None:
    forward = [_op(StepPhase.FORWARD)] * 10_000
    note = _tensor(1, 1), _tensor(1, -1)
    once = process_bytes(_log((), *forward, _op(StepPhase.OPTIMIZER), *note))
    twice = [*forward, _op(StepPhase.BACKWARD)] * 2
    again = process_bytes(_log((), *twice, _op(StepPhase.OPTIMIZER), *note))
    assert 5 * MIB < once < 15 * MIB
    assert again < 1.2 * once
