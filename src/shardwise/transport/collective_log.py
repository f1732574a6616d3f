"""The collectives that a rank has called, to compare with its peers' when one does not end.

Ranks that call different collectives wait for each other forever: one for a gather that the other
never begins, say. Every rank notes what it calls. A rank that has waited for seconds publishes its
notes in the store of the process group and reads those of its peers: where two ranks differ at the
same call, they have diverged, and both say so. While all goes well this costs a note a call.
"""

from __future__ import annotations

import json
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch import c10d
from shardwise.errors import RanksDivergedError
from shardwise.transport.base import Label

# Those that may be under way when ranks wait for each other. What is older is over, well or not.
_REMEMBERED = 16

#: How many logs a group has had: each publishes under other names.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Call:
    """One kind of collective that a rank makes, as often as it makes it.

    Attributes:
        text: for people: ``"the all-gather of model.layers.3"``.
        mark: a number that differs where anything differs, the same in every process.
    """

    def __init__(self, collective: str, tensors: Sequence[torch.Tensor], label: Label) -> None:
        self.text = f"the {collective} of {label.name or f'{len(tensors)} tensors'}"
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
        numels = [tensor.numel() for tensor in tensors]
        self.size = f"{len(numels)} tensors, {sum(numels)} elements of {', '.join(dtypes)}"
        self.detail = label.detail
        content = f"{self.text} {numels} {[str(t.dtype) for t in tensors]} {self.detail}"
        self.mark = zlib.crc32(content.encode())


class CollectiveLog:
    """What this rank has called on one process group.

    Args:
        group: the process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group_ref = weakref.ref(group)
        self._kinds: dict[tuple[object, ...], Call] = {}
        self._calls: deque[Call] = deque(maxlen=_REMEMBERED)
        self._count = 0
        self._published = 0
        self._number = _made[group] = _made.get(group, 0) + 1

    def note(self, collective: str, tensors: Sequence[torch.Tensor], label: Label) -> Call:
        """Note that a collective is being called."""
        key = (collective, label, *((tensor.numel(), tensor.dtype) for tensor in tensors))
        call = self._kinds.get(key)
        if call is None:
            call = self._kinds[key] = Call(collective, tensors, label)
        self._calls.append(call)
        self._count += 1
        return call

    def compare(self) -> None:
        """Publish the calls of this rank, and compare them with what peers have published.

        Raises:
            RanksDivergedError: a peer called something else where this rank called what it did.
        """
        me = self._group.rank()
        if self._published != self._count:
            first = self._count - len(self._calls)
            calls = [
                (first + i, call.mark, call.text, call.size, call.detail)
                for i, call in enumerate(self._calls)
            ]
            self._store.set(self._key(me), json.dumps(calls))
            self._published = self._count
        for peer in range(self._group.size()):
            if peer != me and self._store.check([self._key(peer)]):
                self._check(peer, json.loads(self._store.get(self._key(peer))))

    def compare_if_possible(self) -> None:
        """As :meth:`compare`; but the store may have gone with the rank that kept it."""
        try:
            self.compare()
        except RanksDivergedError:
            raise
        except RuntimeError:
            return

    def _check(self, peer: int, theirs: list[tuple[int, int, str, str, str]]) -> None:
        first = self._count - len(self._calls)
        for number, mark, text, size, detail in theirs:
            if not first <= number < self._count or self._calls[number - first].mark == mark:
                continue
            ours = self._calls[number - first]
            members = dist.get_process_group_ranks(self._group)
            me, other = members[self._group.rank()], members[peer]
            raise RanksDivergedError(
                f"ranks have diverged: as collective number {number} over ranks {members}, rank "
                f"{me} called {ours.text} ({ours.size}) and rank {other} called {text} ({size})"
                f"{_difference(ours.detail, detail)}. All ranks have to run the same modules in "
                "the same order, with the same parameters and dtypes; where they use different "
                "parameters in one step, set_reduce_scatter_unused_params(True)"
            )

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise RuntimeError("the process group has been destroyed")
        return group

    @property
    def _store(self) -> Any:
        return c10d.store_of(self._group)

    def _key(self, rank: int) -> str:
        return f"shardwise/calls/{self._number}/{rank}"


def _difference(ours: str, theirs: str) -> str:
    """The first line in which two details differ, for people."""
    for mine, other in zip(
        [*ours.splitlines(), "nothing more"], [*theirs.splitlines(), "nothing more"], strict=False
    ):
        if mine != other:
            return f"; the first parameter in which they differ: {mine}, there {other}"
    return ""
