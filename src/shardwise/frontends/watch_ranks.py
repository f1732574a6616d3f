"""Ranks of torch's own FSDP2 that wait for each other, told apart instead of left hanging.

Each rank logs the collectives of its groups, as transports of our runtime do. On gloo, ranks agree
on each collective before it starts, in a process group of its own: where sizes differ, gloo writes
what it did not ask for, or ends the process. A rank that waits for seconds compares its log with
those of its peers. A thread on each rank answers when another one has waited too long: it says what
this rank does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch.fsdp import torch_groups
from shardwise.base.arguments import check_arguments, check_seconds
from shardwise.base.errors import RanksDivergedError
from shardwise.frontends.torch_groups import Launch, collective_log, observed
from shardwise.transport.collective_log import CollectiveLog
from shardwise.transport.peers import Peers, new_group
from shardwise.transport.waiter import Launched, Waiter

_LOOK_SECONDS = 1.0  # between two looks of the thread
_ANSWER_SECONDS = 5.0  # that ranks have to answer; more than the looks of their threads
_LIBRARIES = (
    *(module.__path__[0] for module in (torch, sys.modules["shardwise"])),
    contextlib.__file__,
)

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def watch_ranks(model: nn.Module, *, seconds: float = 300.0) -> Iterator[None]:
    """Raise an error, in place of a hang, when ranks of torch's FSDP2 wait for each other.

    ::

        with shardwise.watch_ranks(model):
            train(model)

    For models that ``torch.distributed.fsdp.fully_shard`` has sharded; our own runtime does this
    without being asked. All ranks of the default process group call it at the same place, for the
    same model. On gloo, ranks meet before each collective, and all raise if they are about to call
    different ones. Whatever keeps a rank from coming, once another has waited for ``seconds``, all
    ranks report where they are: the module, the collective, and the line of the program. A rank
    that waits on the host raises then; on accelerators, where the host goes on, each rank logs the
    report, and the process group's own timeout ends the job.

    Args:
        model: the sharded model.
        seconds: how long a rank waits before all are asked. Longer than anything that one rank
            does alone, such as saving.

    Raises:
        ValueError: ``seconds`` is not above 0, or torch's FSDP2 shards nothing in the model.
        RanksDivergedError: ranks have called different collectives, or one has waited for too long.
        PeerLostError: a rank is gone.
    """
    check_arguments(watch_ranks, locals())
    check_seconds("seconds", seconds)
    groups = torch_groups(model)
    if not groups:
        raise ValueError(
            f"model: found a {type(model).__name__} in which torch's fully_shard shards nothing; "
            "call it first, or drop watch_ranks: other runtimes have no need of it"
        )
    watch = _Watch(Peers(), seconds)
    for mesh in dict.fromkeys(param.device_mesh for each in groups for _, param in each.params):
        for group in mesh.get_all_groups():
            if Peers(group).backend(torch.device(mesh.device_type)).sends_messages:
                Peers(group).once(_agreement)
    try:
        try:
            watch.start()
            with observed(model, watch):
                yield
        finally:
            watch.end()
    finally:
        watch.end()  # Ctrl-C may have ended the first attempt


class _Watch:
    """What this rank does, and the thread that tells it to others.

    Args:
        peers: all ranks.
        seconds: how long a rank waits before all are asked.
    """

    def __init__(self, peers: Peers, seconds: float) -> None:
        self._peers = peers
        self._seconds = seconds
        self._key = f"shardwise/watch-ranks/{next(peers.once(_numbers))}"
        self._store = self._peers.store  # a thread of a simulated rank does not find it
        self._thread = threading.Thread(target=self._look, daemon=True, name="shardwise-watch")
        self._main = threading.get_ident()
        self._is_over = threading.Event()
        self._has_answered = False
        self._last = "no collective yet"
        self._waiters: weakref.WeakKeyDictionary[dist.ProcessGroup, Waiter] = (
            weakref.WeakKeyDictionary()
        )
        self._began = 0.0
        self._under_way: tuple[dist.Work, str, float] | None = None

    def start(self) -> None:
        """Let the thread look."""
        self._thread.start()

    def end(self) -> None:
        """End the thread, if it has been started."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(_ANSWER_SECONDS)

    # -- what is called around a collective -------------------------------------------------------

    def launch(
        self, launch: Launch, tensors: tuple[torch.Tensor, torch.Tensor], peers: Peers, doing: str
    ) -> Launched | None:
        """Launch a collective that this rank's host or thread waits for."""
        self._last, began = doing, time.monotonic()
        if not peers.backend(tensors[0].device).sends_messages:
            work: dist.Work = launch(True)
            self._under_way = work, doing, began
            return work
        log = peers.once(collective_log)
        self._agree(peers.once(_agreement), log, doing)
        return _OnHost(functools.partial(self.wait, launch(True), peers, log, doing))

    def _agree(self, peers: Peers, log: CollectiveLog, doing: str) -> None:
        """Meet before a collective, and raise if ranks are about to call different ones."""
        mine = torch.tensor(log.newest)
        every = [torch.empty_like(mine) for _ in range(peers.size)]
        work = dist.all_gather(every, mine, group=peers.group, async_op=True)
        self.wait(work, peers, log, doing)
        if all(torch.equal(each, mine) for each in every):
            return
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until:
            log.compare()  # raises, as soon as a peer that differs has published its log
            time.sleep(0.05)
        raise RanksDivergedError(f"found {doing} on this rank, expected the same on all ranks")

    def wait(self, work: dist.Work, peers: Peers, log: CollectiveLog, doing: str) -> None:
        """Wait on the host, and compare with the others every few seconds."""
        self._began = time.monotonic()
        if peers.group not in self._waiters:
            compare = functools.partial(self._compare, log)
            self._waiters[peers.group] = Waiter(peers, compare)
        self._waiters[peers.group].wait([(work, None)], doing)

    def _compare(self, log: CollectiveLog) -> None:
        log.compare()
        waited = time.monotonic() - self._began
        if waited > self._seconds:
            raise self._report(self._last, waited)

    # -- when a rank has waited for too long ------------------------------------------------------

    def _report(self, doing: str, waited: float) -> RanksDivergedError:
        """Ask all ranks where they are, and make the error that says it."""
        store, rank = self._store, self._peers.rank
        store.set(f"{self._key}/asked", str(rank))
        self._answer()
        until = time.monotonic() + _ANSWER_SECONDS
        found: dict[int, str] = {}
        while len(found) < self._peers.size and time.monotonic() < until:
            for each in set(range(self._peers.size)) - set(found):
                if store.check([f"{self._key}/{each}"]):
                    found[each] = json.loads(store.get(f"{self._key}/{each}"))
            time.sleep(0.05)
        lines = [
            f"rank {each}: {found.get(each, 'no answer: it has ended, or its process is stopped')}"
            for each in range(self._peers.size)
        ]
        return RanksDivergedError(
            f"rank {rank} has waited {waited:.0f} s for {doing}. Where all ranks are:\n"
            + "\n".join(lines)
            + "\nAll ranks have to run the same modules in the same order. If one only takes "
            f"longer than {self._seconds:g} s by itself, give watch_ranks more seconds"
        )

    def _answer(self) -> None:
        if not self._has_answered:
            self._has_answered = True
            text = f"last {self._last}; now at {line_of(sys._current_frames().get(self._main))}"
            self._store.set(f"{self._key}/{self._peers.rank}", json.dumps(text))

    def _look(self) -> None:
        """Answer when another rank asks, and ask when a device has worked for too long."""
        while not self._is_over.wait(_LOOK_SECONDS):
            try:
                if self._store.check([f"{self._key}/asked"]):
                    self._answer()
                    return
                if (found := self._under_way) is not None:
                    work, doing, began = found
                    if work.is_completed():
                        self._under_way = None
                    elif time.monotonic() - began > self._seconds:
                        _log.critical("%s", self._report(doing, time.monotonic() - began))
                        return
            except RuntimeError:  # the store has gone with the rank that keeps it
                return


class _OnHost:
    """A collective that the host waits for."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def _agreement(peers: Peers) -> Peers:
    """Make a process group of the same ranks, for what they agree on."""
    return Peers(new_group(peers.members))


def _numbers(peers: Peers) -> Iterator[int]:
    """Count the watches of a job."""
    return itertools.count(1)


def line_of(frame: FrameType | None) -> str:
    """Say which line of the user's program runs: the innermost one outside of torch and of ours."""
    found = "no line of Python"
    for each, line in traceback.walk_stack(frame):
        found = f"{each.f_code.co_filename}:{line} in {each.f_code.co_name}"
        if not each.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            break
    return found
