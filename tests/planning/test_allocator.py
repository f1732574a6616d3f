"""What a caching allocator reserves, by the rules that torch documents."""

from __future__ import annotations

import random

import pytest

from shardwise.base.observe import Memory
from shardwise.insight.planning.events import Change, Log
from shardwise.insight.planning.memory import CachingAllocator, reserved

MIB = 2**20


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_a_segment_is_larger_than_the_tensor_it_is_made_for(nbytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert allocator.reserved == segment


def test_tensors_share_a_segment_and_reuse_what_is_freed() -> None:
    allocator = CachingAllocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for part in parts:
        allocator.free(part)
    allocator.allocate(20 * MIB)  # the four are one again
    assert allocator.reserved == 20 * MIB


def test_a_hole_that_is_too_small_is_of_no_use() -> None:
    allocator = CachingAllocator()
    first, _ = allocator.allocate(12 * MIB), allocator.allocate(12 * MIB)
    allocator.free(first)
    allocator.allocate(14 * MIB)
    assert allocator.reserved == (12 + 12 + 14) * MIB


def test_the_smallest_part_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(12 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(12 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 52 * MIB


def test_random_tensors_never_overlap_and_all_memory_comes_back() -> None:
    draw = random.Random(0)
    allocator, held, most, now = CachingAllocator(), [], 0, 0
    for _ in range(3000):
        if held and draw.random() < 0.5:
            part = held.pop(draw.randrange(len(held)))
            now -= part.nbytes
            allocator.free(part)
        else:
            part = allocator.allocate(draw.choice((700, 3000, 2 * MIB, 9 * MIB, 33 * MIB)))
            now += part.nbytes
            held.append(part)
        most = max(most, now)
    assert allocator.reserved >= most
    for part in held:
        allocator.free(part)
    assert sum(part.nbytes for part in allocator._free) == allocator.reserved


def test_a_log_reserves_at_least_what_it_holds_and_steps_reuse_it() -> None:
    changes = [
        Change(Memory.ACTIVATIONS, 30 * MIB, "a", ""),
        Change(Memory.OTHER, 50 * MIB, "b", ""),
        Change(Memory.OTHER, -50 * MIB, "b", ""),
        Change(Memory.ACTIVATIONS, -30 * MIB, "a", ""),
    ]
    before = {Memory.PARAMETERS: 100 * MIB, Memory.OPTIMIZER: 40 * MIB}
    log = Log(rank=0, before=before, events=tuple(changes), tokens=1, flops=0)
    # The states take the 50 MiB that the first step has left, so the second needs them again.
    assert reserved(log) == (100 + 30 + 50 + 50) * MIB
