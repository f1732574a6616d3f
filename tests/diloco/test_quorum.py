"""Replicas that are independent of each other, with real models and connections.

In most tests each replica is a thread, since a replica has no process group to begin with.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard
from shardwise.base.errors import PeerLostError, RanksDivergedError
from shardwise.diloco import DiLoCo, OuterSGD, Quorum, QuorumServer, Streaming, WireFormat
from shardwise.diloco.coordinator import Event, EventKind
from shardwise.diloco.membership import ReplicaSession
from shardwise.transport.peers import Peers
from tests.harness import run_ranks

pytestmark = pytest.mark.usefixtures("new_ranks")

PLAIN = OuterSGD(lr=1.0, momentum=0.0)  # the outer parameters become the average
LONG, SHORT = 60.0, 0.2  # deadlines: never reached, and reached soon


class Replica:
    """One parameter vector of three elements, trained by SGD with a rate of 1."""

    def __init__(
        self,
        server: QuorumServer,
        number: int,
        *,
        start: float = 0.0,
        every: int = 1,
        outer: OuterSGD = PLAIN,
        token: str = "token",
    ) -> None:
        self.model = nn.Linear(3, 1, bias=False)
        nn.init.constant_(self.model.weight, start)
        where = f"127.0.0.1:{server.port}"
        quorum = Quorum(server=where, replica=number, token=token, timeout=30.0)
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = DiLoCo(self.model, inner, every=every, group=quorum, outer=outer)

    @property
    def membership(self) -> ReplicaSession:
        assert self.optimizer._rounds is not None
        return self.optimizer._rounds.quorum

    @property
    def value(self) -> float:
        first, *rest = self.model.weight.flatten().tolist()
        assert all(each == first for each in rest)
        return float(first)

    def step(self, moved: float, tokens: int | None = None) -> float:
        """Move every element by so much; return where it is after the step."""
        if tokens is not None:
            self.optimizer.count_tokens(tokens)
        self.model.weight.grad = torch.full_like(self.model.weight, -moved)
        self.optimizer.step()
        return self.value

    def die(self) -> None:
        """End all connections, as the kernel does for a process that was killed."""
        self.membership._report = None  # it says nothing before
        self.membership.close()


class _KilledError(Exception):
    """A replica ends here."""


class Trial:
    """A server, and threads for replicas."""

    def __init__(self, server: QuorumServer, events: list[Event], pool: ThreadPoolExecutor) -> None:
        self.server = server
        self.events = events
        self._pool = pool
        self._held = contextlib.ExitStack()

    def replica(self, number: int, **settings: Any) -> Replica:
        """Make a replica, which is closed at the end."""
        made = Replica(self.server, number, **settings)
        self._held.callback(made.optimizer.leave)
        return made

    def close(self) -> None:
        """Close all replicas."""
        self._held.close()

    def together(self, *functions: Callable[[], object]) -> list[object]:
        """Call functions at the same time, each in a thread; return what they return."""
        futures: list[Future[object]] = [self._pool.submit(each) for each in functions]
        return [each.result(60) for each in futures]

    def join(self, *replicas: Replica) -> None:
        self.together(*(each.optimizer.join for each in replicas))

    def joined(self, count: int) -> list[Replica]:
        """Make replicas that have joined."""
        made = [self.replica(number) for number in range(count)]
        self.join(*made)
        return made

    @property
    def members(self) -> list[list[int]]:
        """The members of each round."""
        found = [event.attempt for event in self.events if event.kind is EventKind.ROUND]
        return [sorted(attempt.members) for attempt in found if attempt is not None]


@contextmanager
def trial(replicas: int, deadline: float = LONG) -> Iterator[Trial]:
    events: list[Event] = []
    server = QuorumServer(replicas, deadline=deadline, token="token", report=events.append)
    with server, ThreadPoolExecutor(8) as pool:
        world = Trial(server, events, pool)
        try:
            yield world
        finally:
            world.close()


def test_contributions_count_by_their_tokens() -> None:
    with trial(2) as world:
        a, b = world.joined(2)
        found = world.together(lambda: a.step(1.0, 300), lambda: b.step(5.0, 100))
        assert found == [2.0, 2.0]  # (300 x 1 + 100 x 5) / 400


def test_the_others_come_after_their_step_when_one_is_ready() -> None:
    with trial(2) as world:
        a, b = world.replica(0, every=2), world.replica(1, every=100)
        with pytest.raises(RanksDivergedError, match=r"every=100.*every=2"):
            world.join(a, b)
        b.optimizer.leave()
        b = world.replica(1, every=2)
        world.join(b)

        def slow() -> float:
            while not b.optimizer.rounds[0]:
                b.step(1.0)
            return b.value

        a.step(2.0)
        assert world.together(lambda: a.step(2.0), slow)[0] == b.value
        assert world.members == [[0, 1]]


def test_a_late_replica_keeps_what_it_has_done() -> None:
    with trial(2, SHORT) as world:
        a, b = world.joined(2)
        assert a.step(10.0) == 10.0  # without the other one
        # It takes over what the first has done, moves on by its own step, and contributes that.
        b.step(4.0)
        assert b.optimizer.rounds == (1,)
        assert b.value == 14.0
        found = world.together(lambda: a.step(2.0), lambda: b.step(4.0))
        # Two steps of the second and one of the first: (2 x 8 + 1 x 2) / 3
        assert found == [16.0, 16.0]
        assert world.members == [[0], [0, 1]]


def test_a_replica_that_is_killed_in_the_exchange_does_not_stop_the_others() -> None:
    with trial(3) as world:
        a, b, killed = world.joined(3)

        def die(*_: object) -> None:
            killed.die()
            raise _KilledError

        killed.membership.average = die  # type: ignore[method-assign,assignment]

        def last_step() -> None:
            with pytest.raises(_KilledError):
                killed.step(100.0)

        world.together(lambda: a.step(1.0), lambda: b.step(3.0), last_step)
        assert a.value == b.value == 2.0
        assert world.members == [[0, 1]]


def test_one_that_returns_has_the_outer_state_of_the_others() -> None:
    heavy = OuterSGD(lr=0.5, momentum=0.5)
    with trial(1) as world:
        a = world.replica(0, outer=heavy)
        a.step(1.0)
        b = world.replica(1, start=7.0, outer=heavy)
        b.optimizer.join()
        assert b.value == a.value
        found = world.together(lambda: a.step(1.0), lambda: b.step(1.0))
        assert found[0] == found[1]  # with the same momentum
        assert a.optimizer.rounds == b.optimizer.rounds == (2,)


def test_one_that_leaves_while_the_server_looks_is_not_taken_for_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with trial(1) as world:
        a = world.replica(0)
        world.join(a)
        store, looks = world.server._registry.store, []

        def after(look: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
            def looked(*words: str) -> dict[str, Any]:
                found = look(*words)
                if not looks:
                    looks.append(look)
                    a.optimizer.leave()
                    while store.clients():
                        time.sleep(0.01)
                return found

            return looked

        monkeypatch.setattr(store, "silence", after(store.silence))
        monkeypatch.setattr(store, "values", after(store.values))
        while len(world.events) < 2:
            time.sleep(0.01)
    assert [event.kind for event in world.events] == [EventKind.JOINED, EventKind.LEFT]


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_replica_trains_on_while_the_server_is_away_and_finds_it_again(rounds: int) -> None:
    with trial(1) as world:
        a = Replica(world.server, 0)
        for _ in range(rounds):
            a.step(1.0)
        port = world.server.port
    a.membership._note_lost(ConnectionError("gone"))
    assert a.step(1.0) == rounds + 1
    assert a.optimizer.rounds == (rounds,)
    with QuorumServer(1, deadline=LONG, port=port, token="token"), ThreadPoolExecutor(1) as pool:
        try:
            while a.optimizer.rounds == (rounds,):
                pool.submit(a.step, 1.0).result(30)
        finally:
            a.membership._lost_at = -LONG  # ends a step that hangs
            a.optimizer.leave()
    assert a.optimizer.rounds == (rounds + 1,)


def test_a_replica_that_loses_the_server_in_an_exchange_trains_on() -> None:
    with trial(2) as world:
        a, b = world.joined(2)
        world.together(lambda: a.step(2.0), lambda: b.step(2.0))  # now they are connected
        begun, over = threading.Event(), threading.Event()

        def stall(*_: object) -> None:
            begun.set()
            over.wait(60)

        b.membership.average = stall  # type: ignore[method-assign]

        def lose_server() -> None:
            begun.wait(60)
            world.server.close()

        def step() -> float:
            try:
                return a.step(1.0)
            finally:
                over.set()

        assert world.together(step, lambda: b.step(3.0), lose_server) == [3.0, 5.0, None]
        assert a.optimizer.rounds == b.optimizer.rounds == (1,)


def test_a_server_that_stays_away_is_an_error() -> None:
    with trial(1) as world:
        a = Replica(world.server, 0)
        a.step(1.0)
    a.membership.timeout = 0.0
    a.membership._note_lost(ConnectionError("gone"))
    time.sleep(0.01)
    a.membership._note_lost(ConnectionError("gone"))
    text = r"lost the quorum at 127\.0\.0\.1:\d+ for 0 s: .*(gone|refused)"
    with pytest.raises(PeerLostError, match=text):
        a.step(1.0)
    a.optimizer.leave()


def test_a_thread_that_fails_is_an_error_and_no_hang() -> None:
    with trial(2) as world:
        a, _ = world.joined(2)

        def fail(plan: object) -> None:
            raise MemoryError("none is left")

        a.membership._serve = fail  # type: ignore[method-assign,assignment]
        with pytest.raises(PeerLostError, match=r"lost the quorum at .*: MemoryError"):
            a.step(1.0)


def test_time_for_which_a_replica_was_suspended_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with trial(1, SHORT) as world:
        a = Replica(world.server, 0)
        a.step(1.0)
    a.membership._note_lost(ConnectionError("gone"))
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600.0)
    a.step(1.0)
    assert a.step(1.0) == 3.0
    a.optimizer.leave()


def test_a_server_that_was_suspended_waits_for_those_who_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with trial(2) as world:
        a, b = world.joined(2)
        clock, plans = time.monotonic, world.server._coordinator

        def step_late() -> float:
            while not plans.plan.called:
                time.sleep(0.01)
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600.0)
            time.sleep(0.1)  # for several looks
            return b.step(4.0)

        assert world.together(lambda: a.step(2.0), step_late) == [3.0, 3.0]


def test_arguments_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with trial(1) as world:
        where = f"127.0.0.1:{world.server.port}"
        quorum = Quorum(server=where, replica=0, token="token")
        with pytest.raises(ValueError, match="expected one fragment without overlap"):
            DiLoCo(model, inner, every=4, group=quorum, streaming=Streaming(overlap=2))
        assert not world.server._registry.store.clients(), "it has not even connected"
        optimizer = DiLoCo(model, inner, every=4, group=quorum)
        with pytest.raises(ValueError, match="none that could change"):
            optimizer.change_group(None)
        optimizer.leave()
        with pytest.raises(ValueError, match="replica: found -1"):
            ReplicaSession(replace(quorum, replica=-1))
        with pytest.raises(ValueError, match=r"expected ADDRESS:PORT"):
            ReplicaSession(replace(quorum, server="nowhere"))
    with pytest.raises(ConnectionRefusedError) as caught:
        ReplicaSession(quorum)
    assert caught.value.__notes__ == [f"replica 0 looked for the quorum at {where}"]
    with pytest.raises(ValueError, match="deadline: found 0"):
        QuorumServer(1, deadline=0)
    with pytest.raises(ValueError, match="replicas: found 0"):
        QuorumServer(0, deadline=1)


def _lose_one_rank(rank: int, world_size: int) -> str:
    server = QuorumServer(1, deadline=LONG) if rank == 0 else None
    told = [server.port if server is not None else 0]
    dist.broadcast_object_list(told, src=0)
    model = nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    quorum = Quorum(server=f"127.0.0.1:{told[0]}", replica=0, timeout=1.0)
    optimizer = DiLoCo(model, inner, every=1, group=quorum)
    assert optimizer._rounds is not None
    membership = optimizer._rounds.quorum

    def refuse() -> None:
        raise ConnectionError("cut off")

    def step() -> None:
        model(torch.ones(3)).sum().backward()
        optimizer.step()

    step()
    if rank == 1:
        membership._connect = refuse  # type: ignore[method-assign]
        membership._note_lost(ConnectionError("cut off"))
    try:
        while True:
            step()
    except PeerLostError as error:
        Peers().hang_up()  # as the end of its process does
        return str(error)
    finally:
        optimizer.leave()
        if server is not None:
            server.close()


def test_a_replica_of_which_one_rank_loses_the_server_ends_with_a_word() -> None:
    assert "replica 0 has lost the quorum" in run_ranks(_lose_one_rank, 2, timeout=15)[1]


def _train(rank: int, world_size: int, wire: WireFormat, independent: bool) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    replica = rank // 2
    server = QuorumServer(2, deadline=LONG) if rank == 0 and independent else None
    told = [server.port if server is not None else 0]
    dist.broadcast_object_list(told, src=0)
    quorum = (
        Quorum(server=f"127.0.0.1:{told[0]}", replica=replica, group=mesh.get_group("shard"))
        if told[0]
        else None
    )
    group = mesh["replicate"] if quorum is None else quorum
    optimizer = DiLoCo(model, inner, every=3, group=group, wire=wire)
    data = torch.Generator().manual_seed(replica)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=data)).square().mean().backward()
        optimizer.step()
        dist.barrier()  # so that nobody is called before it has made its three steps
    assert optimizer.rounds == (2,)
    optimizer.leave()
    dist.barrier()
    if server is not None:
        server.close()
    return [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wire", [WireFormat.FP32, pytest.param(WireFormat.TERNARY, marks=pytest.mark.long)]
)
def test_sharded_replicas_compute_what_they_do_in_one_world(wire: WireFormat) -> None:
    apart = run_ranks(_train, 4, wire, True, timeout=15)
    together = run_ranks(_train, 4, wire, False)
    for mine, theirs in zip(apart, together, strict=True):
        for left, right in zip(mine, theirs, strict=True):
            assert torch.equal(left, right)
