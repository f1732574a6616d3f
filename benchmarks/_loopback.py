"""An all-to-all among replicas that one process plays, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Label
from shardwise.transport.collective_log import LoggedCall
from shardwise.transport.runner import Exchange


@dataclass(frozen=True)
class _Offer:
    """Rows, one for each replica, until all have taken theirs."""

    rows: list[torch.Tensor]
    awaited_by: set[int]


class Loopback(AllToAll):
    """One replica's side of an all-to-all. Rows arrive when the receiver waits for them.

    So all replicas start an exchange before any of them waits for it.

    Args:
        rank: of the replica.
        sides: of all replicas, by rank; each adds itself.
    """

    def __init__(self, rank: int, sides: list[Loopback]) -> None:
        self.rank = rank
        self.bytes_sent = 0
        self._sides = sides
        self._offered: dict[int, _Offer] = {}
        self._offers = 0
        sides.append(self)

    @classmethod
    def among(cls, ranks: int) -> list[Loopback]:
        """Return the sides of so many replicas."""
        sides: list[Loopback] = []
        for rank in range(ranks):
            cls(rank, sides)
        for side in sides:
            side.world_size = ranks
        return sides

    def log(self, received: torch.Tensor, label: Label) -> LoggedCall:
        """Return a call that nobody compares."""
        return LoggedCall("all-to-all", [received], label)

    def start(
        self,
        rows: torch.Tensor,
        received: torch.Tensor,
        label: Label,
        call: LoggedCall | None = None,
        sizes: object = None,
    ) -> Exchange:
        """Let the others find the rows."""
        return self._offer([row.clone() for row in rows], received)

    def share(
        self,
        row: torch.Tensor,
        received: torch.Tensor,
        label: Label,
        call: LoggedCall | None = None,
    ) -> Exchange:
        """Let the others find the row."""
        return self._offer([row.clone()] * self.world_size, received)

    def _offer(self, rows: list[torch.Tensor], received: torch.Tensor) -> Exchange:
        self.bytes_sent += sum(row.nbytes for row in rows) - rows[self.rank].nbytes
        number = self._offers
        self._offers += 1
        self._offered[number] = _Offer(rows, set(range(self.world_size)))

        def arrive() -> None:
            for rank, side in enumerate(self._sides):
                offer = side._offered[number]
                received[rank].copy_(offer.rows[self.rank])
                offer.awaited_by.discard(self.rank)
                if not offer.awaited_by:
                    del side._offered[number]

        return Exchange(arrive, arrive)
