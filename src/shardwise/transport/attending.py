"""Waiting for ranks that have not come yet, and giving up where one never will.

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
import itertools
import logging
import re
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise import _torch
from shardwise.errors import RanksDivergedError
from shardwise.transport.c10d import backend_name
from shardwise.transport.peers import departed, naming_lost_peer, peer_lost, was_hung_up

T = TypeVar("T")

_LOOK_SECONDS = 1.0
# So often is a rank to be found gone: what it said before it left may still be on its way.
_LOOKS = 3
_PATIENCE_SECONDS = 30.0
_CPU = torch.device("cpu")
# Others (those of tests and plans) have no store in which ranks could meet.
_WITH_STORE = re.compile("gloo|nccl|xccl|hccl|undefined")

_log = logging.getLogger(__name__)

#: How often each set of ranks has met, by default process group: each time under another name.
_met: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


class Watch:
    """Looks after the ranks that somebody waits for, as often as it is asked.

    Args:
        group: a process group that exists.
        doing: what is waited for, such as ``"the making of a process group"``.
    """

    def __init__(self, group: dist.ProcessGroup, doing: str) -> None:
        self._group = group
        self._doing = doing
        # The store is asked now: later, the one who waits may hold it.
        self._knows = _has_gloo(group) and not was_hung_up(group)
        self._began = self._looked = time.monotonic()
        self._limit = _torch.timeout_of(group)
        self._found = 0
        self._warned = False

    def look(self, missing: Sequence[int]) -> None:
        """Look whether ranks can still come. Looks once a second at most.

        Args:
            missing: those waited for, as ranks of the group.

        Raises:
            PeerLostError: one is gone, or they did not come within the timeout of the group.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        gone = departed(self._group, missing) if self._knows else []
        self._found = self._found + 1 if gone else 0
        if self._found >= _LOOKS:
            raise peer_lost(self._group, self._doing, RuntimeError("it left before it came"), gone)
        waited = now - self._began
        if waited > self._limit:
            cause = RuntimeError(f"timed out after {self._limit:g} s")
            raise peer_lost(self._group, self._doing, cause, missing)
        if waited > _PATIENCE_SECONDS and not self._warned:
            self._warned = True
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
    with naming_lost_peer(group, doing):
        if not peers or not _has_gloo(group):
            return call()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # whatever it was, the caller must know
                future.set_exception(error)

        watch = Watch(group, doing)
        threading.Thread(target=run, daemon=True, name="shardwise-meeting").start()
        while not concurrent.futures.wait([future], _LOOK_SECONDS / 10).done:
            watch.look(peers)
        return future.result()


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
    store = _torch.store_of(world)
    store.set(f"{name}/{world.rank()}", what)
    watch = Watch(world, f"the making of {what}")
    missing = list(peers)
    for _ in pauses():
        here = [rank for rank in missing if store.check([f"{name}/{rank}"])]
        for rank in here:
            theirs = store.get(f"{name}/{rank}").decode()
            if theirs != what:
                raise RanksDivergedError(
                    f"ranks have diverged: rank {world.rank()} makes {what} and rank {rank} makes "
                    f"{theirs}. All ranks have to make the same meshes and groups, in the same "
                    "order"
                )
        missing = [rank for rank in missing if rank not in here]
        if not missing:
            return
        watch.look(missing)


def _has_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return backend_name(group, _CPU) == "gloo"
    except ValueError:
        return False
