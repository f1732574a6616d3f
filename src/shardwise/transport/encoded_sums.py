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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardwise._torch import fake
from shardwise.devices import CPU
from shardwise.transport.all_to_all import AllToAll, Exchange
from shardwise.transport.base import Label, Reduce
from shardwise.transport.codecs import Codec, Noise, Piece, Room, decode, encode
from shardwise.transport.sums import exact_factor

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


class EncodedScatter:
    """The first step: contributions that are encoded and sent by the constructor.

    Args:
        encoding: how they are encoded.
        all_to_all: moves rows between the ranks.
        tensors: 1-D, of floating dtypes; not written to until the sums are complete.
        chunks: elements that each rank adds up of each tensor; the tail of a tensor may be missing.
        room: memory of this thread to work in.
        rows: uint8, ``(ranks, bytes)``, contiguous: the bytes of a :class:`RowLayout`.
        received: the same.
        label: names the tensors in errors; equal on all ranks.
        errors: by tensor, fp32 and as long as it is, or ``None``: what was lost before.
        place: tells the random numbers of this reduction from those of others.

    Attributes:
        under_way: what was sent.
    """

    def __init__(
        self,
        encoding: Encoding,
        all_to_all: AllToAll,
        tensors: Sequence[torch.Tensor],
        chunks: Sequence[int],
        room: Room,
        rows: torch.Tensor,
        received: torch.Tensor,
        label: Label,
        errors: Sequence[torch.Tensor | None] = (),
        place: Sequence[int] = (),
    ) -> None:
        self._encoding = encoding
        self._rank, self._ranks = all_to_all.rank, all_to_all.world_size
        self._tensors = tensors
        self._chunks = chunks
        self._layout = RowLayout(encoding.codec, chunks)
        self._received = received
        for rank in range(self._ranks):
            if rank == self._rank:
                rows[rank].zero_()  # nobody reads it
                continue
            for i, tensor in enumerate(tensors):
                part = self._part_of(tensor, i, rank)
                error = errors[i] if errors else None
                self._layout.clear_unless_full(rows[rank], i, part.numel())
                piece = self._layout.piece(rows[rank], i)
                encode(
                    encoding.codec,
                    part,
                    piece,
                    room,
                    error=None if error is None else self._part_of(error, i, rank),
                    noise=encoding.noise,
                    place=(*place, rank, i),
                )
                encoding.tally.add(encoding.codec, piece, part.numel())
        self.under_way: Exchange = all_to_all.start(rows, received, label)

    def length(self, i: int) -> int:
        """Return the number of elements of tensor ``i`` that this rank adds up."""
        return self._part_of(self._tensors[i], i, self._rank).numel()

    def add_up(
        self, i: int, tile: slice, op: Reduce, room: Room, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add up some elements of this rank's chunk of tensor ``i``, once rows have arrived.

        Args:
            i: the tensor.
            tile: the elements, counted in the chunk; at most a tile of the room.
            op: whether to divide by the number of ranks.
            room: memory of this thread to work in.
            out: fp32, contiguous; by default a part of the room.

        Returns:
            The sums, fp32.
        """
        count = tile.stop - tile.start
        total = room.take(2, count) if out is None else out
        for rank in range(self._ranks):
            part = total if rank == 0 else room.take(3, count)
            if rank == self._rank:
                own = self._part_of(self._tensors[i], i, rank)[tile]
                part = part.copy_(own) if rank == 0 or own.dtype != total.dtype else own
            else:
                piece = self._layout.piece(self._received[rank], i)
                self._encoding.codec.read(piece, tile.start, part)
            if rank:
                total.add_(part)
        if op is not Reduce.AVG:
            return total
        factor = exact_factor(self._ranks, total.dtype)  # half of the time of a division
        return total.div_(self._ranks) if factor is None else total.mul_(factor)

    def _part_of(self, tensor: torch.Tensor, i: int, rank: int) -> torch.Tensor:
        """Return what a tensor has of a rank's chunk: less, or nothing, if its tail is missing."""
        return tensor[rank * self._chunks[i] : (rank + 1) * self._chunks[i]]


class EncodedAllReduce:
    """Both steps. The constructor starts the first; :meth:`combine` and :meth:`finish` follow.

    Each may run in a thread of its own, with a room of its own, after what came before.

    Args:
        encoding: how values are encoded.
        all_to_all: moves rows between the ranks.
        tensors: 1-D, of floating dtypes, reduced in place; not written to before :meth:`finish`.
        op: the reduction.
        room: as in :class:`EncodedScatter`.
        memory: uint8, ``(2, ranks, bytes)``, contiguous; see :meth:`row_nbytes`.
        label: as in :class:`EncodedScatter`; its name is that of the group.
        errors: as in :class:`EncodedScatter`: of this rank's chunk, what the second step lost.
        place: as in :class:`EncodedScatter`.
    """

    def __init__(
        self,
        encoding: Encoding,
        all_to_all: AllToAll,
        tensors: Sequence[torch.Tensor],
        op: Reduce,
        room: Room,
        memory: torch.Tensor,
        label: Label,
        errors: Sequence[torch.Tensor | None] = (),
        place: Sequence[int] = (),
    ) -> None:
        self._encoding = encoding
        self._all_to_all = all_to_all
        self._tensors = tensors
        self._op = op
        self._errors = errors
        self._place = (*place, all_to_all.world_size)  # no rank: sums are no contribution
        self._rank = all_to_all.rank
        ranks = all_to_all.world_size
        self._chunks = chunks_of(encoding, [tensor.numel() for tensor in tensors], ranks)
        self._layout = RowLayout(encoding.codec, self._chunks)
        rows, received = memory.unbind()
        # The row that this rank sends to itself is not used. It becomes that of its sums, while
        # what has been sent makes room for those of all ranks.
        self._sums, self._all_sums = received[self._rank], rows
        self._second_label = replace(label, wire=f"{encoding.wire}, sums")
        self._first = EncodedScatter(
            encoding,
            all_to_all,
            tensors,
            self._chunks,
            room,
            rows,
            received,
            replace(label, wire=f"{encoding.wire}, contributions"),
            errors,
            place,
        )
        # Logged in the order of the calls of this thread, whoever starts it and when.
        self._second_call = all_to_all.log(rows, self._second_label)
        self._second: Exchange | None = None

    @staticmethod
    def row_nbytes(encoding: Encoding, numels: Sequence[int], ranks: int) -> int:
        """Return the bytes of a row for tensors of so many elements."""
        return RowLayout(encoding.codec, chunks_of(encoding, numels, ranks)).nbytes

    @property
    def contributions(self) -> Exchange:
        """What the first step has sent; :meth:`combine` follows its end."""
        return self._first.under_way

    @property
    def sums(self) -> Exchange:
        """What the second step has sent; :meth:`finish` follows its end."""
        assert self._second is not None
        return self._second

    def combine(self, room: Room) -> None:
        """Add up what has arrived, and start the second step."""
        codec = self._encoding.codec
        for i, chunk in enumerate(self._chunks):
            length = self._first.length(i)
            self._layout.clear_unless_full(self._sums, i, length)
            piece = self._layout.piece(self._sums, i)
            error = self._errors[i] if self._errors else None
            for tile in room.tiles(length):
                total = self._first.add_up(i, tile, self._op, room)
                first = self._rank * chunk + tile.start
                encode(
                    codec,
                    total,
                    piece,
                    room,
                    start=tile.start,
                    error=None if error is None else error[first : first + total.numel()],
                    noise=self._encoding.noise,
                    place=(*self._place, i),
                )
            self._encoding.tally.add(codec, piece, length)
        self._second = self._all_to_all.share(
            self._sums, self._all_sums, self._second_label, self._second_call
        )

    def finish(self, room: Room) -> None:
        """Decode the sums of all ranks into the tensors."""
        for i, (tensor, chunk) in enumerate(zip(self._tensors, self._chunks, strict=True)):
            for rank, part in enumerate(torch.split(tensor, max(chunk, 1))):
                if part.numel():
                    piece = self._layout.piece(self._all_sums[rank], i)
                    decode(self._encoding.codec, piece, part, room)


def chunks_of(encoding: Encoding, numels: Sequence[int], ranks: int) -> list[int]:
    """Return how many elements of each tensor a rank adds up: whole blocks, if there are several.

    The last ranks have fewer, or none.
    """
    block = encoding.codec.block
    return [min(numel, -(-numel // (ranks * block)) * block) for numel in numels]
