"""Agreement: ranks answer each other, fail together, and name who failed; without processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.base.errors import PeerLostError, lost_peer_behind
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.ranks import agreement
from shardwise.checkpoint.ranks.agreement import Ranks, group_for


class Threads(Ranks):
    """Ranks that are threads; what they send goes through queues."""

    def __init__(self, rank: int, size: int, queues: dict[tuple[int, int], Any]) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size
        self.names = [10 + each for each in range(size)]  # ranks of the job, not of the group
        self._queues = queues

    def _call(self, call: Callable[[], object], peers: Any) -> None:
        call()

    def _send(self, what: Any, peer: int) -> None:
        self._queues[self.rank, peer].put(what)

    def _receive(self, peer: int) -> Any:
        return self._queues[peer, self.rank].get(timeout=10)


def _run(size: int, part: Callable[[Ranks], Any]) -> list[Any]:
    """Run something on every rank; each one's result, or what it raised."""
    queues = {(a, b): queue.Queue[Any]() for a in range(size) for b in range(size)}
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = part(Threads(rank, size, queues))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_the_first_rank_answers_each_from_the_results_of_all() -> None:
    def part(ranks: Ranks) -> Any:
        return ranks.together(
            "adding", lambda: ranks.rank + 1, lambda parts: [sum(parts) * x for x in parts]
        )

    assert _run(3, part) == [6, 12, 18]


def test_all_return_their_own_and_first_the_first_ranks_result() -> None:
    assert _run(3, lambda ranks: ranks.all("x", lambda: ranks.rank)) == [0, 1, 2]
    assert _run(3, lambda ranks: ranks.first("x", lambda: ranks.rank)) == [0, 0, 0]


@pytest.mark.parametrize("failing", [(0,), (2,), (1, 2)])
def test_if_a_rank_fails_all_raise_the_same_and_no_answer_is_made(failing: tuple[int, ...]) -> None:
    answered: list[Any] = []

    def part(ranks: Ranks) -> None:
        def work() -> None:
            if ranks.rank in failing:
                raise OSError(28, "No space left on device", f"shard-{ranks.rank}")

        ranks.together("saving x", work, lambda parts: answered.append(parts) or parts)

    errors = _run(3, part)
    first = min(failing)
    message = f"saving x: rank {10 + first}: shard-{first}: No space left on device"
    assert [str(error) for error in errors] == [message] * 3
    assert all(type(error) is CheckpointError for error in errors)
    assert answered == []


def test_a_failing_answer_is_of_the_first_rank() -> None:
    def part(ranks: Ranks) -> None:
        ranks.together("saving x", lambda: None, lambda parts: [1 // 0 for _ in parts])

    errors = _run(2, part)
    message = "saving x: rank 10: ZeroDivisionError: integer division or modulo by zero"
    assert [str(error) for error in errors] == [message] * 2


def test_a_failure_counts_before_a_loss_that_it_may_have_caused() -> None:
    def part(ranks: Ranks) -> None:
        def work() -> None:
            if ranks.rank == 0:
                raise PeerLostError("lost rank 11")
            raise CheckpointError("is damaged")

        ranks.all("loading x", work)

    assert {str(error) for error in _run(2, part)} == {"loading x: rank 11: is damaged"}


def test_a_loss_is_the_cause_on_every_rank() -> None:
    def part(ranks: Ranks) -> None:
        def work() -> None:
            if ranks.rank == 1:
                raise CheckpointError("x") from PeerLostError("lost rank 17")

        ranks.all("loading x", work)

    for error in _run(2, part):
        assert isinstance(error, CheckpointError)
        assert lost_peer_behind(error) is not None, "a launcher can go on with the ranks left"


@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_rank_that_is_interrupted_tells_the_others(interrupted: int) -> None:
    def part(ranks: Ranks) -> Any:
        def work() -> int:
            if ranks.rank == interrupted:
                raise KeyboardInterrupt
            return 1

        try:
            return ranks.all("saving", work)
        finally:
            assert ranks.all("again", lambda: True)

    results = _run(3, part)
    for rank, found in enumerate(results):
        if rank == interrupted:
            assert isinstance(found, KeyboardInterrupt)
        else:
            assert str(found) == f"saving: rank {10 + interrupted}: KeyboardInterrupt"


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_rank_that_cannot_begin_raises_what_is_wrong(wrong: int) -> None:
    def part(ranks: Ranks) -> Any:
        return ranks.begin("load", lambda: 1 // (ranks.rank != wrong))

    for rank, found in enumerate(_run(3, part)):
        if rank == wrong:
            assert isinstance(found, ZeroDivisionError)
        else:
            assert isinstance(found, CheckpointError)
            assert f"load: rank {10 + wrong}: ZeroDivisionError" in str(found)


def test_a_process_alone_agrees_with_itself() -> None:
    ranks = Ranks(group_for(None))
    assert (ranks.rank, ranks.size, ranks.coordinates) == (0, 1, True)
    assert ranks.all("x", lambda: 7) == 7
    with pytest.raises(CheckpointError, match=r"^x: rank 0: KeyError: 'k'$") as caught:
        ranks.first("x", lambda: {}["k"])
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CheckpointError("is damaged"), "is damaged"),
        (OSError(2, "No such file", "a"), "a: No such file"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (ValueError("keep_last"), "ValueError: keep_last"),
    ],
)
def test_a_reason_says_what_was_raised(error: Exception, reason: str) -> None:
    assert agreement._reason(error) == reason
