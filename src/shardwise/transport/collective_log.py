"""A log of the collectives that a rank has called, to compare between ranks that wait too long.

What is logged is also reported to what watches this process (:mod:`shardwise.base.observe`).

Ranks that call different collectives wait for each other forever: one waits for a gather, say,
that the other never begins. So every rank logs what it calls. A rank that has waited for seconds
publishes its log in the store of the process group and reads those of its peers. If two ranks
differ at the same call they have diverged, and both say so. Until then a call costs one entry.
"""

from __future__ import annotations

import itertools
import json
import operator
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from shardwise.base import observe
from shardwise.base.errors import RanksDivergedError
from shardwise.base.observe import Activity
from shardwise.transport.base import Label
from shardwise.transport.peers import Peers

#: Entries to keep: those that may be under way when ranks wait for each other. Older ones are over.
_CAPACITY = 16
_NUMEL, _DTYPE = operator.methodcaller("numel"), operator.attrgetter("dtype")


class CollectiveLog:
    """The collectives that this rank has called through one transport.

    Args:
        peers: the ranks of its process group.
        transport: the name of the transport, for reports.
    """

    def __init__(self, peers: Peers, transport: str = "") -> None:
        self._peers = peers
        self._transport = transport
        self._kinds: dict[tuple[object, ...], LoggedCall] = {}
        self._calls: deque[LoggedCall] = deque(maxlen=_CAPACITY)
        self._count = 0
        self._published = 0
        self._number = next(peers.once(_numbers))

    def add(self, collective: str, tensors: Sequence[torch.Tensor], label: Label) -> LoggedCall:
        """Log that a collective is being called.

        Args:
            collective: its name, such as ``"all-gather"``.
            tensors: the tensors whose sizes and dtypes are equal on all ranks.
            label: the caller's name for it.
        """
        key = (collective, label, *map(_NUMEL, tensors), *map(_DTYPE, tensors))
        call = self._kinds.get(key)
        if call is None:
            call = self._kinds[key] = LoggedCall(collective, tensors, label)
        self._calls.append(call)
        self._count += 1
        return call

    @property
    def newest(self) -> tuple[int, int]:
        """The number of the newest call, from 1, and its digest; equal on ranks that agree."""
        return self._count, self._calls[-1].digest

    def issue(self, call: LoggedCall, launches: int, nbytes: Callable[[], int]) -> Issued:
        """Report that a call that was logged is issued now.

        Args:
            call: what :meth:`add` returned: an all-gather, a reduce-scatter or an all-reduce.
            launches: as in :meth:`shardwise.base.observe.Observer.collective`.
            nbytes: computes what it says there, if anybody watches.
        """
        if not observe.is_observed():
            return UNWATCHED
        wire = self._peers.wire(self._transport)
        kind = Activity(call.collective)
        number = observe.collective(kind, call.name, wire, nbytes(), launches)
        return Issued(call.name, wire.dimension, number)

    def waiting(self, call: LoggedCall) -> Issued:
        """Make the block in which this thread waits for peers before it can issue a call."""
        if not observe.is_observed():
            return UNWATCHED
        return Issued(call.name, self._peers.dimension, 0)

    def compare(self) -> None:
        """Publish this log, and compare it with what peers have published.

        Does nothing if the store has gone with the rank that kept it.

        Raises:
            RanksDivergedError: a peer's entry differs from this rank's of the same number.
        """
        try:
            self._publish_and_compare()
        except RanksDivergedError:
            raise
        except RuntimeError:
            return

    def _publish_and_compare(self) -> None:
        store = self._peers.store
        if self._published != self._count:
            first = self._count - len(self._calls)
            entries = [
                (first + i, call.digest, call.text, call.size, call.detail)
                for i, call in enumerate(self._calls)
            ]
            store.set(self._key(self._peers.rank), json.dumps(entries))
            self._published = self._count
        for peer in self._peers.others:
            if store.check([self._key(peer)]):
                self._check(peer, json.loads(store.get(self._key(peer))))

    def _check(self, peer: int, theirs: list[tuple[int, int, str, str, str]]) -> None:
        first = self._count - len(self._calls)
        for number, digest, text, size, detail in theirs:
            if not first <= number < self._count or self._calls[number - first].digest == digest:
                continue
            ours = self._calls[number - first]
            members = self._peers.members
            raise RanksDivergedError(
                f"ranks have diverged: as collective number {number} over ranks {members}, rank "
                f"{members[self._peers.rank]} called {ours.text} ({ours.size}) and rank "
                f"{members[peer]} called {text} ({size}){_difference(ours.detail, detail)}. All "
                "ranks have to run the same modules in the same order, with the same parameters, "
                "dtypes and wires, and to freeze the same ones"
            )

    def _key(self, rank: int) -> str:
        return f"shardwise/collective-log/{self._number}/{rank}"


class Issued:
    """A collective under way, as it is reported. Inside a ``with`` block, the thread waits for it.

    Args:
        name: of the group.
        dimension: of the mesh.
        number: of the collective; 0 if it is not issued yet, or nothing watches.
    """

    __slots__ = ("_began", "_dimension", "_name", "_number", "_waiting")

    def __init__(self, name: str, dimension: str, number: int) -> None:
        self._name = name
        self._dimension = dimension
        self._number = number
        self._waiting = 0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        if self is not UNWATCHED:
            self._waiting = observe.begin(Activity.WAIT, self._name, self._dimension)

    def __exit__(self, *_: object) -> None:
        observe.count_wait(time.perf_counter() - self._began)
        if self is not UNWATCHED:
            observe.end(self._waiting)

    def end(self) -> None:
        """Report that it has been waited for."""
        observe.end(self._number)


#: What is not watched.
UNWATCHED = Issued("", "", 0)


class LoggedCall:
    """One kind of collective that a rank calls, any number of times.

    Attributes:
        collective: its name, such as ``"all-gather"``.
        name: the caller's name for it.
        text: for messages, such as ``"the all-gather of model.layers.3"``.
        size: for messages: how many tensors and elements, and of which dtypes.
        detail: one line per tensor, from the caller.
        digest: 32 bits that differ if anything differs; the same in every process.
    """

    def __init__(self, collective: str, tensors: Sequence[torch.Tensor], label: Label) -> None:
        count = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
        self.collective = collective
        self.name = label.name
        self.text = f"the {collective} of {label.name or count}"
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
        numels = [tensor.numel() for tensor in tensors]
        wire = f", wire {label.wire}" if label.wire else ""
        self.size = f"{count}, {sum(numels)} elements of {', '.join(dtypes)}{wire}"
        self.detail = label.detail
        content = f"{self.text} {numels} {[str(t.dtype) for t in tensors]} {self.detail}{wire}"
        self.digest = zlib.crc32(content.encode())


def _numbers(peers: Peers) -> Iterator[int]:
    """Count the logs of a process group: each publishes under other names."""
    return itertools.count(1)


def _difference(ours: str, theirs: str) -> str:
    """Describe the first line in which two details differ."""
    end = "nothing more"
    for mine, other in zip([*ours.splitlines(), end], [*theirs.splitlines(), end], strict=False):
        if mine != other:
            return f"; the first parameter in which they differ: {mine}, there {other}"
    return ""
