"""The average of a vector over the ranks of a group, encoded on the wire, bitwise equal on all.

It is the all-reduce of :class:`~shardwise.transport.encoded.EncodedSums`, whose second step
begins when the caller says so, between two of its training steps.

What encoding loses is kept in units of a contribution: the average lacks the errors of all ranks,
divided by their number. The chunk that a rank averages has errors of the average itself, which it
keeps times the number of ranks. So errors mean the same however the vector is cut, when a
checkpoint goes on with other shards or replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.diloco.few_bits import codec_of
from shardwise.diloco.settings import WireFormat
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Call, Kind, Label, Reduce
from shardwise.transport.codecs import Room
from shardwise.transport.encoded import EncodedSums, Encoding, RowLayout, Tally, chunks_of
from shardwise.transport.memory import Blocks
from shardwise.transport.runner import SteppedWork


class Average:
    """An average in progress, which every rank of the group creates; the first half starts at once.

    Args:
        vector: fp32, 1-D; may change afterwards.
        all_to_all: moves rows between the ranks; ``None`` for a single replica.
        wire: the format of what is sent.
        label: names the vector in errors; equal on all ranks.
        error: fp32, as long as the vector: what encoding has lost of this rank's earlier
            contributions and averages. It is added to those of this vector, and replaced by what
            encoding loses now once the average is known. ``None`` drops what is lost.
        sections: elements of the parts that are encoded by themselves, of which each rank averages
            a share.
    """

    def __init__(
        self,
        vector: torch.Tensor,
        all_to_all: AllToAll | None,
        wire: WireFormat,
        label: str,
        error: torch.Tensor | None,
        sections: Sequence[int],
    ) -> None:
        self._vector = vector.clone()
        self._run: SteppedWork | None = None
        self._error = error
        # If a replica is lost, nothing was: the next exchange repeats this one.
        self._lost = None if error is None else error.clone()
        if all_to_all is None or all_to_all.world_size == 1 or not vector.numel():
            if self._lost is not None:  # what was lost before, in a larger group
                self._vector.add_(self._lost)
                self._lost.zero_()
            return
        self._sizes = list(sections)
        self._rank, self._ranks = all_to_all.rank, all_to_all.world_size
        parts = torch.split(self._vector, self._sizes)
        sums = EncodedSums(
            Encoding(codec_of(wire), wire.value, Tally()),
            all_to_all,
            Call(Kind.ALL_REDUCE, parts, parts, Reduce.AVG, Label(label)),
            Room(vector.device),
            Blocks(vector.device),
            () if self._lost is None else torch.split(self._lost, self._sizes),
        )
        self._chunks = sums.chunks
        for own in self._own_errors():
            own.div_(self._ranks)
        self._run = SteppedWork(sums.steps())

    @classmethod
    def known(cls, mean: torch.Tensor) -> Average:
        """Return an average that is over."""
        return cls(mean, None, WireFormat.FP32, "", None, ())

    def advance(self) -> None:
        """Start the second half, after waiting for the first. A no-op if it has started.

        Raises:
            PeerLostError: a peer is lost.
        """
        if self._run is not None:
            self._run.reach(1)

    def wait(self) -> torch.Tensor:
        """Wait for the result.

        Returns:
            fp32, 1-D, as long as the vector; bitwise equal on all ranks.

        Raises:
            PeerLostError: a peer is lost.
        """
        if self._run is not None:
            self._run.wait()
            self._run = None
            for own in self._own_errors():
                own.mul_(self._ranks)
        if self._error is not None and self._lost is not None:
            self._error.copy_(self._lost)
            self._lost = None
        return self._vector

    def _own_errors(self) -> Iterator[torch.Tensor]:
        """Yield what was lost of the chunks that this rank averages."""
        if self._lost is None:
            return
        for part, chunk in zip(torch.split(self._lost, self._sizes), self._chunks, strict=True):
            yield part[self._rank * chunk : (self._rank + 1) * chunk]


def sent_nbytes(wire: WireFormat, sections: Sequence[int], ranks: int) -> int:
    """Return the bytes that each rank sends for an average.

    Args:
        wire: as for :class:`Average`.
        sections: as for :class:`Average`.
        ranks: of the group.
    """
    encoding = Encoding(codec_of(wire), wire.value, Tally())
    return 2 * (ranks - 1) * RowLayout(encoding.codec, chunks_of(encoding, sections, ranks)).nbytes
