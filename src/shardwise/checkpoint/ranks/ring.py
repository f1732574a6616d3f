"""Which rank keeps what for which host: hosts in a ring, and what each of their ranks copies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.base.boxes import Box
from shardwise.checkpoint.disk.entries import TensorEntry
from shardwise.checkpoint.disk.host_memory import KeptPart
from shardwise.checkpoint.ranks.moving import holders_of

#: Versions that are in memory at the most, one of them complete.
VERSIONS = 2

#: Of a tensor's name, and of the part of it.
Piece = tuple[str, Box]


@dataclass(frozen=True)
class ReplicaCost:
    """What keeping a state in memory takes.

    Attributes:
        memory: bytes on this rank's host, for two versions.
        sent: bytes that this rank sends, each time.
        hosts: the number of hosts.
    """

    memory: int
    sent: int
    hosts: int


def folder_of(host: str) -> str:
    """A name for a host that is a name for a folder."""
    return hashlib.sha256(host.encode()).hexdigest()[:16]


class HostRing:
    """The hosts of ranks, each with the next one as its neighbor.

    Args:
        names: the name of each rank's host.

    Attributes:
        targets: for each rank, the one on the next host that keeps what it holds; ``None``: all
            ranks are on one host.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            self._ranks.setdefault(name, []).append(rank)
        hosts = [*self._ranks]
        after = dict(zip(hosts, hosts[1:] + hosts[:1], strict=True))
        self.targets: list[int | None] = [None] * len(names)
        for name, mine in self._ranks.items():
            theirs = self._ranks[after[name]]
            for at, rank in enumerate(mine if len(hosts) > 1 else ()):
                self.targets[rank] = theirs[at % len(theirs)]

    def locals_of(self, rank: int) -> list[int]:
        """All ranks of a rank's host."""
        return self._ranks[self._names[rank]]

    def sources(self, rank: int) -> list[int]:
        """The ranks of another host for which a rank keeps what they hold."""
        return [source for source, target in enumerate(self.targets) if target == rank]

    def deal(self, entries: Iterable[TensorEntry]) -> list[dict[KeptPart, list[Piece]]]:
        """Deal out what ranks hold: of a host, one copies each piece.

        Args:
            entries: the tensors, where the file of a piece is the rank that holds it.

        Returns:
            For each rank, what it copies: what its host alone has, and what another has as well.
        """
        dealt: list[dict[KeptPart, list[Piece]]] = [
            {part: [] for part in KeptPart} for _ in self._names
        ]
        for entry in entries:
            for box, ranks in holders_of(entry).items():
                first: dict[str, int] = {}
                for rank in sorted(ranks):
                    first.setdefault(self._names[rank], rank)
                part = KeptPart.UNIQUE if len(first) == 1 else KeptPart.COMMON
                for rank in first.values():
                    dealt[rank][part].append((entry.fqn, box))
        return dealt

    def costs(
        self, dealt: Iterable[Mapping[KeptPart, Sequence[Piece]]], itemsizes: Mapping[str, int]
    ) -> Iterator[ReplicaCost]:
        """Say what it takes, for each rank.

        Args:
            dealt: what each rank copies.
            itemsizes: bytes of an element, by the tensor's name.
        """
        nbytes = [
            {part: sum(box.numel * itemsizes[n] for n, box in each[part]) for part in KeptPart}
            for each in dealt
        ]
        kept = dict.fromkeys(self._ranks, 0)
        for rank, (target, mine) in enumerate(zip(self.targets, nbytes, strict=True)):
            kept[self._names[rank]] += sum(mine.values())
            if target is not None:
                kept[self._names[target]] += mine[KeptPart.UNIQUE]
        for name, target, mine in zip(self._names, self.targets, nbytes, strict=True):
            sent = 0 if target is None else mine[KeptPart.UNIQUE]
            yield ReplicaCost(VERSIONS * kept[name], sent, len(self._ranks))
