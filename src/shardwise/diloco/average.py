"""The average of a vector over the ranks of a group, encoded on the wire, bitwise equal on all.

It is an :class:`~shardwise.transport.encoded_sums.EncodedAllReduce` whose second step begins when
the caller says so, between two of its training steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.diloco.settings import WireFormat
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Label, Reduce
from shardwise.transport.codecs import Room, codec_of
from shardwise.transport.encoded_sums import EncodedAllReduce, Encoding, Tally


class Average:
    """An average in progress, which every rank of the group creates; the first half starts at once.

    Args:
        vector: fp32, 1-D; may change afterwards.
        all_to_all: moves rows between the ranks.
        wire: the format of what is sent.
        label: names the vector in errors; equal on all ranks.
        error: fp32, as long as the vector: what encoding has lost of this rank's earlier
            contributions and averages. It is added to those of this vector, and replaced by what
            encoding loses now once the average is known. ``None`` drops what is lost.
        sections: elements of the parts that are encoded by themselves, of which each rank averages
            a share; by default the vector is one.
    """

    def __init__(
        self,
        vector: torch.Tensor,
        all_to_all: AllToAll,
        wire: WireFormat,
        label: str,
        error: torch.Tensor | None = None,
        sections: Sequence[int] | None = None,
    ) -> None:
        ranks = all_to_all.world_size
        self._vector = vector.clone()
        self._reduction: EncodedAllReduce | None = None
        self._is_combined = False
        self._error = error
        if ranks == 1 or not vector.numel():
            return
        encoding = Encoding(codec_of(wire), wire.value, Tally())
        self._room = Room(vector.device)
        # If a replica is lost, nothing was: the next exchange repeats this one.
        self._lost = None if error is None else error.clone()
        sizes = [vector.numel()] if sections is None else list(sections)
        nbytes = EncodedAllReduce.row_nbytes(encoding, sizes, ranks)
        self._reduction = EncodedAllReduce(
            encoding,
            all_to_all,
            torch.split(self._vector, sizes),
            Reduce.AVG,
            self._room,
            torch.empty(2, ranks, nbytes, dtype=torch.uint8, device=vector.device),
            Label(label),
            () if self._lost is None else torch.split(self._lost, sizes),
        )

    def advance(self) -> None:
        """Start the second half, after waiting for the first. A no-op if it has started.

        Raises:
            PeerLostError: a peer is lost.
        """
        if self._reduction is None or self._is_combined:
            return
        self._reduction.contributions.wait()
        self._reduction.combine(self._room)
        self._is_combined = True

    def wait(self) -> torch.Tensor:
        """Wait for the result.

        Returns:
            fp32, 1-D, as long as the vector; bitwise equal on all ranks.

        Raises:
            PeerLostError: a peer is lost.
        """
        self.advance()
        if self._reduction is not None:
            self._reduction.sums.wait()
            self._reduction.finish(self._room)
            self._reduction = None
            if self._error is not None and self._lost is not None:
                self._error.copy_(self._lost)
                self._lost = None
        return self._vector
