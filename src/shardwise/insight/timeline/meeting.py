"""Ranks that come together at the beginning and at the end of a recording, if they do.

A rank that is not recorded may be in a collective of its own, which one of ours would be mistaken
for. So ranks meet in the store, where no rank has to come. The last rank to come decides that all
take part; the first whose patience is over, that those do who are there. This is one compare and
set, so that all agree.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.transport.peers import Notice, Peers, polling

#: Waits until the first function returns true, or patience is over; the second one returns the
#: ranks that are missing.
Wait = Callable[[Callable[[], bool], Callable[[], Sequence[int]]], object]


@dataclass(frozen=True)
class Meeting:
    """A place in the store where ranks may come together once.

    Attributes:
        store: the store.
        name: of the meeting; the same on all ranks.
        rank: this rank.
        invited: the ranks that may come.
    """

    store: Any
    name: str
    rank: int
    invited: Sequence[int]

    def come(self, mine: str) -> None:
        """Say something to the others, and do not wait for what they say."""
        self.store.set(self._key(self.rank), mine)
        if self.store.add(f"{self.name}/come", 1) == len(self.invited):
            self._decide(self.invited)

    def meet(self, mine: str, wait: Wait) -> Mapping[int, str]:
        """Say something to the others, and wait for them.

        Args:
            mine: what this rank says.
            wait: waits for the others.

        Returns:
            What those ranks have said that take part, in order. This rank is not among them if they
            have decided before it came.
        """
        self.come(mine)
        if not self.is_decided():
            wait(self.is_decided, self.missing)
        if not self.is_decided():
            missing = self.missing()
            self._decide([rank for rank in self.invited if rank not in missing])
        part = json.loads(self.store.get(self._decision))
        said = self.store.multi_get([self._key(rank) for rank in part])
        return {rank: text.decode() for rank, text in zip(part, said, strict=True)}

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank in self.invited if not self.store.check([self._key(rank)])]

    @property
    def _decision(self) -> str:
        return f"{self.name}/decided"

    def _key(self, rank: int) -> str:
        return f"{self.name}/{rank}"

    def is_decided(self) -> bool:
        """Return whether it is known who takes part."""
        return bool(self.store.check([self._decision]))

    def _decide(self, part: Sequence[int]) -> None:
        self.store.compare_set(self._decision, "", json.dumps(list(part)))


def waiting_for(peers: Peers, doing: str, seconds: float) -> Wait:
    """Return a wait for other ranks of ``seconds``.

    It raises ``PeerLostError`` if one of those that are missing is gone.
    """

    def wait(decided: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        until = time.monotonic() + seconds
        over = polling(lambda: decided() or time.monotonic() > until)
        peers.watch(doing, Notice.NOTHING).wait(over, missing)

    return wait


@dataclass
class Turns:
    """Which recording is the next one.

    Attributes:
        number: of the next recording.
        late: whether this rank came too late for the last one.
    """

    number: int = 0
    late: bool = False

    def take(self, store: Any, rank: int, invited: Sequence[int]) -> Meeting:
        """Return the meeting at the beginning of the next recording.

        A rank that came too late may have left out a recording, and lags behind. So it goes on to
        the first meeting that is not decided.
        """
        while True:
            found = Meeting(store, f"shardwise/recording/{self.number}", rank, invited)
            self.number += 1
            if not (self.late and found.is_decided()):
                return found


def turns_of(peers: Peers) -> Turns:
    """Return whose turn it is among the ranks of a process group."""
    return peers.once(_turns)


def _turns(peers: Peers) -> Turns:
    return Turns()
