"""The other ranks of a process group: whether they are still there, and waiting for them.

If a peer dies, a wait for it ends only with the timeout of the process group: half an hour by
default. This file makes it end within seconds. When a process ends, the system closes its
connections, and on gloo a rank can probe its own. Other backends do not say who is there: their
waits end with the timeout, and the error names who is missing.

Every wait for peers is a :meth:`PeerWatch.wait`. A rank that has lost a peer on gloo closes its own
connections to all others, so that they notice too, wherever they wait.

Above the transport a lost peer is a :class:`~shardwise.base.errors.PeerLostError`, or an error
raised from one (:func:`~shardwise.base.errors.lost_peer_behind`). Only this file reads what
backends say.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from shardwise._torch import c10d
from shardwise.base import devices, observe
from shardwise.base.errors import PeerLostError, RanksDivergedError, ShardwiseError
from shardwise.base.observe import Activity, Route

T = TypeVar("T")

#: The first tag that messages must not use; nothing ever arrives for it.
PROBE_TAG = 2**30
#: Seconds that a rank waits for others to come before it logs a warning.
WARNING_SECONDS = 30.0

_HUNG_UP = "shardwise/hung-up"
_DESTROYED = (
    "the process group has been destroyed, or its simulation has ended: make the model, its "
    "optimizer and what else communicates anew, in the world that there is now"
)
#: Words by which backends report a broken or silent connection, as opposed to wrong arguments.
_SIGNS = ("connection", "timed out", "timeout", "peer", "socket", "broken pipe", "network")
#: Seconds of waiting after which ranks check that they wait for the same collective.
_COMPARE_SECONDS = 3.0

_log = logging.getLogger(__name__)

#: All that is kept once per process group; see :meth:`Peers.once`.
_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Callable[..., object], Any]] = (
    weakref.WeakKeyDictionary()
)


class Notice(enum.Enum):
    """How a wait that takes long is reported to the user."""

    WARNING = "after WARNING_SECONDS, who waits for whom"
    NOTHING = "nothing, before it fails"


class Loss(enum.Enum):
    """How a peer was lost."""

    CLOSED = "the peer closed the connection"
    SILENT = "no answer in time"


class Job:
    """Something that another thread does.

    Args:
        function: what it does.

    Attributes:
        error: what it has raised.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self.error: BaseException | None = None
        self._is_over = False
        self._under_way = threading.Lock()  # an event would cost several times as much
        self._under_way.acquire()

    def run(self) -> None:
        """Do it, and keep what it raises."""
        assert self._function is not None
        try:
            self._function()
        except BaseException as error:  # whatever it is, the caller must know
            self.error = error
        finally:
            self._function = None  # what it holds is freed now
            self._is_over = True
            self._under_way.release()

    def sleep(self, seconds: float = -1) -> bool:
        """Sleep until it is done, by default however long that takes; return whether it is."""
        if not self._is_over and self._under_way.acquire(timeout=seconds):
            self._under_way.release()
        return self._is_over


class Peers:
    """The ranks of one process group, as this rank sees them.

    A cheap view that does not keep the group alive. What is kept per group is in :meth:`once`.

    Args:
        group: the process group; by default the default group.

    Attributes:
        rank: this process's rank in the group.
        size: the number of ranks in the group.
        others: all other ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no process group: call init_process_group first")
        self.rank = group.rank()
        self.size = group.size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self._group_ref = weakref.ref(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: it has been destroyed.
        """
        group = self._group_ref()
        if group is None:
            raise RuntimeError(_DESTROYED)
        return group

    @property
    def members(self) -> list[int]:
        """The ranks of the group as ranks of the default group, in the order of the group.

        Raises:
            RuntimeError: it has been destroyed.
        """
        try:
            return dist.get_process_group_ranks(self.group)
        except KeyError:
            raise RuntimeError(_DESTROYED) from None

    @property
    def store(self) -> Any:
        """The store of the group."""
        return c10d.store_of(self.group)

    @property
    def timeout(self) -> float:
        """The timeout of the group, in seconds."""
        return c10d.timeout_of(self.group)

    def backend(self, device: torch.device) -> devices.Backend:
        """Find the backend that serves tensors on ``device``.

        Raises:
            ValueError: the group has no backend for that type of device.
        """
        config = dist.get_backend_config(self.group)
        by_device = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
        if not by_device:
            return devices.backend_of(config, device)
        if device.type not in by_device:
            raise ValueError(
                f"the process group has backends for {', '.join(by_device)} ({config}), none for "
                f"{device.type}: name one in init_process_group, such as "
                f'"cpu:{devices.GLOO.name},{device.type}:<backend>"'
            )
        return devices.backend_of(by_device[device.type], device)

    def once(self, make: Callable[[Peers], T]) -> T:
        """Return what ``make`` made for this process group, and make it the first time.

        It is freed with the group, so it must not hold the group.

        Args:
            make: a function or class of a module, which stands for what it makes.
        """
        kept = _kept.setdefault(self.group, {})
        if make not in kept:
            kept[make] = make(self)
        found: T = kept[make]
        return found

    @property
    def dimension(self) -> str:
        """The name of the mesh dimension that the group serves, for reports; ``""``: none."""
        return self.once(_dimension)[0]

    def name_dimension(self, name: str) -> None:
        """Name the mesh dimension that the group serves. The first name stays."""
        names = self.once(_dimension)
        names[0] = names[0] or name

    def wire(self, transport: str) -> Route:
        """Say what a collective of a transport travels over, for reports."""
        return Route(transport, self.dimension, self.size, self.once(_members))

    # -- who is there -------------------------------------------------------------------------

    def departed(self, ranks: Sequence[int]) -> list[int]:
        """Find those of ``ranks`` whose gloo connection to this rank is closed."""
        group, gone = self.group, []
        for rank in ranks:
            try:
                group.recv([torch.empty(1)], rank, PROBE_TAG)
            except RuntimeError:  # not even a receive can be posted
                gone.append(rank)
        return gone

    def hang_up(self, lost: Sequence[int] = ()) -> None:
        """Close all gloo connections of the group, which is of no more use once a peer is lost.

        Other ranks may wait for this one, which will never come; now they fail at once. Gloo closes
        connections when a wait times out, so this lets one time out.

        Args:
            lost: the lost peers, for those who see that this rank has left before they see why.
        """
        group = self.group
        if self.others:
            with contextlib.suppress(RuntimeError):  # the store may be gone as well
                self.store.set(_HUNG_UP, " ".join(map(str, lost)))
        for rank in self.others:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], rank, PROBE_TAG).wait(timedelta(milliseconds=1))

    @property
    def _has_gloo(self) -> bool:
        try:
            return self.backend(devices.CPU).sends_messages
        except ValueError:
            return False

    def lost_by_others(self) -> list[int] | None:
        """Find whom a rank that lives had lost when it hung up; ``None`` if no rank has."""
        with contextlib.suppress(RuntimeError):
            if self.store.check([_HUNG_UP]):
                return [int(rank) for rank in self.store.get(_HUNG_UP).split()]
        return None

    # -- errors -------------------------------------------------------------------------------

    def lost(
        self,
        doing: str,
        ranks: Sequence[int] = (),
        how: Loss = Loss.CLOSED,
        error: BaseException | None = None,
    ) -> PeerLostError:
        """Make the error for a collective or a meeting that a peer did not take part in.

        Args:
            doing: what was being done, such as ``"the all-gather of 3 tensors"``.
            ranks: the lost peers, as ranks in the group, if they are known.
            how: how they were lost.
            error: what the backend raised, if it did.
        """
        members = self.members
        names = ", ".join(str(members[rank]) for rank in sorted(ranks or self.others))
        who = f"one of ranks {names} (the backend does not say which)"
        if ranks:
            who = f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
        says = "" if error is None else f" (The backend says: {error})"
        return PeerLostError(
            f"rank {members[self.rank]} lost {who} during {doing}: {how.value}. It died, left "
            "early, or stalled: look for the first error in its own output, then restart all ranks "
            f"from the last checkpoint.{says}"
        )

    @contextlib.contextmanager
    def collective(
        self, doing: str, find_lost: Callable[[], Sequence[int]] = tuple
    ) -> Iterator[None]:
        """Report a peer that is lost during a call of ``torch.distributed``.

        Put nothing else inside: an error is recognized by what the backend says.

        Args:
            doing: what the call does, such as ``"the sum of validation losses"``.
            find_lost: finds the lost peers, as ranks in the group, once the call has failed.

        Raises:
            PeerLostError: in place of the backend's error.
        """
        try:
            yield
        except ShardwiseError:
            raise
        except RuntimeError as error:
            how = how_lost(error)
            if how is None:
                raise
            raise self.lost(doing, find_lost(), how, error) from error

    # -- waiting ------------------------------------------------------------------------------

    def watch(self, doing: str, notice: Notice = Notice.WARNING) -> PeerWatch:
        """Make the watch for a wait in which ranks come together.

        Args:
            doing: what they come together for.
            notice: how a wait that takes long is reported.
        """
        # The store is read now: later, the one who waits may hold it.
        # Once a rank that lives has hung up, a closed connection proves nothing.
        can_tell = self._has_gloo and self.lost_by_others() is None
        return PeerWatch(
            self,
            doing,
            MEETING,
            find_gone=self.departed if can_tell else lambda ranks: [],
            timeout=self.timeout,
            warning_seconds=WARNING_SECONDS if notice is Notice.WARNING else None,
        )

    def call(
        self,
        function: Callable[[], T],
        doing: str,
        ranks: Sequence[int] | None = None,
        notice: Notice = Notice.WARNING,
    ) -> T:
        """Call a function that blocks until peers do their part, and give up if one is gone.

        On gloo the function runs in a thread of its own, which is left behind if it never ends.

        Args:
            function: what blocks.
            doing: what it does, such as ``"the creation of a process group"``.
            ranks: the peers that it waits for, as ranks in the group; by default all others.
            notice: how a wait that takes long is reported.

        Raises:
            PeerLostError: a peer is gone, or did not answer in time.
        """
        ranks = self.others if ranks is None else ranks
        if not ranks or not self._has_gloo:
            with self.collective(doing):
                return function()
        found: list[T] = []
        job, watch = Job(lambda: found.append(function())), self.watch(doing, notice)
        threading.Thread(target=job.run, daemon=True, name="shardwise-call").start()
        watch.wait(job.sleep, lambda: ranks)
        with self.collective(doing, lambda: self.departed(ranks)):
            if job.error is not None:
                raise job.error
        return found[0]

    def read(
        self,
        keys: Mapping[int, str],
        doing: str,
        check: Callable[[int, str], None] = lambda rank, text: None,
    ) -> dict[int, str]:
        """Return what peers post in the store of the group, once all of them have.

        Args:
            keys: where, by rank in the group.
            doing: what it is for.
            check: called with what a rank has posted, also while others have not yet.

        Raises:
            PeerLostError: one of them is gone, or did not come in time.
        """
        store = self.store

        def posted(ranks: Sequence[int]) -> dict[int, str]:
            found = store.multi_get([keys[rank] for rank in ranks]) if ranks else []
            texts = {rank: text.decode() for rank, text in zip(ranks, found, strict=True)}
            for each in texts.items():
                check(*each)
            return texts

        def missing() -> list[int]:
            here = [rank for rank, key in keys.items() if store.check([key])]
            posted(here)
            return [rank for rank in keys if rank not in here]

        have_come = polling(lambda: bool(store.check(list(keys.values()))))
        self.watch(doing).wait(have_come, missing)
        return posted(list(keys))

    def gather_objects(self, mine: T, doing: str) -> list[T]:
        """Gather an object from every rank. All ranks call it.

        Args:
            mine: this rank's object: small, and pickled.
            doing: what it is for, such as ``"the creation of a mesh"``.

        Returns:
            The objects in rank order.

        Raises:
            PeerLostError: a peer is gone, or did not answer in time.
        """
        found = [mine] * self.size
        self.call(lambda: dist.all_gather_object(found, mine, group=self.group), doing)
        return found

    def gather_numbers(self, mine: torch.Tensor, doing: str) -> torch.Tensor:
        """Gather a few numbers from every rank, in one collective. All ranks call it.

        Args:
            mine: this rank's numbers, on the CPU; of equal shape and dtype on every rank.
            doing: what it is for, such as ``"the sum of validation losses"``.

        Returns:
            The numbers in rank order, of shape ``(ranks, *mine.shape)``.

        Raises:
            PeerLostError: a peer is gone, or did not answer in time.
        """
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.collective(doing), observe.during(Activity.WAIT, doing):
            dist.all_gather(found, mine, group=self.group)
        return torch.stack(found)


def _members(peers: Peers) -> tuple[int, ...]:
    return tuple(peers.members)


def _dimension(peers: Peers) -> list[str]:
    """Keep the name of the mesh dimension."""
    return [""]


@contextlib.contextmanager
def connecting(rank: int, world_size: int) -> Iterator[None]:
    """Report a peer that is lost while the default process group is created.

    Raises:
        PeerLostError: in place of the backend's error.
    """
    try:
        yield
    except RuntimeError as error:
        if how_lost(error) is None:
            raise
        raise PeerLostError(
            f"rank {rank} could not connect to the other {world_size - 1} ranks: one of them died, "
            f"or never started; look for the first error in its output ({error})"
        ) from error


def how_lost(error: BaseException) -> Loss | None:
    """Tell from a backend's error how it lost a peer; ``None`` if it did not."""
    text = str(error).lower()
    if not isinstance(error, dist.DistNetworkError) and (
        not isinstance(error, RuntimeError) or not any(sign in text for sign in _SIGNS)
    ):
        return None
    return Loss.SILENT if "timed out" in text or "timeout" in text else Loss.CLOSED


# -- the watch ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """How often a wait looks for its peers, and when it is sure.

    Attributes:
        seconds: between two looks.
        longest: between two looks of a long wait, in seconds: a probe of gloo's connections leaves
            a little memory behind until the group ends.
        looks: how many looks in a row must find a peer gone. What it sent before it left may still
            be on its way.
    """

    seconds: float
    longest: float
    looks: int


#: Ranks that come together.
MEETING = Pace(1.0, 5.0, looks=3)


@dataclass(eq=False)
class PeerWatch:
    """Watches the peers that one wait depends on, and ends the wait if one of them is gone.

    Attributes:
        peers: the ranks of the process group.
        doing: what is waited for, such as ``"the all-gather of 3 tensors"``.
        pace: how often to look.
        find_gone: finds the ranks that are gone, of those given at least.
        timeout: seconds after which the wait ends in any case; ``None``: what is waited for has a
            timeout of its own.
        compare: called after some seconds; raises ``RanksDivergedError`` if the ranks wait for
            different things.
        give_up: called before the wait ends with an error.
        blame: the ranks to name after the timeout; by default those that the wait depends on.
        warning_seconds: log a warning after a wait of this many seconds.
    """

    peers: Peers
    doing: str
    pace: Pace
    _: KW_ONLY
    find_gone: Callable[[Sequence[int]], list[int]]
    timeout: float | None
    compare: Callable[[], object] | None = None
    give_up: Callable[[], object] | None = None
    blame: Callable[[], Sequence[int]] | None = None
    warning_seconds: float | None = None

    def __post_init__(self) -> None:
        self._found = 0
        self._began = self._looked = self._compared = time.monotonic()

    def wait(self, sleep: Callable[[float], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Return once ``sleep`` returns true.

        Args:
            sleep: sleeps until what is waited for has happened, or at most about this many seconds,
                and returns whether it has.
            missing: returns the ranks that the wait still depends on.

        Raises:
            PeerLostError: one of those ranks is gone, or did not come in time.
            RanksDivergedError: another rank waits for something else.
        """
        while not sleep(max(self._until_due, 0.001)):
            if self._until_due <= 0:
                self._look(missing)

    @property
    def _until_due(self) -> float:
        """Seconds until the next look."""
        waited = self._looked - self._began
        pause = min(self.pace.longest, max(self.pace.seconds, waited / 20))
        return self._looked + (self.pace.seconds if self._found else pause) - time.monotonic()

    def _look(self, missing: Callable[[], Sequence[int]]) -> None:
        self._looked = now = time.monotonic()
        if now - self._compared >= _COMPARE_SECONDS:
            self._compared = now
            self._compare_ranks()
        needed = missing()
        gone = self.find_gone(needed)
        if gone:
            needed = missing()  # again: one may have done its part just before it left
        is_lost = any(rank in needed for rank in gone)
        self._found = self._found + 1 if is_lost else 0
        if self._found >= self.pace.looks:
            self._compare_ranks()  # it may have left because it noticed first
            self._fail(self.peers.lost(self.doing, gone))
        waited = now - self._began
        if self.timeout is not None and waited > self.timeout:
            blamed = needed if self.blame is None else self.blame()
            self._fail(self.peers.lost(self.doing, blamed, Loss.SILENT))
        if self.warning_seconds is not None and waited > self.warning_seconds:
            self.warning_seconds = None
            members = self.peers.members
            _log.warning(
                "rank %s has waited %.0f s for ranks %s in %s; it waits for %.0f s more",
                members[self.peers.rank],
                waited,
                [members[rank] for rank in needed],
                self.doing,
                (self.timeout or 0.0) - waited,
            )

    def _compare_ranks(self) -> None:
        if self.compare is not None:
            try:
                self.compare()
            except RanksDivergedError as error:
                self._fail(error)

    def _fail(self, error: ShardwiseError) -> NoReturn:
        if self.give_up is not None:
            self.give_up()
        raise error


def polling(check: Callable[[], bool]) -> Callable[[float], bool]:
    """Turn a check into a ``sleep`` for :meth:`PeerWatch.wait`: every 20 ms, sooner at first."""
    pauses = itertools.chain((0.001, 0.002, 0.005, 0.01), itertools.repeat(0.02))

    def sleep(seconds: float) -> bool:
        if check():
            return True
        time.sleep(min(next(pauses), seconds))
        return False

    return sleep


# -- ranks that come together ---------------------------------------------------------------------


def new_group(
    ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a process group; only its members call this.

    Args:
        ranks: the members, as ranks of the default group.
        timeout: of its collectives; by default that of the default group.
        backend: by default that of the default group.

    Raises:
        PeerLostError: a member is gone, or did not come in time.
    """
    world, members = Peers(), tuple(ranks)
    name = _next_name(world, "group", members)
    # Simulated ranks are threads, which share what names groups.
    is_shared = c10d.has_shared_store(world.group)
    naming = c10d.naming_group(name) if is_shared else contextlib.nullcontext()

    def make() -> dist.ProcessGroup:
        with naming:
            made: dist.ProcessGroup = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
            )
        return made

    return make_together(make, f"a process group of ranks {list(ranks)}", ranks)


def _counts(world: Peers) -> Counter[tuple[str, tuple[int, ...]]]:
    """Count what each set of ranks has named: the same number on all of them."""
    return Counter()


def _next_name(world: Peers, kind: str, members: tuple[int, ...]) -> str:
    """Name what these ranks do together next: the same on all of them, and never twice."""
    counts = world.once(_counts)
    counts[kind, members] += 1
    crc = zlib.crc32(repr(members).encode())
    return f"shardwise/{kind}/{crc:08x}/{counts[kind, members]}"


def make_together(make: Callable[[], T], what: str, ranks: Sequence[int] | None = None) -> T:
    """Make something that ranks meet in, once all of them have come to make it.

    Args:
        make: makes it; every one of the ranks calls it at the same place.
        what: what it is, such as ``"a mesh of shape (2, 2)"``; the same on all ranks.
        ranks: who makes it, as ranks of the default group; by default all.

    Raises:
        PeerLostError: one of the ranks is gone, or did not come in time.
        RanksDivergedError: another rank makes something else.
    """
    world = Peers()
    members = tuple(range(world.size) if ranks is None else ranks)
    if len(members) == 1 or not c10d.has_shared_store(world.group):
        return make()
    doing = f"the creation of {what}"
    with world.collective(doing):  # the store may go with the rank that keeps it
        _arrive(world, members, what, doing)
    if devices.accelerator() is not None:
        # The current device belongs to a thread, and making a mesh may choose it.
        return make()
    return world.call(make, doing, [rank for rank in members if rank != world.rank])


def _arrive(world: Peers, members: tuple[int, ...], what: str, doing: str) -> None:
    """Report in the store that this rank has come, and wait until all have.

    Where ranks meet for the first time they wait in the store, which does not know who is alive.
    But the default process group exists already, so its connections tell.
    """
    name = _next_name(world, "arrival", members)
    world.store.set(f"{name}/{world.rank}", what)

    def check(rank: int, theirs: str) -> None:
        if theirs != what:
            raise RanksDivergedError(
                f"ranks have diverged: rank {world.rank} makes {what}, and rank {rank} makes "
                f"{theirs}. All ranks have to make the same meshes and groups, in the same order"
            )

    world.read({rank: f"{name}/{rank}" for rank in members if rank != world.rank}, doing, check)
