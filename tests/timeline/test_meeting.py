"""Ranks come together in a store, and need not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shardwise.timeline.meeting import Meeting, Turns, waiting_for
from shardwise.transport.peers import Peers


def _no_patience(decided: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
    pass


def _meeting(store: Any, rank: int, size: int = 3) -> Meeting:
    return Meeting(store, "here", rank, range(size))


def test_all_that_are_invited_hear_each_other() -> None:
    store, found, over = dist.HashStore(), dict[int, Mapping[int, str]](), threading.Event()

    def wait(decided: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        while not decided():
            assert not over.wait(0.001), "the test is over"

    def come(rank: int) -> None:
        found[rank] = _meeting(store, rank).meet(f"from {rank}", wait)

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    over.set()
    assert found == {rank: {0: "from 0", 1: "from 1", 2: "from 2"} for rank in range(3)}


def test_the_first_whose_patience_is_over_decides_for_all() -> None:
    store = dist.HashStore()
    _meeting(store, 2).come("here I am")
    assert _meeting(store, 0).meet("hello", _no_patience) == {0: "hello", 2: "here I am"}
    late = _meeting(store, 1).meet("am I late?", _no_patience)
    assert late == {0: "hello", 2: "here I am"}, "it hears who goes on without it"


def test_a_wait_is_told_who_is_missing() -> None:
    store, told = dist.HashStore(), list[list[int]]()

    def wait(decided: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        told.append(list(missing()))
        _meeting(store, 0).come("")
        told.append(list(missing()))
        assert not decided()
        _meeting(store, 1).come("")
        assert decided()

    assert _meeting(store, 2).meet("", wait).keys() == {0, 1, 2}
    assert told == [[0, 1], [1]]


def _record(turns: Turns, store: Any, rank: int) -> Sequence[int]:
    """Come to the next recording of two ranks; return who takes part, without waiting."""
    part = list(turns.take(store, rank, range(2)).meet("", _no_patience))
    turns.late = rank not in part
    return part


def test_a_rank_that_left_out_a_recording_finds_the_others_again() -> None:
    store, complete, lagging = dist.HashStore(), Turns(), Turns()
    assert _record(complete, store, 0) == [0]
    assert _record(lagging, store, 1) == [0], "it comes to the recording that it left out"
    assert _record(complete, store, 0) == [0]
    assert _record(lagging, store, 1) == [1], "it waits where the others will come next"
    assert lagging.number == complete.number + 1
    assert _record(complete, store, 0) == [1]
    together = [
        turns.take(store, rank, range(2)).name for rank, turns in enumerate((complete, lagging))
    ]
    assert together[0] == together[1]


def _wait_for_nobody(rank: int, world_size: int) -> Mapping[int, str]:
    if rank > 0:
        dist.barrier()
        return {}
    peers = Peers()
    place = Meeting(peers.store, "here", rank, range(world_size))
    found = place.meet("alone", waiting_for(peers, "a test", 0.2))
    dist.barrier()  # works: the other rank waits in its own barrier, undisturbed
    return found


def test_a_wait_in_the_store_ends_and_disturbs_no_collective(
    ranks: Callable[..., list[Any]],
) -> None:
    assert ranks(_wait_for_nobody, 2) == [{0: "alone"}, {}]
