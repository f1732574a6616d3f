"""Peers of a process group: what is kept for the group, errors of lost peers, and waiting."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from shardwise.base.errors import PeerLostError, RanksDivergedError
from shardwise.transport import peers as peers_module
from shardwise.transport.peers import Loss, Pace, Peers, PeerWatch, connecting, polling

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Group:
    """A process group as far as :class:`Peers` looks at it."""

    def __init__(self, rank: int = 0, size: int = 4) -> None:
        self.rank = Mock(return_value=rank)
        self.size = Mock(return_value=size)


@pytest.fixture(autouse=True)
def _members(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks of the group are not those of the job.
    monkeypatch.setattr(
        dist, "get_process_group_ranks", lambda group: [10 + rank for rank in range(group.size())]
    )


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def peers(group: Group) -> Peers:
    return Peers(group)  # type: ignore[arg-type]


class Clock:
    """Time that passes only in waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> bool:
        self.now += seconds
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(peers_module, "time", clock)
    return clock


def _watch(
    peers: Peers,
    gone: Iterable[Sequence[int]] = (),
    *,
    looks: int = 1,
    timeout: float | None = None,
    compare: Callable[[], object] | None = None,
    give_up: Callable[[], object] | None = None,
    blame: Callable[[], Sequence[int]] | None = None,
    warning_seconds: float | None = None,
) -> PeerWatch:
    found = iter(gone)
    return PeerWatch(
        peers,
        "the test",
        Pace(1.0, 1.0, looks),
        find_gone=lambda ranks: list(next(found, ())),
        timeout=timeout,
        compare=compare,
        give_up=give_up,
        blame=blame,
        warning_seconds=warning_seconds,
    )


# -- what is kept for a process group ------------------------------------------------------------


def _a_list(peers: Peers) -> list[int]:
    return [peers.rank]


def _another_list(peers: Peers) -> list[int]:
    return []


def test_a_thing_is_made_once_for_a_group(group: Group, peers: Peers) -> None:
    first = peers.once(_a_list)
    assert first == [0]
    again = Peers(group).once(_a_list)  # type: ignore[arg-type]
    assert again is first
    assert peers.once(_another_list) is not first
    other = Group()
    assert Peers(other).once(_a_list) is not first  # type: ignore[arg-type]


def test_what_could_not_be_made_is_made_again(peers: Peers) -> None:
    made = Mock(side_effect=[ValueError("not yet"), "made"])
    with pytest.raises(ValueError, match="not yet"):
        peers.once(made)
    assert peers.once(made) == "made"


def test_what_is_kept_is_freed_with_the_group() -> None:
    group = Group()
    peers = Peers(group)  # type: ignore[arg-type]
    kept = weakref.ref(peers.once(lambda _: Mock()))
    del group
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="has been destroyed"):
        _ = peers.group


def test_peers_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "group", Mock(WORLD=None))
    with pytest.raises(RuntimeError, match="init_process_group"):
        Peers()


@pytest.mark.parametrize(
    ("config", "device", "name"),
    [
        ("cpu:gloo,cuda:nccl", CPU, "gloo"),
        ("cpu:gloo,cuda:nccl", CUDA, "nccl"),
        ("cpu:gloo,cuda:gloo", CUDA, "gloo"),
        ("mpi", CPU, "mpi"),
    ],
)
def test_of_several_backends_the_one_of_the_device_counts(
    monkeypatch: pytest.MonkeyPatch, peers: Peers, config: str, device: torch.device, name: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", Mock(return_value=config))
    assert peers.backend(device).name == name


# -- errors ---------------------------------------------------------------------------------------


def test_an_error_names_ranks_of_the_job_and_what_was_done(peers: Peers) -> None:
    message = str(peers.lost("the all-gather of 3 tensors", [3, 1]))
    assert "rank 10 lost ranks 11, 13 during the all-gather of 3 tensors" in message
    assert "closed the connection" in message
    assert "restart all ranks from the last checkpoint" in message


def test_an_error_says_if_the_backend_names_nobody(peers: Peers) -> None:
    message = str(peers.lost("it", how=Loss.SILENT, error=RuntimeError("Timed out")))
    assert "lost one of ranks 11, 12, 13 (the backend does not say which)" in message
    assert "no answer in time" in message
    assert "(The backend says: Timed out)" in message


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Connection reset by peer"), "closed the connection"),
        (RuntimeError("Timed out waiting 30000ms for recv"), "no answer in time"),
        (dist.DistNetworkError("something else"), "closed the connection"),
    ],
)
def test_backend_errors_that_mean_a_lost_peer_say_so(
    peers: Peers, error: RuntimeError, expected: str
) -> None:
    with pytest.raises(PeerLostError, match=expected) as caught, peers.collective("the sum"):
        raise error
    assert caught.value.__cause__ is error
    with pytest.raises(PeerLostError, match="rank 3 could not connect to"), connecting(3, 8):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Invalid scalar type"),
        ValueError("no connection between the two"),
        RanksDivergedError("ranks have diverged: a peer called something else"),
    ],
)
def test_other_errors_pass_through(peers: Peers, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, peers.collective("the sum"):
        raise error
    assert caught.value is error


# -- the watch ------------------------------------------------------------------------------------


def test_a_peer_is_lost_after_so_many_looks_in_a_row(peers: Peers, clock: Clock) -> None:
    watch = _watch(peers, [[2], [2], [], [2], [2], [2]], looks=3)
    with pytest.raises(PeerLostError, match="rank 10 lost rank 12 during the test"):
        watch.wait(clock.sleep, lambda: [1, 2])
    assert clock.now == pytest.approx(106)


def test_a_peer_that_is_not_waited_for_may_leave(peers: Peers, clock: Clock) -> None:
    ends = iter([False] * 5 + [True])
    watch = _watch(peers, [[3]] * 5)
    watch.wait(lambda seconds: clock.sleep(seconds) or next(ends), lambda: [1, 2])


def test_a_peer_that_did_its_part_just_before_it_left_is_not_lost(
    peers: Peers, clock: Clock
) -> None:
    missing = iter([[2], []])  # between them rank 2 posts and ends
    ends = iter([False, True])
    watch = _watch(peers, [[2]])
    watch.wait(lambda seconds: clock.sleep(seconds) or next(ends), lambda: next(missing))


def test_all_peers_that_are_gone_are_named(peers: Peers, clock: Clock) -> None:
    with pytest.raises(PeerLostError, match="lost ranks 11, 13 during"):
        _watch(peers, [[1, 3]]).wait(clock.sleep, lambda: [1])


def test_a_peer_that_does_not_come_in_time_is_named(peers: Peers, clock: Clock) -> None:
    with pytest.raises(PeerLostError, match="lost ranks 11, 12 during the test: no answer in time"):
        _watch(peers, timeout=30).wait(clock.sleep, lambda: [1, 2])
    assert 130 <= clock.now <= 132
    with pytest.raises(PeerLostError, match="lost rank 13 during"):
        _watch(peers, timeout=30, blame=lambda: [3]).wait(clock.sleep, lambda: [1, 2])


def test_ranks_that_wait_for_different_things_have_diverged(peers: Peers, clock: Clock) -> None:
    compare = Mock(side_effect=[None, RanksDivergedError("ranks have diverged")])
    give_up = Mock()
    with pytest.raises(RanksDivergedError):
        _watch(peers, compare=compare, give_up=give_up).wait(clock.sleep, lambda: [1])
    assert compare.call_count == 2
    assert clock.now == pytest.approx(106), "every three seconds"
    give_up.assert_called_once_with()


def test_a_peer_that_left_because_ranks_diverged_is_not_lost(peers: Peers, clock: Clock) -> None:
    compare = Mock(side_effect=RanksDivergedError("ranks have diverged"))
    with pytest.raises(RanksDivergedError):
        _watch(peers, [[1]], compare=compare).wait(clock.sleep, lambda: [1])


def test_the_rank_hangs_up_before_the_wait_ends(peers: Peers, clock: Clock) -> None:
    give_up = Mock()
    with pytest.raises(PeerLostError):
        _watch(peers, [[1]], give_up=give_up).wait(clock.sleep, lambda: [1])
    give_up.assert_called_once_with()


def test_a_long_wait_logs_one_warning(
    peers: Peers, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ends = iter([False] * 20 + [True])
    watch = _watch(peers, timeout=60, warning_seconds=10)
    with caplog.at_level(logging.WARNING, peers_module.__name__):
        watch.wait(lambda seconds: clock.sleep(seconds) or next(ends), lambda: [2])
    (record,) = caplog.records
    assert record.getMessage() == (
        "rank 10 has waited 11 s for ranks [12] in the test; it waits for 49 s more"
    )


def test_probes_become_rarer_in_a_long_wait(peers: Peers, clock: Clock) -> None:
    looks: list[float] = []
    watch = PeerWatch(
        peers,
        "the test",
        Pace(1.0, 5.0, looks=3),
        find_gone=lambda ranks: looks.append(clock.now) or [],  # type: ignore[func-returns-value]
        timeout=300,
    )
    with pytest.raises(PeerLostError, match="no answer in time"):
        watch.wait(clock.sleep, lambda: [1])
    assert looks[1] - looks[0] == pytest.approx(1)
    assert looks[-1] - looks[-2] == pytest.approx(5)


def test_polling_checks_first_and_often_at_first(clock: Clock) -> None:
    assert polling(lambda: True)(1.0)
    assert clock.now == 100
    sleep = polling(lambda: False)
    pauses = []
    for _ in range(6):
        before = clock.now
        assert not sleep(1.0)
        pauses.append(clock.now - before)
    assert pauses == pytest.approx([0.001, 0.002, 0.005, 0.01, 0.02, 0.02])
    assert not sleep(0.003)
    assert clock.now == pytest.approx(100 + sum(pauses) + 0.003)


# -- calls that block -----------------------------------------------------------------------------


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", Mock(return_value="cpu:gloo"))
    monkeypatch.setattr(Peers, "store", Mock(check=Mock(return_value=False)))
    monkeypatch.setattr(Peers, "timeout", 60.0)
    monkeypatch.setattr(Peers, "departed", lambda self, ranks: [2])


@pytest.mark.usefixtures("gloo")
def test_a_call_returns_what_its_function_returns_or_raises(peers: Peers) -> None:
    assert peers.call(lambda: 7, "the call") == 7
    with pytest.raises(KeyError):
        peers.call(lambda: {}["missing"], "the call")


@pytest.mark.usefixtures("gloo")
def test_a_call_that_breaks_names_the_peers_that_are_gone(peers: Peers) -> None:
    call = Mock(side_effect=RuntimeError("Connection closed by peer"))
    with pytest.raises(PeerLostError, match="lost rank 12 during the call"):
        peers.call(call, "the call")


@pytest.mark.usefixtures("gloo")
def test_what_a_peer_posts_is_checked_while_others_have_not(
    peers: Peers, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(rank: int, text: str) -> None:
        raise RanksDivergedError(f"rank {rank} posted {text}")

    posted = {"of rank 1": b"nonsense"}
    store = Mock(check=lambda keys: posted.keys() >= set(keys))
    store.multi_get = lambda keys: [posted[key] for key in keys]
    monkeypatch.setattr(Peers, "store", store)
    monkeypatch.setattr(Peers, "departed", lambda self, ranks: [])
    with pytest.raises(RanksDivergedError, match="rank 1 posted nonsense"):
        peers.read({1: "of rank 1", 2: "of rank 2"}, "the meeting", check)
