"""A transport that encodes what it sends: parameters, gradients or both, see :class:`Wire`.

An all-gather sends encoded shards through the transport that it wraps, and every rank decodes all
of them, its own too: all compute with the same bits. What a format would not make smaller is left
to the wrapped transport.

In a reduction every value is encoded once per hop, and added in fp32:

    1.  each rank cuts its tensors into as many chunks as there are ranks, encodes them, and sends
        chunk r to rank r, which decodes what it received and adds it to its own in rank order
    2.  for an all-reduce, rank r encodes its sums and sends them to all ranks. Each of them decodes
        the same bytes, rank r too, so all end with the same bits

A rank sends 2 (R - 1) / R of its encoded tensors, as in a ring all-reduce, whatever the format. The
error is at most the mean of the ranks' errors in step 1 plus the error of step 2, however many
ranks there are. A rank's own contribution to its own chunk is never encoded.

Nothing of it waits before the caller does. The second step of an all-reduce has to follow the first
by itself, or it would only begin at the end of backward: a :class:`Runner` takes it.
"""

from __future__ import annotations

import logging
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardwise._torch import dtensor
from shardwise.base.devices import CPU
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import (
    Call,
    FullBuffers,
    Kind,
    Label,
    Reduce,
    Transport,
    Work,
)
from shardwise.transport.buckets import as_rows, exact_factor, wire_dtype
from shardwise.transport.codecs import (
    ENCODABLE,
    Codec,
    Noise,
    Piece,
    Room,
    codec_of,
    decode,
    encode,
)
from shardwise.transport.memory import Blocks, reported
from shardwise.transport.runner import BesideJob, Exchange, Runner, SteppedWork, wait_for_all
from shardwise.transport.wire import Wire, WireFormat

_log = logging.getLogger(__name__)

_ITEM_BYTES = {WireFormat.FP32: 4, WireFormat.BF16: 2, WireFormat.FP8: 1, WireFormat.INT8: 1}


class EncodedTransport(Transport):
    """Another transport, between whose ranks encoded values travel.

    Args:
        inner: sends encoded shards, and what is not encoded.
        all_to_all: moves encoded gradients, between the same ranks.
        wire: the formats.
        device: of all tensors.
        runner: begins the second step of an all-reduce.

    Attributes:
        inner: as given.
        all_to_all: as given.
        wire: as given.
        runner: as given.
    """

    def __init__(
        self,
        inner: Transport,
        all_to_all: AllToAll,
        wire: Wire,
        device: torch.device,
        runner: Runner,
    ) -> None:
        self.name = inner.name
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.overlaps_compute = inner.overlaps_compute
        self.inner = inner
        self.wire = wire
        self.all_to_all = all_to_all
        self._device = device
        self.runner = runner
        # Streams and threads count apart.
        self._tallies = gathers, scatters, sums = Tally(), Tally(), Tally()
        self._gathers = gathers
        self._gather = WireFormat(wire.gather)
        self._reduce = WireFormat(wire.reduce)
        noise = Noise(wire.seed, device) if wire.rounding == "stochastic" else None
        self._encoding = Encoding(codec_of(self._reduce), wire.reduce, scatters, noise)
        self._all_reduces = replace(self._encoding, tally=sums)
        self._room = Room(device)
        self._blocks = Blocks(device)
        self._errors: weakref.WeakKeyDictionary[object, torch.Tensor] = weakref.WeakKeyDictionary()
        self._calls: Counter[str] = Counter()

    @property
    def overflows(self) -> int:
        """The blocks that this rank has encoded and that decode to no finite numbers."""
        return sum(tally.total for tally in self._tallies)

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FullBuffers:
        """Reserve memory to decode into, or to gather into what is not encoded."""
        return self.inner.full_buffers(numels, dtypes, device)

    def _all_gather(self, call: Call) -> Work:
        """Gather encoded shards together with what is not encoded."""
        self.runner.catch_up()
        encoded = [
            i
            for i, full in enumerate(call.outputs)
            if full.numel() and _shrinks(self._gather, full.dtype)
        ]
        return SteppedWork(self._gather_rows(call, encoded)) if encoded else self.inner.start(call)

    def _gather_rows(self, call: Call, encoded: Sequence[int]) -> Iterator[Work]:
        """Encode shards as one row per rank, and gather it."""
        shards, fulls = call.inputs, call.outputs
        codec = codec_of(self._gather)
        rows = [as_rows(fulls[i], self.world_size) for i in encoded]
        layout = RowLayout(codec, [row.shape[1] for row in rows])
        block = self._blocks.take(self.world_size * layout.nbytes)
        gathered = as_rows(block, self.world_size)
        own = gathered[self.rank]
        for number, i in enumerate(encoded):
            self._encode_shard(codec, shards[i], layout, own, number)
        others = sorted(set(range(len(fulls))) - set(encoded))
        yield self.inner.all_gather(
            [*(shards[i] for i in others), own],
            [*(fulls[i] for i in others), block],
            replace(call.label, wire=self.wire.gather),
        )
        for number, row in enumerate(rows):
            for rank, chunk in enumerate(row):
                decode(codec, layout.piece(gathered[rank], number), chunk, self._room)
        self._blocks.give_back(block)

    def _encode_shard(
        self, codec: Codec, shard: torch.Tensor, layout: RowLayout, row: torch.Tensor, number: int
    ) -> None:
        shard = shard.to(self._device, non_blocking=True)  # freed before the gather
        layout.clear_unless_full(row, number, shard.numel())
        piece = layout.piece(row, number)
        encode(codec, shard, piece, self._room)
        self._gathers.add(codec, piece, shard.numel())

    def as_gathered(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Encode a shard, and decode that."""
        if not _shrinks(self._gather, dtype):
            return shard.to(dtype)
        codec = codec_of(self._gather)
        raw = torch.empty(codec.nbytes(shard.numel()), dtype=torch.uint8, device=self._device)
        piece = codec.piece(raw, shard.numel())
        encode(codec, shard.to(self._device), piece, self._room)
        out = torch.empty(shard.numel(), dtype=dtype, device=self._device)
        decode(codec, piece, out, self._room)
        return out

    def _reduce_scatter(self, call: Call) -> Work:
        """Send every rank its encoded chunks; decode and add what arrives."""
        self.runner.catch_up()
        fulls, shards = call.inputs, call.outputs
        encoded = [
            i
            for i, (full, shard) in enumerate(zip(fulls, shards, strict=True))
            if shard.numel()
            and _shrinks(self._reduce, wire_dtype(full, shard), full.dtype, shard.dtype)
        ]
        return self._beside_others(
            call, encoded, lambda chosen: SteppedWork(self._sum(self._encoding, chosen))
        )

    def _all_reduce(self, call: Call) -> Work:
        """Reduce-scatter, and then gather sums that are encoded once more."""
        self.runner.catch_up()
        encoded = [
            i
            for i, each in enumerate(call.outputs)
            if each.numel() and _shrinks(self._reduce, each.dtype)
        ]

        def watch(job: BesideJob) -> None:
            self.all_to_all.wait_for(job, f"the all-reduce of {call.label.name}")

        return self._beside_others(
            call,
            encoded,
            lambda chosen: self.runner.start_watched(
                self._sum(self._all_reduces, chosen), self._device, watch
            ),
        )

    def _beside_others(
        self, call: Call, encoded: Sequence[int], start: Callable[[Call], Work]
    ) -> Work:
        """Start what is encoded of a reduction, and what is not."""
        others = sorted(set(range(len(call.outputs))) - set(encoded))
        works = [self.inner.start(call.only(others))] if others else []
        if encoded:
            works.append(start(call.only(encoded)))
        return wait_for_all(works)

    def _sum(self, encoding: Encoding, call: Call) -> Iterator[Exchange]:
        errors, place = self._errors_of(call), self._place(call.label)
        sums = EncodedSums(encoding, self.all_to_all, call, self._room, self._blocks, errors, place)
        yield from sums.steps()

    def _errors_of(self, call: Call) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        if not self.wire.error_feedback or not call.of:
            return found
        for source, tensor in zip(call.of, call.inputs, strict=True):
            error = self._errors.get(source)
            if error is None or error.numel() != tensor.numel():
                error = torch.zeros(tensor.numel(), dtype=torch.float32, device=tensor.device)
                self._errors[source] = reported(error, call.label.name)
            found.append(error)
        return found

    def _place(self, label: Label) -> tuple[int, ...]:
        """Tell the random numbers of this call from those of others."""
        if self._encoding.noise is None:
            return ()
        self._calls[label.name] += 1
        return (self.rank, zlib.crc32(label.name.encode()), self._calls[label.name])


def _shrinks(format_: WireFormat, native: torch.dtype, *others: torch.dtype) -> bool:
    """Whether a format makes values smaller that would be sent in a native dtype otherwise."""
    return ENCODABLE.issuperset((native, *others)) and _ITEM_BYTES[format_] < native.itemsize


# -- sums ------------------------------------------------------------------------------------------


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
        if found is None or not dtensor.has_values(found):
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


class EncodedSums:
    """The sums of a reduction, of which every rank adds up its chunks.

    Args:
        encoding: how values are encoded.
        all_to_all: moves rows between the ranks.
        call: a reduce-scatter, or an all-reduce, of floating dtypes. Its inputs are not written to
            before the sums are complete.
        room: memory to work in.
        blocks: memory for rows.
        errors: by tensor, fp32 and as long as it is: what was lost before; if any is kept.
        place: tells the random numbers of this reduction from those of others.

    Attributes:
        chunks: elements that each rank adds up of each tensor; the tail of a tensor may be missing.
    """

    def __init__(
        self,
        encoding: Encoding,
        all_to_all: AllToAll,
        call: Call,
        room: Room,
        blocks: Blocks,
        errors: Sequence[torch.Tensor | None] = (),
        place: Sequence[int] = (),
    ) -> None:
        self._encoding = encoding
        self._all_to_all = all_to_all
        self._rank, self._ranks = all_to_all.rank, all_to_all.world_size
        self._call = call
        self._room = room
        self._blocks = blocks
        self._errors = errors or [None] * len(call.inputs)
        self._place = place
        self.chunks = [each.numel() for each in call.outputs]
        if call.kind is Kind.ALL_REDUCE:
            self.chunks = chunks_of(encoding, self.chunks, self._ranks)
        self._layout = RowLayout(encoding.codec, self.chunks)

    def steps(self) -> Iterator[Exchange]:
        """Encode, send and add up; keep in the errors what that loses."""
        block = self._blocks.take(2 * self._ranks * self._layout.nbytes)
        rows, received = block.view(2, self._ranks, self._layout.nbytes)
        if self._call.kind is Kind.ALL_REDUCE:
            yield from self._all_reduce(rows, received)
        else:
            yield self._contribute(rows, received, self._encoding.wire)
            for i, shard in enumerate(self._call.outputs):
                for tile in self._room.tiles(self._own(i).numel()):
                    part = shard[tile]
                    if part.dtype == torch.float32:
                        self._add_up(received, i, tile, out=part)
                    else:
                        part.copy_(self._add_up(received, i, tile))
        self._blocks.give_back(block)

    def _all_reduce(self, rows: torch.Tensor, received: torch.Tensor) -> Iterator[Exchange]:
        wire, codec = self._encoding.wire, self._encoding.codec
        first = self._contribute(rows, received, f"{wire}, contributions")
        # The row that this rank sends to itself is not used. It becomes that of its sums, while
        # what has been sent makes room for those of all ranks.
        sums, all_sums = received[self._rank], rows
        label = replace(self._call.label, wire=f"{wire}, sums")
        # Logged in the order of the calls of this thread, whichever starts it and when.
        logged = self._all_to_all.log(all_sums, label)
        yield first
        for i in range(len(self.chunks)):
            self._encode_sum(received, i, sums)
        yield self._all_to_all.share(sums, all_sums, logged)
        for i, (tensor, chunk) in enumerate(zip(self._call.outputs, self.chunks, strict=True)):
            for rank, part in enumerate(torch.split(tensor, max(chunk, 1))):
                if part.numel():
                    decode(codec, self._layout.piece(all_sums[rank], i), part, self._room)

    def _contribute(self, rows: torch.Tensor, received: torch.Tensor, wire: str) -> Exchange:
        """Encode what this rank has of the chunks of others, and send it."""
        encoding = self._encoding
        for rank, row in enumerate(rows):
            if rank == self._rank:
                row.zero_()  # it is not read
                continue
            for i, tensor in enumerate(self._call.inputs):
                part, error = self._part_of(tensor, i, rank), self._errors[i]
                self._layout.clear_unless_full(row, i, part.numel())
                piece = self._layout.piece(row, i)
                encode(
                    encoding.codec,
                    part,
                    piece,
                    self._room,
                    error=None if error is None else self._part_of(error, i, rank),
                    noise=encoding.noise,
                    place=(*self._place, rank, i),
                )
                encoding.tally.add(encoding.codec, piece, part.numel())
        return self._all_to_all.start(rows, received, replace(self._call.label, wire=wire))

    def _encode_sum(self, received: torch.Tensor, i: int, row: torch.Tensor) -> None:
        """Add up this rank's chunk of tensor ``i``, and encode the sum."""
        encoding, length, error = self._encoding, self._own(i).numel(), self._errors[i]
        self._layout.clear_unless_full(row, i, length)
        piece = self._layout.piece(row, i)
        for tile in self._room.tiles(length):
            encode(
                encoding.codec,
                self._add_up(received, i, tile),
                piece,
                self._room,
                start=tile.start,
                error=None if error is None else self._part_of(error, i, self._rank)[tile],
                noise=encoding.noise,
                place=(*self._place, self._ranks, i),  # no rank: a sum is no contribution
            )
        encoding.tally.add(encoding.codec, piece, length)

    def _add_up(
        self, received: torch.Tensor, i: int, tile: slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add up some elements of this rank's chunk of tensor ``i``.

        Args:
            received: the rows of all ranks.
            i: the tensor.
            tile: the elements, counted in the chunk; at most a tile of the room.
            out: fp32, contiguous; by default a part of the room.

        Returns:
            The sums, fp32.
        """
        count = tile.stop - tile.start
        total = self._room.take(2, count) if out is None else out
        for rank in range(self._ranks):
            part = total if rank == 0 else self._room.take(3, count)
            if rank == self._rank:
                own = self._own(i)[tile]
                part = part.copy_(own) if rank == 0 or own.dtype != total.dtype else own
            else:
                piece = self._layout.piece(received[rank], i)
                self._encoding.codec.read(piece, tile.start, part)
            if rank:
                total.add_(part)
        if self._call.op is not Reduce.AVG:
            return total
        factor = exact_factor(self._ranks, total.dtype)  # half of the time of a division
        return total.div_(self._ranks) if factor is None else total.mul_(factor)

    def _own(self, i: int) -> torch.Tensor:
        return self._part_of(self._call.inputs[i], i, self._rank)

    def _part_of(self, tensor: torch.Tensor, i: int, rank: int) -> torch.Tensor:
        """Return what a tensor has of a rank's chunk: less, or nothing, if its tail is missing."""
        return tensor[rank * self.chunks[i] : (rank + 1) * self.chunks[i]]


def chunks_of(encoding: Encoding, numels: Sequence[int], ranks: int) -> list[int]:
    """Return how many elements of each tensor a rank adds up: whole blocks, if there are several.

    The last ranks have fewer, or none.
    """
    block = encoding.codec.block
    return [min(numel, -(-numel // (ranks * block)) * block) for numel in numels]
