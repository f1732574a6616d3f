"""What is said when a peer of a process group is lost.

Waiting for gloo, and giving up where gloo itself would not.

When a connection breaks, gloo wakes those who wait for a message that has not begun to travel, but
forgets the one that is half way: its wait ends only with the timeout of the process group, half an
hour by default, and cannot be interrupted. So a thread waits for gloo, and the caller waits for
that thread, looking from time to time whether the peers are still there. That costs about 15 µs.

A rank that has lost a peer hangs up on all others, so that they learn it from where they wait.

Waiting for ranks that have not come yet, and giving up where one never will.

Where ranks meet for the first time (a new process group, shared memory, what they tell each other
before), they wait in the store, which does not know who is alive: the wait for a rank that died,
or that raised and left, ends with the timeout of the process group, half an hour by default. But
another process group is there already, and its connections close with the process at their other
end. So who waits looks at those.

That is so on gloo. Other backends do not say who is there: the wait ends with the timeout, and
names who is missing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import queue
import re
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from shardwise._torch import c10d
from shardwise.errors import PeerLostError, RanksDivergedError, ShardwiseError
from shardwise.transport.collective_log import CollectiveLog

#: The first tag that messages must not use; nothing ever arrives for it.
PROBE_TAG = 2**30

_HUNG_UP = "shardwise/hung-up"

#: Words by which backends tell of a broken or silent connection, as against wrong arguments.
_SIGNS = ("connection", "timed out", "timeout", "peer", "socket", "broken pipe", "network")


def tells_of_lost_peer(error: RuntimeError) -> bool:
    """Whether what a backend raised means that a peer is gone or silent.

    Ask it only of what a call of ``torch.distributed`` raised: the words alone prove nothing.
    Everything above knows a lost peer by its type, :class:`~shardwise.errors.PeerLostError`.
    """
    text = str(error).lower()
    return isinstance(error, dist.DistNetworkError) or any(sign in text for sign in _SIGNS)


def tells_of_stall(error: RuntimeError) -> bool:
    """Whether the peer still holds its connection but did not answer in time."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def peer_lost(
    group: dist.ProcessGroup, doing: str, error: RuntimeError, peers: Sequence[int] = ()
) -> PeerLostError:
    """Make the error for a collective of ``group`` that broke.

    Args:
        group: the process group.
        doing: what was being done, such as ``"the all-gather of 3 tensors"``.
        error: what the backend raised.
        peers: ranks in the group of the peers concerned, where they are known.
    """
    members = dist.get_process_group_ranks(group)
    me = members[group.rank()]
    if peers:
        who = "rank " if len(peers) == 1 else "ranks "
        who += ", ".join(str(members[peer]) for peer in sorted(peers))
    else:
        others = [str(member) for member in members if member != me]
        who = f"one of ranks {', '.join(others)} (the backend does not say which)"
    what = "no answer in time" if tells_of_stall(error) else "the peer closed the connection"
    return PeerLostError(
        f"rank {me} lost {who} during {doing}: {what}. It died, left early or stalled: look for "
        "the first error in its own output, then restart all ranks from the last checkpoint. "
        f"(The backend says: {error})"
    )


@contextlib.contextmanager
def naming_lost_peer(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """Turn a backend's error that means a lost peer into one that says so.

    Put only calls of ``torch.distributed`` inside.

    Args:
        group: whose collective it is; None: the default process group.
        doing: what it is, such as ``"the all-gather of 3 tensors"``.

    Raises:
        PeerLostError: instead of such an error.
    """
    try:
        yield
    except ShardwiseError:
        raise  # which says so
    except RuntimeError as error:
        members = group or dist.group.WORLD
        if members is not None and tells_of_lost_peer(error):
            raise peer_lost(members, doing, error) from error
        raise


def departed(group: dist.ProcessGroup, peers: Sequence[int]) -> list[int]:
    """Those of ``peers`` (ranks in ``group``, on gloo) whose connection to this rank is closed."""
    gone = []
    for peer in peers:
        try:
            group.recv([torch.empty(1)], peer, PROBE_TAG)
        except RuntimeError:  # no message to it can even be posted
            gone.append(peer)
    return gone


def hang_up(group: dist.ProcessGroup) -> None:
    """Close all connections of a group on gloo: with a peer lost it is of no more use.

    Other ranks may wait for this one, which will never come; now they fail at once. Gloo does so
    itself when a wait times out, so this lets one time out.
    """
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    if others:
        with contextlib.suppress(RuntimeError):  # the store may be gone as well
            c10d.store_of(group).set(_HUNG_UP, "1")
    for peer in others:
        with contextlib.suppress(RuntimeError):
            probe = group.recv([torch.empty(1)], peer, PROBE_TAG)
            probe.wait(timedelta(milliseconds=1))


def was_hung_up(group: dist.ProcessGroup) -> bool:
    """Whether a rank closed its connections though it lives: then they tell nothing of who does."""
    try:
        return bool(c10d.store_of(group).check([_HUNG_UP]))
    except RuntimeError:
        return False


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name the backend of ``group`` that serves tensors on ``device``.

    Raises:
        ValueError: the group has no backend for that type of device.
    """
    config = dist.get_backend_config(group)
    by_device = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    if not by_device:
        return config
    if device.type not in by_device:
        raise ValueError(
            f"the process group has backends for {', '.join(by_device)} ({config}), none for "
            f"{device.type}: name one in init_process_group, such as "
            f'"cpu:gloo,{device.type}:<backend>"'
        )
    return by_device[device.type]


_LOOK_SECONDS = 1.0
# After so long a wait, ranks look whether they wait for the same thing.
_COMPARE_SECONDS = 3.0
# So often may a wait find its peer gone. What the peer sent before it left arrives at once; a
# collective may have something left to exchange among those who are still there.
_LOOKS_AT_MESSAGE = 2
_LOOKS_AT_COLLECTIVE = 5


class Launched(Protocol):
    """What waits for collectives or messages of ``torch.distributed``."""

    def wait(self) -> object:
        """Return once the results may be used."""


class Waiter:
    """Waits for works of one gloo process group, on tensors on the CPU.

    Args:
        group: the process group.
        log: what this rank has called on it, to compare with its peers' after a while.
    """

    def __init__(self, group: dist.ProcessGroup, log: CollectiveLog | None = None) -> None:
        self._group = group
        self._log = log
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def wait(self, works: Sequence[tuple[Launched, int | None]], doing: str) -> None:
        """Wait for works, one after the other.

        Args:
            works: each with the rank in the group of the one peer that it depends on, or ``None``
                where it depends on all of them.
            doing: what it is for, such as ``"the all-gather of 3 tensors"``.

        Raises:
            PeerLostError: a peer died, or did not answer in time.
            RanksDivergedError: a peer has called something else.
        """
        if not works:
            return
        job = _Job(works)
        if self._thread is None:
            # Nobody joins it: after a loss it may wait until the group's timeout.
            self._thread = threading.Thread(
                target=_work_off, args=(self._jobs,), daemon=True, name="shardwise-waiter"
            )
            self._thread.start()
        self._jobs.put(job)
        interrupt: BaseException | None = None
        while True:
            try:
                self._patience(job, doing)
                break
            except ShardwiseError:
                raise
            except BaseException as error:  # KeyboardInterrupt, or what a signal handler raises
                if interrupt is not None:
                    hang_up(self._group)
                    raise
                # Gloo would go on writing to memory that its owner thinks is free: the collective
                # ends first, unless the user insists.
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if job.error is not None:
            raise self.explain(job.error, doing, job.peer) from job.error

    def _patience(self, job: _Job, doing: str) -> None:
        """Return when the job is done, or raise when it never will be."""
        looks, last = 0, -1
        seconds = 0.0
        while not (job.over or job.done.acquire(timeout=_LOOK_SECONDS)):
            seconds += _LOOK_SECONDS
            if seconds >= _COMPARE_SECONDS:
                self._compare()
            current, peer = job.current, job.peer
            gone = self._gone()
            missing = bool(gone) if peer is None else peer in gone
            looks = looks + 1 if missing and current == last else int(missing)
            last = current
            if looks >= (_LOOKS_AT_COLLECTIVE if peer is None else _LOOKS_AT_MESSAGE):
                self._compare()
                cause = RuntimeError("the connection broke while a message was half way")
                hang_up(self._group)
                raise peer_lost(self._group, doing, cause, gone)

    def _compare(self) -> None:
        """Raise if the calls of this rank are not those of its peers."""
        if self._log is None:
            return
        try:
            self._log.compare_if_possible()
        except RanksDivergedError:
            hang_up(self._group)
            raise

    def explain(self, error: BaseException, doing: str, peer: int | None) -> BaseException:
        """Return the error to raise for what the backend raised, and hang up if a peer is lost.

        Args:
            error: what the backend raised.
            doing: as in :meth:`wait`.
            peer: the peer at the other end, where there is one.
        """
        if not isinstance(error, RuntimeError) or not tells_of_lost_peer(error):
            return error
        try:
            self._compare()  # it may have left because it noticed first
        except RanksDivergedError as diverged:
            return diverged
        peers = [] if peer is None else [peer]
        if not tells_of_stall(error):
            # The peer may have left because it lost another one, and that one is the cause.
            peers += [other for other in self._gone() if other != peer]
        hang_up(self._group)
        return peer_lost(self._group, doing, error, peers)

    def _gone(self) -> list[int]:
        others = [rank for rank in range(self._group.size()) if rank != self._group.rank()]
        return departed(self._group, others)


class _Job:
    """Works that a thread waits for, and how far it has come."""

    def __init__(self, works: Sequence[tuple[Launched, int | None]]) -> None:
        self.current = 0
        self.error: BaseException | None = None
        self.over = False
        self.done = threading.Lock()  # held until the end
        self.done.acquire()
        self._works = works

    @property
    def peer(self) -> int | None:
        """The peer that the work now waited for depends on."""
        return self._works[self.current][1]

    def run(self) -> None:
        try:
            for self.current, (work, _) in enumerate(self._works):  # noqa: B020
                work.wait()
        except BaseException as error:  # whatever it was, the caller must know
            self.error = error
        finally:
            self.over = True
            self.done.release()


def _work_off(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or it would keep the tensors of the last call until the next


T = TypeVar("T")

_ARRIVAL_LOOK_SECONDS, _LONGEST_SECONDS = 1.0, 5.0
# So often is a rank to be found gone: what it said before it left may still be on its way.
_LOOKS = 3
#: After so long a wait for ranks that have not come, a warning says so.
PATIENCE_SECONDS = 30.0
_CPU = torch.device("cpu")
# Others (those of tests and plans) have no store in which ranks could meet.
_WITH_STORE = re.compile("gloo|nccl|xccl|hccl|undefined")

_log = logging.getLogger(__name__)

#: How often each set of ranks has met, by default process group: each time under another name.
_met: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


class PeerWatch:
    """Looks after the ranks that somebody waits for, as often as it is asked.

    Args:
        group: a process group that exists.
        doing: what is waited for, such as ``"the making of a process group"``.
        patience: seconds after which a warning says who is waited for; None: never.
    """

    def __init__(self, group: dist.ProcessGroup, doing: str, patience: float | None = None) -> None:
        self._group = group
        self._doing = doing
        # The store is asked now: later, the one who waits may hold it.
        self._knows = _has_gloo(group) and not was_hung_up(group)
        self._began = self._looked = time.monotonic()
        self._limit = c10d.timeout_of(group)
        self._found = 0
        self._patience = patience

    @property
    def is_due(self) -> bool:
        """Whether the next :meth:`look` would be one.

        Each leaves a little behind until the group ends, so they are fewer in a long wait.
        """
        waited = self._looked - self._began
        pause = min(_LONGEST_SECONDS, max(_ARRIVAL_LOOK_SECONDS, waited / 20))
        return time.monotonic() - self._looked >= (_ARRIVAL_LOOK_SECONDS if self._found else pause)

    def look(self, missing: Sequence[int]) -> None:
        """Look whether ranks can still come, if it is time to.

        Args:
            missing: those waited for, as ranks of the group.

        Raises:
            PeerLostError: one is gone, or they did not come within the timeout of the group.
        """
        if not self.is_due:
            return
        self._looked = now = time.monotonic()
        gone = departed(self._group, missing) if self._knows else []
        self._found = self._found + 1 if gone else 0
        if self._found >= _LOOKS:
            raise peer_lost(self._group, self._doing, RuntimeError("it left before it came"), gone)
        waited = now - self._began
        if waited > self._limit:
            cause = RuntimeError(f"timed out after {self._limit:g} s")
            raise peer_lost(self._group, self._doing, cause, missing)
        if self._patience is not None and waited > self._patience:
            self._patience = None
            members = dist.get_process_group_ranks(self._group)
            _log.warning(
                "rank %s has waited %.0f s for ranks %s in %s; it goes on waiting for %.0f s",
                members[self._group.rank()],
                waited,
                [members[rank] for rank in missing],
                self._doing,
                self._limit - waited,
            )


def pauses() -> Iterator[None]:
    """Sleep between looks at what others write: shortly at first."""
    for seconds in itertools.chain((0.001, 0.002, 0.005, 0.01), itertools.repeat(0.02)):
        time.sleep(seconds)
        yield


def attended(
    call: Callable[[], T],
    group: dist.ProcessGroup,
    doing: str,
    peers: Sequence[int] | None = None,
) -> T:
    """Call what blocks until others have come, and give up when one of them is gone.

    On gloo the call is made in a thread of its own, which is left behind if it never ends.

    Args:
        call: what blocks.
        group: a process group that exists, which those waited for are in.
        doing: what it is for, such as ``"the making of a process group"``.
        peers: who is waited for, as ranks of the group; by default all others.

    Raises:
        PeerLostError: a peer is gone, or did not come in time.
    """
    if peers is None:
        peers = [rank for rank in range(group.size()) if rank != group.rank()]
    if not peers or not _has_gloo(group):
        with naming_lost_peer(group, doing):
            return call()
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # whatever it was, the caller must know
            future.set_exception(error)

    watch = PeerWatch(group, doing)
    threading.Thread(target=run, daemon=True, name="shardwise-meeting").start()
    while not concurrent.futures.wait([future], _ARRIVAL_LOOK_SECONDS / 10).done:
        watch.look(peers)
    try:
        return future.result()
    except RuntimeError as error:
        if isinstance(error, ShardwiseError) or not tells_of_lost_peer(error):
            raise
        raise peer_lost(group, doing, error, departed(group, peers)) from error


def gather_objects(mine: T, group: dist.ProcessGroup, doing: str) -> list[T]:
    """What every rank of a group says, in their order. All of them call it.

    Args:
        mine: what this rank says: small, and pickled.
        group: the process group.
        doing: what it is for, such as ``"the making of a mesh"``.

    Raises:
        PeerLostError: a peer is gone, or did not come in time.
    """
    found = [mine] * group.size()
    attended(lambda: dist.all_gather_object(found, mine, group=group), group, doing)
    return found


def made_together(make: Callable[[], T], what: str, ranks: Sequence[int] | None = None) -> T:
    """Make what ranks meet in, once all of them have come to make it.

    Args:
        make: makes it; every one of the ranks calls this at the same place.
        what: what it is, such as ``"a mesh of shape (2, 2)"``; the same on all ranks.
        ranks: who makes it; by default all.

    Raises:
        PeerLostError: one of the ranks is gone, or did not come in time.
        RanksDivergedError: another rank makes something else.
    """
    world = dist.group.WORLD
    assert world is not None
    members = tuple(range(world.size()) if ranks is None else ranks)
    if len(members) == 1 or not _WITH_STORE.search(dist.get_backend_config(world)):
        return make()
    doing = f"the making of {what}"
    peers = [rank for rank in members if rank != world.rank()]
    with naming_lost_peer(world, doing):  # the store may go with the rank that keeps it
        _arrive(world, members, peers, what)
    if torch.accelerator.is_available():
        # The current device belongs to a thread, and making a mesh may choose it.
        return make()
    return attended(make, world, doing, peers)


def new_group(
    ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """A new process group, made by its members alone.

    Args:
        ranks: the members, as ranks of the default group; each of them calls this.
        timeout: of its collectives; by default that of the default group.
        backend: by default that of the default group.

    Raises:
        PeerLostError: a member is gone, or did not come in time.
    """

    def make() -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
        )
        return made

    return made_together(make, f"a process group of ranks {list(ranks)}", ranks)


def _arrive(
    world: dist.ProcessGroup, members: tuple[int, ...], peers: Sequence[int], what: str
) -> None:
    """Say that this rank has come, and wait until all have."""
    counts = _met.setdefault(world, Counter())
    number = counts[members]
    counts[members] += 1
    name = f"shardwise/arrival/{zlib.crc32(repr(members).encode()):08x}/{number}"
    store = c10d.store_of(world)
    store.set(f"{name}/{world.rank()}", what)
    watch = PeerWatch(world, f"the making of {what}", PATIENCE_SECONDS)

    def compare(ranks: Sequence[int]) -> None:
        told = store.multi_get([f"{name}/{rank}" for rank in ranks]) if ranks else []
        for rank, theirs in zip(ranks, told, strict=True):
            if theirs.decode() != what:
                raise RanksDivergedError(
                    f"ranks have diverged: rank {world.rank()} makes {what} and rank {rank} makes "
                    f"{theirs.decode()}. All ranks have to make the same meshes and groups, in "
                    "the same order"
                )

    for _ in pauses():
        if store.check([f"{name}/{rank}" for rank in peers]):  # all of them, at once
            break
        if watch.is_due:
            here = [rank for rank in peers if store.check([f"{name}/{rank}"])]
            compare(here)
            watch.look([rank for rank in peers if rank not in here])
    compare(peers)


def _has_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return backend_name(group, _CPU) == "gloo"
    except ValueError:
        return False
