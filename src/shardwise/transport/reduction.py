"""A reduce-scatter out of point-to-point messages.

Every rank sends each peer that peer's chunks and receives its own chunks from all of them:

    rank 0: g0 = | a0 b0 |     sends b0 to rank 1, receives a1     shard = (a0 + a1) / 2
    rank 1: g1 = | a1 b1 |     sends a1 to rank 0, receives b0     shard = (b0 + b1) / 2

One contribution arrives in the shard itself, where the sum is made: with two ranks of one dtype
no other memory is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.transport.base import Reduce
from shardwise.transport.messages import Exchange, Message
from shardwise.transport.parcels import Parcel, pack, unpack
from shardwise.transport.scratch import Scratch
from shardwise.transport.sums import add_in_order, wire_dtype


class Reduction:
    """One reduce-scatter under way. Posting is in the constructor, the sums in :meth:`finish`.

    Args:
        rank: this rank in the group.
        peers: the other ranks, in the order in which to post.
        cut: the parcels of ``shards``.
        exchange: fresh, for ``len(cut)`` messages to and from every peer.
        scratch: lends the memory for what cannot arrive in the shards.
        fulls: as in :meth:`~shardwise.transport.base.Transport.reduce_scatter`.
        shards: as there.
        op: as there.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[int],
        cut: Sequence[Parcel],
        exchange: Exchange,
        scratch: Scratch,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        op: Reduce,
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._cut = cut
        self._exchange = exchange
        self._loan = scratch.borrow()
        self._fulls = fulls
        self._shards = shards
        self._divisor = len(peers) + 1 if op is Reduce.AVG else None
        self._sums = [self._receive(number, parcel) for number, parcel in enumerate(cut)]
        for number, parcel in enumerate(cut):
            self._send(number, parcel)
        exchange.start()

    def finish(self) -> None:
        """Wait, and add what has arrived.

        Raises:
            PeerLostError: a peer died, or did not answer in time.
        """
        last = len(self._cut) - 1
        for number, (parcel, (out, messages)) in enumerate(zip(self._cut, self._sums, strict=True)):
            # Every wait has its price: the last one is for what leaves, too.
            self._exchange.wait(messages if number < last else None)
            parts = {message.peer: message.tensor for message in messages}
            parts[self._rank] = pack([self._piece(i, self._rank) for i in parcel.indices])
            add_in_order(out, [parts[rank] for rank in sorted(parts)], self._divisor)
            if parcel.packed:
                unpack(out, [self._result(i) for i in parcel.indices])
        self._loan.end()

    def _receive(self, number: int, parcel: Parcel) -> tuple[torch.Tensor, list[Message]]:
        """Prepare the receives of a parcel; return where its sum goes, and the messages."""
        results = [self._result(i) for i in parcel.indices]
        numel = sum(result.numel() for result in results)
        out = self._loan.take(numel, results[0].dtype) if parcel.packed else results[0]
        wire = self._wire(parcel)
        # The sum starts with rank 0's contribution (on rank 0 with rank 1's: a + b == b + a).
        starts = 0 if self._rank else 1
        messages = []
        for peer in self._peers:
            direct = peer == starts and wire == out.dtype
            landing = out if direct else self._loan.take(numel, wire)
            messages.append(self._exchange.recv(landing, peer, number))
        return out, messages

    def _send(self, number: int, parcel: Parcel) -> None:
        wire = self._wire(parcel)
        for peer in self._peers:
            pieces = [self._piece(i, peer) for i in parcel.indices]
            leaving = pieces[0]
            if parcel.packed or leaving.dtype != wire:
                leaving = self._loan.take(sum(piece.numel() for piece in pieces), wire)
                leaving.copy_(pack(pieces))
            self._exchange.send(leaving, peer, number)

    def _piece(self, i: int, rank: int) -> torch.Tensor:
        """What a full holds of a rank's chunk: less, or nothing, where its tail is missing."""
        chunk = self._shards[i].numel()
        return self._fulls[i][rank * chunk : (rank + 1) * chunk]

    def _result(self, i: int) -> torch.Tensor:
        return self._shards[i][: self._piece(i, self._rank).numel()]

    def _wire(self, parcel: Parcel) -> torch.dtype:
        i = parcel.indices[0]
        return wire_dtype(self._fulls[i], self._shards[i])
