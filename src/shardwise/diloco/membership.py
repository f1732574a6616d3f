"""A replica's end of the quorum: its connection, its part in plans, and groups across worlds.

Every rank has a connection and a thread that reads the plan. The first rank of a replica decides
for all of them, and alone reports. What waits for other replicas runs in a thread that is left
behind when the plan changes, so that no replica ever waits for one that the others have given up.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwise._torch import c10d
from shardwise.base.arguments import check_arguments, check_seconds
from shardwise.base.errors import PeerLostError, RanksDivergedError
from shardwise.base.repeated import Repeated
from shardwise.diloco.coordinator import (
    NUMBERS_PER_SERVER,
    Attempt,
    Fetch,
    ReplicaReport,
    RoundPlan,
    State,
    client_name,
)
from shardwise.diloco.quorum_server import COMMIT, MEETING
from shardwise.elastic.clock import process_clock
from shardwise.elastic.network import address_towards, format_endpoint, parse_endpoint
from shardwise.elastic.registry import RegistryClient
from shardwise.elastic.store import GuardedStore
from shardwise.transport.peers import Job, Peers

T = TypeVar("T")

TIMEOUT = 600.0  # seconds
_POLL = 0.1  # seconds between two looks at the plan while training
_EAGER_POLL = 0.01  # while this replica waits for others
_RETRY = 0.5  # seconds between attempts to connect again
_LEAST_ANSWER = 5.0  # seconds that the server may take to answer, at least

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """Replicas that are independent worlds, which come and go on their own.

    Pass one to :class:`~shardwise.diloco.DiLoCo` in place of a group, on every rank of the replica.
    The replicas have no process group in common: each has a default process group over its ranks
    alone, or none if it is a single process, and is started, stopped and restarted by itself. They
    meet at a :class:`~shardwise.diloco.QuorumServer`.

    Attributes:
        server: address and port of the server, such as ``"10.0.0.1:29400"``.
        replica: number of this replica, from 0; no two that run have the same.
        group: the ranks of this replica, in the order of its shards; ``None``: all of the default
            process group. If they are several, it needs a backend for tensors on the CPU.
        token: that of the server.
        timeout: seconds that an exchange may take, and that the server may be out of reach.
    """

    server: str
    replica: int
    group: dist.ProcessGroup | None = None
    token: str = ""
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        check_arguments(type(self), vars(self))
        check_seconds("timeout", self.timeout)


class Wish(enum.IntEnum):
    """What the plan asks of a replica between two steps."""

    NOTHING = 0
    MEET = 1  # others wait for the exchange of this round
    FETCH = 2  # the others are further


class ReplicaSession:
    """A rank's part in a quorum.

    Args:
        quorum: where the replicas meet, and which one this is.

    Attributes:
        snapshot: returns the number of outer steps, and copies of what this rank has of the outer
            state, for replicas that catch up; fp32, 1-D, on the CPU. Called in other threads.

    Raises:
        ValueError: the quorum makes no sense.
        OSError: the server cannot be reached.
        StoreRefusedError: it has another token.
    """

    def __init__(self, quorum: Quorum) -> None:
        replica, timeout = quorum.replica, quorum.timeout
        if replica < 0:
            raise ValueError(f"replica: found {replica}, expected 0 or more")
        self.replica = replica
        self.timeout = timeout
        endpoint = parse_endpoint(quorum.server)
        if endpoint is None:
            raise ValueError(f"server: found {quorum.server!r}, expected ADDRESS:PORT")
        self._address, self._port = endpoint
        self._server = format_endpoint(*endpoint)
        self._token = quorum.token.encode()
        self._own = Peers(quorum.group) if dist.is_initialized() else None
        self.rank = 0 if self._own is None else self._own.rank
        self.incarnation = self._say(uuid.uuid4().hex)
        self._report: ReplicaReport | None = None
        self._client: RegistryClient[ReplicaReport, RoundPlan] | None = None
        self._plan = RoundPlan(-1, 0.0)
        self._decided_by = 0  # the number of the plan by which the first rank has decided last
        self._changed = threading.Condition()
        self._poll = _POLL
        self._touch = Repeated(self._keep_in_touch, lambda: self._poll, "shardwise quorum")
        self._clock = process_clock()
        self._lost_at: float | None = None  # since when the server is missed; None: it is there
        self._lost_why: Exception | None = None
        self._served: dict[int, int] = {}  # by the replica that receives
        self.snapshot: Callable[[], tuple[int, list[torch.Tensor]]] | None = None
        self._group: tuple[int, dist.ProcessGroup | None] = (0, None)
        try:
            self._connect()
        except OSError as error:
            error.add_note(f"replica {replica} looked for the quorum at {self._server}")
            raise
        self._touch.start()

    # -- within the replica ------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of ranks of this replica."""
        return 1 if self._own is None else self._own.size

    def _say(self, mine: T) -> T:
        """Return what the first rank says. Every rank calls it."""
        return self.gather(mine, "a decision of DiLoCo's replica")[0]

    def gather(self, mine: T, doing: str) -> list[T]:
        """Gather an object from every rank of this replica. Every rank calls it."""
        return (
            [mine] if self.size == 1 or self._own is None else self._own.gather_objects(mine, doing)
        )

    # -- the server --------------------------------------------------------------------------------

    def report(self, **changes: object) -> None:
        """Report something of this replica, soon; the first rank does."""
        assert self._report is not None, "join() comes first"
        self._report = replace(self._report, **changes)  # type: ignore[arg-type]
        self._touch.wake()

    def close(self) -> None:
        """Take no part any more: the others do not wait for this replica."""
        if self._touch.is_closing:
            return
        self._touch.close(_LEAST_ANSWER)
        client = self._client
        if self._report is not None:
            self.report(state=State.LEFT)
            with contextlib.suppress(OSError, RuntimeError):  # the server is gone
                self._tell(client)
        (_, group), self._group = self._group, (0, None)
        if group is not None:
            _close(group)
        if client is not None:
            client.store.close()

    def _connect(self) -> RegistryClient[ReplicaReport, RoundPlan]:
        name = client_name(self.replica, self.incarnation, self.rank)
        seconds = max(_LEAST_ANSWER, self._plan.deadline)
        store = GuardedStore(self._address, self._port, self._token, name, seconds)
        client = RegistryClient[ReplicaReport, RoundPlan](store, str(self.replica), RoundPlan)
        try:
            self._plan = client.news() or self._plan
        except BaseException:
            store.close()
            raise
        self._client, self._lost_at = client, None
        return client

    def _tell(self, client: RegistryClient[ReplicaReport, RoundPlan] | None) -> None:
        if self.rank == 0 and client is not None:
            client.report(self._report)

    def _keep_in_touch(self) -> None:
        """Report, and read the plan; connect again when the connection has ended."""
        try:
            client, plan = self._client, None
            if client is None:
                client, plan = self._connect(), self._plan
            self._tell(client)
            plan = client.news() or plan
            if plan is not None:
                with self._changed:
                    self._plan = plan
                    self._changed.notify_all()
                self._serve(plan)
        except (OSError, RuntimeError, ValueError) as error:
            # The connection has ended, or another program answers.
            self._note_lost(error)
            self._touch.sleep(_RETRY)

    def _note_lost(self, why: Exception) -> None:
        if self._touch.is_closing:
            return
        self._lost_why = why
        if self._lost_at is None:
            self._lost_at = self._clock.now()
            _log.warning(
                "replica %s has lost the quorum at %s; it looks for it, and trains on unless it "
                "has sent its average, which may be committed",
                self.replica,
                self._server,
            )
        if self._client is not None:
            self._client.store.close()
            self._client = None

    @property
    def _store(self) -> GuardedStore | None:
        """The store of the quorum, while it can be reached."""
        return None if self._client is None else self._client.store

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached, as far as is known."""
        return self._lost_at is None

    def check(self) -> None:
        """Check that this replica may take part.

        Raises:
            RanksDivergedError: the others have another model or other settings.
            PeerLostError: the server has been out of reach for too long, or the thread that keeps
                in touch with it has failed.
        """
        refused = self._plan.refused.get(self.incarnation)
        if refused is not None:
            raise RanksDivergedError(refused)
        lost = f"replica {self.replica} has lost the quorum at {self._server}"
        if self._touch.error is not None:
            raise PeerLostError(f"{lost}: {self._touch.error!r}") from self._touch.error
        lost_at = self._lost_at
        if lost_at is not None and self._clock.now() - lost_at > self.timeout:
            raise PeerLostError(f"{lost} for {self.timeout:g} s: {self._lost_why}")

    # -- waiting -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _eagerly(self) -> Iterator[None]:
        try:
            self._poll = _EAGER_POLL
            self._touch.wake()
            yield
        finally:
            self._poll = _POLL

    def wait_for(self, find: Callable[[RoundPlan], T | None]) -> T:
        """Wait until the plan says something; the first rank looks, and tells the others.

        Args:
            find: what the plan says; ``None``: nothing yet.

        Raises:
            RanksDivergedError: as for :meth:`check`.
            PeerLostError: as for :meth:`check`.
        """
        plan, found = self._plan, None
        failed: Exception | None = None
        if self.rank == 0:
            try:
                with self._eagerly(), self._changed:
                    while (found := find(plan := self._plan)) is None:
                        self.check()
                        self._changed.wait(0.25)
            except (PeerLostError, RanksDivergedError) as error:
                failed = error
        found, number, failed = self._say((found, plan.number, failed))
        if failed is not None:
            raise failed
        self._decided_by = number
        return found  # type: ignore[return-value]

    def wish(self, version: int) -> Wish:
        """Return what the plan asks of this replica now; equal on all its ranks.

        Args:
            version: outer steps that this replica has made.
        """
        self.check()
        plan, wish = self._plan, Wish.NOTHING
        if self.is_connected:
            if self.fetch_for_me(plan) is not None:
                wish = Wish.FETCH
            elif plan.called and plan.version == version:
                wish = Wish.MEET
        if self._own is not None and self._own.size > 1:
            own_wish = torch.tensor([int(wish)], dtype=torch.int64)
            numbers = self._own.gather_numbers(own_wish, "the wishes of DiLoCo's quorum")
            wish = Wish(int(numbers[0].item()))
        return wish

    def fetch_for_me(self, plan: RoundPlan) -> Fetch | None:
        """Return the fetch that the plan has for this replica, if it has one."""
        fetch = plan.fetches.get(self.replica)
        return fetch if fetch is not None and fetch.incarnation == self.incarnation else None

    def see_end_of(self, fetch: Fetch) -> None:
        """Wait until the plan has taken note that a fetch has ended."""

        def find(plan: RoundPlan) -> bool | None:
            return self.fetch_for_me(plan) != fetch or not self.is_connected or None

        self.wait_for(find)

    # -- joining -----------------------------------------------------------------------------------

    def join(self, settings: str, digest: str, version: int) -> Fetch | None:
        """Join the others. Every rank calls it.

        Returns:
            What to fetch first; ``None``: this replica has what the others have.

        Raises:
            RanksDivergedError: the others have another model or other settings.
            PeerLostError: as for :meth:`check`.
        """
        self._report = ReplicaReport(
            self.incarnation, self.size, settings, digest, version, State.JOINING
        )
        self._touch.wake()

        def find(plan: RoundPlan) -> tuple[Fetch | None] | None:
            fetch = self.fetch_for_me(plan)
            return (fetch,) if fetch is not None or self.incarnation in plan.welcome else None

        (fetch,) = self.wait_for(find)
        if fetch is None:
            self.report(state=State.TRAINING)
        return fetch

    @property
    def has_peers(self) -> bool:
        """Whether other replicas have begun, from whom this one can fetch."""
        return self._plan.version >= 0 and bool(self._plan.live)

    # -- exchanges ---------------------------------------------------------------------------------

    def attempt_for_me(self, plan: RoundPlan, version: int) -> Attempt | None:
        """Return the attempt that this replica is to take part in, if there is one."""
        attempt = plan.attempt
        if attempt is None or attempt.version != version:
            return None
        assert self._report is not None
        if attempt.number == self._report.attempt:  # it is over for this replica
            return None
        return attempt if attempt.members.get(self.replica) == self.incarnation else None

    def outcome(self, attempt: Attempt) -> bool:
        """Wait until an attempt is committed or given up; return whether it is committed."""

        def find(plan: RoundPlan) -> bool | None:
            if plan.version > attempt.version:
                return self._committed(attempt)
            return None if plan.attempt == attempt else False

        return self.wait_for(find)

    def _committed(self, attempt: Attempt) -> bool | None:
        """Look up whether an attempt has committed its round; ``None``: unknown so far."""
        key, store = f"{COMMIT}{attempt.version + 1}", self._store
        if store is None:
            return None
        try:
            # A server that has been started again does not know.
            return store.check([key]) and int(store.get(key)) == attempt.number
        except (OSError, RuntimeError):
            return None

    def average(
        self, attempt: Attempt, exchange: Callable[[dist.ProcessGroup | None], T]
    ) -> T | None:
        """Do this rank's part in an attempt.

        Args:
            attempt: a plan has it.
            exchange: called in another thread with the group of this shard's owners; it must not
                change anything that outlives a failure.

        Returns:
            What ``exchange`` returned; ``None``: the attempt has failed.
        """
        if self._group[0] != attempt.group:
            self._end_group()
        ranks = sorted(attempt.members)
        made: list[dist.ProcessGroup | None] = []
        given_up = threading.Event()

        def work() -> T:
            number, group = self._group
            if number != attempt.group:
                group = None
                if len(ranks) > 1:
                    group = self._make_group(
                        str(attempt.group), ranks.index(self.replica), len(ranks)
                    )
                made.append(group)
                if given_up.is_set():
                    _close_in_background(group)
            return exchange(group)

        result = self._in_thread(
            work, lambda plan: plan.attempt != attempt, f"round {attempt.version + 1}"
        )
        if result is None:
            given_up.set()
            for group in made:
                _close_in_background(group)
            self._end_group()
        elif made:
            self._group = (attempt.group, made[0])
        return result

    def _end_group(self) -> None:
        """Close the connections to other replicas."""
        (_, group), self._group = self._group, (0, None)
        _close_in_background(group)

    def _make_group(self, name: str, rank: int, size: int) -> dist.ProcessGroup:
        store = self._store
        if store is None:
            raise PeerLostError(f"replica {self.replica} has lost the quorum at {self._server}")
        return c10d.group_between_worlds(
            PrefixStore(f"{MEETING}{name}/{self.rank}/", store),
            rank,
            size,
            address=address_towards(self._address),
            connecting=timedelta(seconds=max(_LEAST_ANSWER, self._plan.deadline)),
            timeout=timedelta(seconds=self.timeout),
        )

    def _in_thread(
        self, work: Callable[[], T], is_over: Callable[[RoundPlan], bool], doing: str
    ) -> T | None:
        """Return what ``work`` returns, or ``None`` if it fails or the plan says that it is over.

        In the latter case it is left behind.
        """
        found: list[T] = []
        job = Job(lambda: found.append(work()))
        threading.Thread(target=job.run, daemon=True, name="shardwise exchange").start()
        with self._eagerly():
            while not job.sleep(_EAGER_POLL):
                plan = self._plan  # this rank may not know yet what the first one has seen
                is_older = 0 < self._decided_by - plan.number < NUMBERS_PER_SERVER
                if not self.is_connected or (not is_older and is_over(plan)):
                    return None
        if job.error is not None:
            _log.warning("replica %s: %s failed: %s", self.replica, doing, job.error)
            return None
        return found[0]

    # -- outer states ------------------------------------------------------------------------------

    def _serve(self, plan: RoundPlan) -> None:
        """Send the outer state to the replicas that are to get it from this one."""
        if self.snapshot is None:
            return
        for receiver, fetch in plan.fetches.items():
            mine = (fetch.source, fetch.source_incarnation) == (self.replica, self.incarnation)
            if mine and fetch.number != self._served.get(receiver):
                self._served[receiver] = fetch.number
                threading.Thread(
                    target=self._send, args=(fetch, self.snapshot), daemon=True
                ).start()

    def _send(self, fetch: Fetch, snapshot: Callable[[], tuple[int, list[torch.Tensor]]]) -> None:
        try:
            if not self._await_receiver(fetch):
                return
            version, tensors = snapshot()
            while version < fetch.version and fetch in self._plan.fetches.values():
                time.sleep(_POLL)  # the result of the last round is about to be applied
                version, tensors = snapshot()
            group = self._make_group(f"fetch-{fetch.number}", 0, 2)
            try:
                for tensor in (torch.tensor([version]), *tensors):
                    if tensor.numel():
                        group.send([tensor], 1, 0).wait()
                group.recv([torch.zeros(1)], 1, 0).wait()  # until then this end stays
            finally:
                c10d.forget_group_between_worlds(group)
        except (OSError, RuntimeError, PeerLostError) as error:
            _log.info("replica %s could not serve a state: %s", self.replica, error)

    def _await_receiver(self, fetch: Fetch) -> bool:
        """Wait until the other end is there; return whether it still wants to fetch."""
        while fetch in self._plan.fetches.values():
            store = self._store
            if store is not None and store.check([self._here(fetch)]):
                return True
            time.sleep(_POLL)
        return False

    def _here(self, fetch: Fetch) -> str:
        """The key by which the other end says that it is there."""
        return f"{MEETING}fetch-{fetch.number}/{self.rank}/here"

    def receive(self, fetch: Fetch, tensors: list[torch.Tensor]) -> int | None:
        """Receive what the source sends. Every rank calls it.

        Args:
            fetch: what to fetch.
            tensors: as those of the source, on the CPU; their values are undefined after a failure.

        Returns:
            The number of outer steps; ``None``: it has failed on a rank.
        """

        def work() -> int:
            if self._store is not None:
                self._store.set(self._here(fetch), "1")
            group = self._make_group(f"fetch-{fetch.number}", 1, 2)
            try:
                version = torch.zeros(1, dtype=torch.int64)
                for tensor in (version, *tensors):
                    if tensor.numel():
                        group.recv([tensor], 0, 0).wait()
                group.send([torch.zeros(1)], 0, 0).wait()
                return int(version.item())
            finally:
                c10d.forget_group_between_worlds(group)

        def is_over(plan: RoundPlan) -> bool:
            return self.fetch_for_me(plan) != fetch

        version = self._in_thread(work, is_over, f"fetching from replica {fetch.source}")
        versions = set(self.gather(version, "the outer state of other replicas"))
        return version if len(versions) == 1 else None


def _close(group: dist.ProcessGroup) -> None:
    Peers(group).hang_up()
    c10d.forget_group_between_worlds(group)


def _close_in_background(group: dist.ProcessGroup | None) -> None:
    """Close the connections of a group that is of no more use; others may be slow to notice."""
    if group is not None:
        threading.Thread(
            target=_close, args=(group,), daemon=True, name="shardwise hang up"
        ).start()
