"""The average of a vector over the ranks of a group, encoded on the wire, alike on all to the bit.

    1.  each rank cuts its vector into as many chunks as there are ranks, encodes them, and sends
        chunk r to rank r
    2.  rank r decodes what it got, adds up in the order of ranks, divides, encodes the result, and
        sends it to all; all decode the same bytes

A rank sends 2 (R - 1) / R of its encoded vector, as in a ring all-reduce, whatever the format. A
value is encoded twice: its error is at most the mean of the ranks' errors in 1 plus the one in 2.
"""

from __future__ import annotations

import torch

from shardwise.diloco.wire import Codec
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Label, Work


class Average:
    """An average under way. Made alike on all ranks of the group; the first half begins at once.

    Args:
        vector: fp32, 1-D; may change afterwards.
        swap: moves rows between the ranks.
        codec: what travels.
        label: of the vector, equal on all ranks.
        error: fp32, as long as the vector: what encoding this rank's contributions has lost before.
            It is sent along with this vector, and becomes what encoding loses now once the average
            is known. ``None``: what is lost is lost, as it is in the second encoding.
    """

    def __init__(
        self,
        vector: torch.Tensor,
        swap: AllToAll,
        codec: Codec,
        label: str,
        error: torch.Tensor | None = None,
    ) -> None:
        ranks = swap.world_size
        self._numel = vector.numel()
        self._swap = swap
        self._codec = codec
        self._label = label
        self._error = error
        self._chunk = -(-self._numel // (ranks * codec.block)) * codec.block
        self._result: torch.Tensor | None = None
        self._work: Work | None = None
        self._second = False
        if ranks == 1 or not self._numel:
            self._result = vector.clone()
            return
        rows = vector.new_zeros(ranks, self._chunk)
        flat = rows.view(-1)[: self._numel]
        flat.copy_(vector)
        if error is not None:
            flat.add_(error)
        encoded = codec.encode(rows)
        if error is not None:
            self._lost = flat - codec.decode(encoded).view(-1)[: self._numel]
        self._send(encoded, "contributions")

    def advance(self) -> None:
        """Begin the second half, once the first has ended. Does nothing where it has begun.

        Raises:
            PeerLostError: a peer is lost.
        """
        if self._work is None or self._second:
            return
        self._work.wait()
        total: torch.Tensor | None = None
        for rank in range(self._swap.world_size):
            decoded = self._codec.decode(self._received[rank : rank + 1])
            total = decoded.clone() if total is None else total.add_(decoded)
        assert total is not None
        total.div_(self._swap.world_size)
        encoded = self._codec.encode(total)
        self._send(encoded.expand(self._swap.world_size, -1), "average")
        self._second = True

    def wait(self) -> torch.Tensor:
        """Finish.

        Returns:
            fp32, 1-D, as long as the vector; the same bits on all ranks.

        Raises:
            PeerLostError: a peer is lost.
        """
        if self._result is None:
            self.advance()
            assert self._work is not None
            self._work.wait()
            self._result = self._codec.decode(self._received).view(-1)[: self._numel]
            self._work = None
            del self._received
            if self._error is not None:
                self._error.copy_(self._lost)
                del self._lost
        return self._result

    def _send(self, rows: torch.Tensor, what: str) -> None:
        self._received = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
        label = Label(f"{self._label}, {what}")
        self._work = self._swap.start(rows, self._received, label)
