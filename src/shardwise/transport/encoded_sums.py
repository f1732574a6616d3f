"""Sums of encoded tensors over ranks: every value is encoded once per hop, and added in fp32.

    1.  each rank cuts its tensors into as many chunks as there are ranks, encodes them, and sends
        chunk r to rank r, which decodes what it received and adds it to its own in rank order
    2.  for an all-reduce, rank r encodes its sums and sends them to all ranks. Each of them decodes
        the same bytes, rank r too, so all end with the same bits

A rank sends 2 (R - 1) / R of its encoded tensors, as in a ring all-reduce, whatever the format. The
error is at most the mean of the ranks' errors in step 1 plus the error of step 2, however many
ranks there are. A rank's own contribution to its own chunk is never encoded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardwise._torch import fake
from shardwise.base.devices import CPU
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Label, Reduce
from shardwise.transport.buckets import exact_factor
from shardwise.transport.codecs import Codec, Noise, Piece, Room, decode, encode
from shardwise.transport.runner import Exchange

_log = logging.getLogger(__name__)


class RowLayout:
    """Where the encoded chunks of several tensors lie in one row of bytes.

    Args:
        codec: encodes them.
        numels: the number of elements of each chunk.

    Attributes:
        nbytes: of a row.
    """

    def __init__(self, codec: Codec, numels: Sequence[int]) -> None:
        self._codec = codec
        self._numels = tuple(numels)
        self._starts = []
        self.nbytes = 0
        for numel in numels:
            self._starts.append(self.nbytes)
            self.nbytes += codec.nbytes(numel)

    def piece(self, row: torch.Tensor, i: int) -> Piece:
        """Return chunk ``i`` of a row, uint8."""
        return self._codec.piece(row[self._starts[i] :], self._numels[i])

    def clear_unless_full(self, row: torch.Tensor, i: int, numel: int) -> None:
        """Set chunk ``i`` to zeros if fewer elements are encoded: all that is sent was written."""
        if numel < self._numels[i]:
            start = self._starts[i]
            row[start : start + self._codec.nbytes(self._numels[i])].zero_()


class Tally:
    """A count of blocks that decode to no finite numbers.

    They held some, or their numbers are too large for their scale to be finite. The first one on
    the host is logged; on a device that would mean to wait for it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._counting = threading.Lock()
        self._on_device: torch.Tensor | None = None

    def add(self, codec: Codec, piece: Piece, numel: int) -> None:
        """Count those among the first elements of a piece, without waiting for its device."""
        found = codec.spoiled(piece, numel) if numel else None
        if found is None or not fake.has_values(found):
            return
        if found.device.type == CPU.type:
            with self._counting:
                if found and not self._count:
                    _log.warning(
                        "a block of %d values on a wire has some that are not finite, or too large "
                        "for the format: all of it is sent as not finite. Further ones are only "
                        "counted, see wire_overflows() of the model",
                        codec.block,
                    )
                self._count += int(found)
        elif self._on_device is None:
            self._on_device = found
        else:
            self._on_device = self._on_device + found

    @property
    def total(self) -> int:
        """The count so far. Waits for the device."""
        return self._count + (0 if self._on_device is None else int(self._on_device))


@dataclass(frozen=True)
class Encoding:
    """How gradients are encoded.

    Attributes:
        codec: encodes and decodes them.
        wire: its name, for messages.
        tally: counts blocks that are not finite.
        noise: rounds at random; ``None``: to the nearest number.
    """

    codec: Codec
    wire: str
    tally: Tally
    noise: Noise | None = None


@dataclass(eq=False)
class EncodedSums:
    """The sums of tensors over ranks, of which every rank adds up its chunks.

    Attributes:
        encoding: how values are encoded.
        all_to_all: moves rows between the ranks.
        tensors: 1-D, of floating dtypes; not written to before the sums are complete.
        chunks: elements that each rank adds up of each tensor; the tail of a tensor may be missing.
        op: the reduction.
        room: memory to work in.
        memory: uint8, 1-D, contiguous, of :meth:`nbytes`.
        label: names the tensors in errors; equal on all ranks.
        errors: by tensor, fp32 and as long as it is: what was lost before; if any is kept.
        place: tells the random numbers of this reduction from those of others.
    """

    encoding: Encoding
    all_to_all: AllToAll
    tensors: Sequence[torch.Tensor]
    chunks: Sequence[int]
    op: Reduce
    room: Room
    memory: torch.Tensor
    label: Label
    errors: Sequence[torch.Tensor | None] = ()
    place: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._rank, self._ranks = self.all_to_all.rank, self.all_to_all.world_size
        self.errors = self.errors or [None] * len(self.tensors)
        self._layout = RowLayout(self.encoding.codec, self.chunks)
        self._rows, self._received = self.memory.view(2, self._ranks, self._layout.nbytes)

    @staticmethod
    def nbytes(encoding: Encoding, chunks: Sequence[int], ranks: int) -> int:
        """Return the bytes of memory for chunks of these numbers of elements."""
        return 2 * ranks * RowLayout(encoding.codec, chunks).nbytes

    def scatter(self, shards: Sequence[torch.Tensor]) -> Iterator[Exchange]:
        """Add up this rank's chunks in ``shards``, 1-D, of floating dtypes."""
        yield self._contribute(self.encoding.wire)
        for i, shard in enumerate(shards):
            for tile in self.room.tiles(self._own(i).numel()):
                part = shard[tile]
                if part.dtype == torch.float32:
                    self._add_up(i, tile, out=part)
                else:
                    part.copy_(self._add_up(i, tile))

    def all_reduce(self) -> Iterator[Exchange]:
        """Add up the tensors in place; keep in the errors of its chunks what the sums lose."""
        first = self._contribute(f"{self.encoding.wire}, contributions")
        # The row that this rank sends to itself is not used. It becomes that of its sums, while
        # what has been sent makes room for those of all ranks.
        sums, all_sums = self._received[self._rank], self._rows
        label = replace(self.label, wire=f"{self.encoding.wire}, sums")
        # Logged in the order of the calls of this thread, whichever starts it and when.
        call = self.all_to_all.log(all_sums, label)
        yield first
        for i in range(len(self.tensors)):
            self._encode_sum(i, sums)
        yield self.all_to_all.share(sums, all_sums, label, call)
        for i, (tensor, chunk) in enumerate(zip(self.tensors, self.chunks, strict=True)):
            for rank, part in enumerate(torch.split(tensor, max(chunk, 1))):
                if part.numel():
                    piece = self._layout.piece(all_sums[rank], i)
                    decode(self.encoding.codec, piece, part, self.room)

    def _contribute(self, wire: str) -> Exchange:
        """Encode what this rank has of the chunks of others, and send it."""
        encoding = self.encoding
        for rank, row in enumerate(self._rows):
            if rank == self._rank:
                row.zero_()  # it is not read
                continue
            for i, tensor in enumerate(self.tensors):
                part, error = self._part_of(tensor, i, rank), self.errors[i]
                self._layout.clear_unless_full(row, i, part.numel())
                piece = self._layout.piece(row, i)
                encode(
                    encoding.codec,
                    part,
                    piece,
                    self.room,
                    error=None if error is None else self._part_of(error, i, rank),
                    noise=encoding.noise,
                    place=(*self.place, rank, i),
                )
                encoding.tally.add(encoding.codec, piece, part.numel())
        return self.all_to_all.start(self._rows, self._received, replace(self.label, wire=wire))

    def _encode_sum(self, i: int, row: torch.Tensor) -> None:
        """Add up this rank's chunk of tensor ``i``, and encode the sum."""
        encoding, length, error = self.encoding, self._own(i).numel(), self.errors[i]
        self._layout.clear_unless_full(row, i, length)
        piece = self._layout.piece(row, i)
        for tile in self.room.tiles(length):
            encode(
                encoding.codec,
                self._add_up(i, tile),
                piece,
                self.room,
                start=tile.start,
                error=None if error is None else self._part_of(error, i, self._rank)[tile],
                noise=encoding.noise,
                place=(*self.place, self._ranks, i),  # no rank: a sum is no contribution
            )
        encoding.tally.add(encoding.codec, piece, length)

    def _add_up(self, i: int, tile: slice, out: torch.Tensor | None = None) -> torch.Tensor:
        """Add up some elements of this rank's chunk of tensor ``i``, once rows have arrived.

        Args:
            i: the tensor.
            tile: the elements, counted in the chunk; at most a tile of the room.
            out: fp32, contiguous; by default a part of the room.

        Returns:
            The sums, fp32.
        """
        count = tile.stop - tile.start
        total = self.room.take(2, count) if out is None else out
        for rank in range(self._ranks):
            part = total if rank == 0 else self.room.take(3, count)
            if rank == self._rank:
                own = self._own(i)[tile]
                part = part.copy_(own) if rank == 0 or own.dtype != total.dtype else own
            else:
                piece = self._layout.piece(self._received[rank], i)
                self.encoding.codec.read(piece, tile.start, part)
            if rank:
                total.add_(part)
        if self.op is not Reduce.AVG:
            return total
        factor = exact_factor(self._ranks, total.dtype)  # half of the time of a division
        return total.div_(self._ranks) if factor is None else total.mul_(factor)

    def _own(self, i: int) -> torch.Tensor:
        return self._part_of(self.tensors[i], i, self._rank)

    def _part_of(self, tensor: torch.Tensor, i: int, rank: int) -> torch.Tensor:
        """Return what a tensor has of a rank's chunk: less, or nothing, if its tail is missing."""
        return tensor[rank * self.chunks[i] : (rank + 1) * self.chunks[i]]


def chunks_of(encoding: Encoding, numels: Sequence[int], ranks: int) -> list[int]:
    """Return how many elements of each tensor a rank adds up: whole blocks, if there are several.

    The last ranks have fewer, or none.
    """
    block = encoding.codec.block
    return [min(numel, -(-numel // (ranks * block)) * block) for numel in numels]
