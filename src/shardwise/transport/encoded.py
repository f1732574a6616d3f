"""A transport that encodes what it sends: parameters, gradients or both, see :class:`Wire`.

An all-gather sends encoded shards through the transport that it wraps, and every rank decodes all
of them, its own too: all compute with the same bits. Reductions are those of
:mod:`shardwise.transport.encoded_sums`. What a format would not make smaller is left to the wrapped
transport.

Nothing of it waits before the caller does. The second step of an all-reduce has to follow the first
by itself, or it would only begin at the end of backward. So where ranks send messages, a thread
adds up and sends; on a device with streams, the whole all-reduce is queued on a stream of its own.
Elsewhere, it begins with the next call (:mod:`shardwise.transport.background`).
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from shardwise import devices
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.background import Background, in_job
from shardwise.transport.base import (
    Call,
    FullBuffers,
    Label,
    PendingWork,
    Transport,
    Work,
)
from shardwise.transport.buckets import as_rows
from shardwise.transport.codecs import Noise, Room, decode, encode
from shardwise.transport.encoded_sums import (
    EncodedAllReduce,
    EncodedScatter,
    Encoding,
    RowLayout,
    Tally,
)
from shardwise.transport.formats import codec_of
from shardwise.transport.memory import Blocks, reported
from shardwise.transport.sums import wire_dtype
from shardwise.transport.wire import Wire, WireFormat

#: Other dtypes are sent as they are.
ENCODABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
_ITEM_BYTES = {WireFormat.FP32: 4, WireFormat.BF16: 2, WireFormat.FP8: 1, WireFormat.INT8: 1}


class EncodedTransport(Transport):
    """Another transport, between whose ranks encoded values travel.

    Args:
        inner: sends encoded shards, and what is not encoded.
        all_to_all: moves encoded gradients, between the same ranks.
        wire: the formats.
        device: of all tensors.
        background: does what follows the first step of an all-reduce, unless a stream does.

    Attributes:
        inner: as given.
        wire: as given.
        background: as given.
    """

    def __init__(
        self,
        inner: Transport,
        all_to_all: AllToAll,
        wire: Wire,
        device: torch.device,
        background: Background,
    ) -> None:
        self.name = inner.name
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.inner = inner
        self.wire = wire
        self._all_to_all = all_to_all
        self._device = device
        self.background = background
        # Streams and threads count apart.
        self._tallies = gathers, scatters, sums = Tally(), Tally(), Tally()
        self._gathers = gathers
        self._gather = WireFormat(wire.gather)
        self._reduce = WireFormat(wire.reduce)
        noise = Noise(wire.seed, device) if wire.rounding == "stochastic" else None
        self._encoding = Encoding(codec_of(self._reduce), wire.reduce, scatters, noise)
        self._all_reduces = replace(self._encoding, tally=sums)
        self._rooms = Room(device), Room(device)
        self._blocks = Blocks(device)
        self._stream: torch.Stream | None = None
        self._errors: weakref.WeakKeyDictionary[object, torch.Tensor] = weakref.WeakKeyDictionary()
        self._calls: Counter[str] = Counter()
        self._labels: dict[tuple[Label, str], Label] = {}

    @property
    def overflows(self) -> int:
        """The blocks that this rank has encoded and that decode to no finite numbers."""
        return sum(tally.total for tally in self._tallies)

    @property
    def _room(self) -> Room:
        """Memory to work in: that of the background, or that of the program."""
        return self._rooms[in_job()]

    @property
    def bytes_sent(self) -> int:
        """The bytes of encoded gradients that this rank has sent to others."""
        return self._all_to_all.bytes_sent

    def overlaps_compute(self) -> bool:
        """Decide as the wrapped transport does."""
        return self.inner.overlaps_compute()

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FullBuffers:
        """Reserve memory to decode into, or to gather into what is not encoded."""
        return self.inner.full_buffers(numels, dtypes, device)

    def _all_gather(self, call: Call) -> Work:
        """Encode the shards as one row per rank, and gather it with what is not encoded."""
        shards, fulls = call.inputs, call.outputs
        self.background.catch_up()
        encoded = [
            i for i, full in enumerate(fulls) if full.numel() and _shrinks(self._gather, full.dtype)
        ]
        if not encoded:
            return self.inner.start(call)
        codec = codec_of(self._gather)
        rows = [as_rows(fulls[i], self.world_size) for i in encoded]
        layout = RowLayout(codec, [row.shape[1] for row in rows])
        block = self._blocks.take(self.world_size * layout.nbytes)
        gathered = as_rows(block, self.world_size)
        own = gathered[self.rank]
        for number, i in enumerate(encoded):
            shard = shards[i].to(self._device, non_blocking=True)
            layout.clear_unless_full(own, number, shard.numel())
            piece = layout.piece(own, number)
            encode(codec, shard, piece, self._room)
            self._gathers.add(codec, piece, shard.numel())
        others = sorted(set(range(len(fulls))) - set(encoded))
        work = self.inner.all_gather(
            [*(shards[i] for i in others), own],
            [*(fulls[i] for i in others), block],
            self._label(call.label, self.wire.gather),
        )

        def finish() -> None:
            work.wait()
            for number, row in enumerate(rows):
                for rank, chunk in enumerate(row):
                    decode(codec, layout.piece(gathered[rank], number), chunk, self._room)
            self._blocks.give_back(block)

        return PendingWork(finish)

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
        self.background.catch_up()
        fulls, shards = call.inputs, call.outputs
        encoded = [
            i
            for i, (full, shard) in enumerate(zip(fulls, shards, strict=True))
            if shard.numel()
            and _shrinks(self._reduce, wire_dtype(full, shard), full.dtype, shard.dtype)
        ]
        others = sorted(set(range(len(fulls))) - set(encoded))
        works: list[Work] = []
        if others:
            works.append(self.inner.start(call.only(others)))
        if encoded:
            works.append(self._scatter(call.only(encoded)))
        return _both(works)

    def _all_reduce(self, call: Call) -> Work:
        """Reduce-scatter, and then gather sums that are encoded once more."""
        self.background.catch_up()
        tensors = call.outputs
        encoded = [
            i
            for i, each in enumerate(tensors)
            if each.numel() and _shrinks(self._reduce, each.dtype)
        ]
        others = sorted(set(range(len(tensors))) - set(encoded))
        works: list[Work] = []
        if others:
            works.append(self.inner.start(call.only(others)))
        if encoded:
            chosen = call.only(encoded)
            if devices.has_streams(self._device):
                works.append(self._all_reduce_on_stream(chosen))
            else:
                works.append(self._all_reduce_apart(chosen))
        return _both(works)

    def _scatter(self, call: Call) -> Work:
        fulls, shards, label = call.inputs, call.outputs, call.label
        chunks = [shard.numel() for shard in shards]
        row = RowLayout(self._encoding.codec, chunks).nbytes
        block = self._blocks.take(2 * self.world_size * row)
        rows, received = block.view(2, self.world_size, row)
        scatter = EncodedScatter(
            self._encoding,
            self._all_to_all,
            fulls,
            chunks,
            self._room,
            rows,
            received,
            self._label(label, self.wire.reduce),
            self._errors_of(call.of, fulls, label),
            self._place(label),
        )

        def finish() -> None:
            scatter.under_way.wait()
            for i, shard in enumerate(shards):
                for tile in self._room.tiles(scatter.length(i)):
                    part = shard[tile]
                    if part.dtype == torch.float32:
                        scatter.add_up(i, tile, call.op, self._room, out=part)
                    else:
                        part.copy_(scatter.add_up(i, tile, call.op, self._room))
            self._blocks.give_back(block)

        return PendingWork(finish)

    def _all_reduce_apart(self, call: Call) -> Work:
        block = self._block_for(call.outputs)
        reduction = self._start(call, block, self._room)

        def follow() -> None:
            reduction.contributions.land()
            reduction.combine(self._room)

        job = self.background.submit(follow)

        def finish() -> None:
            self._all_to_all.wait_for(job, f"the all-reduce of {call.label.name}")
            reduction.sums.wait()
            reduction.finish(self._room)
            self._blocks.give_back(block)

        return PendingWork(finish)

    def _all_reduce_on_stream(self, call: Call) -> Work:
        """Queue both steps on a stream beside the one that computes."""
        if self._stream is None:
            self._stream = devices.new_stream(self._device)
        self._stream.wait_stream(devices.current_stream(self._device))
        room = self._rooms[True]
        with self._stream:
            block = self._block_for(call.outputs)
            reduction = self._start(call, block, room)
            reduction.contributions.wait()
            reduction.combine(room)
            reduction.sums.wait()
            reduction.finish(room)
            done = devices.current_stream(self._device).record_event()
        return PendingWork(lambda: devices.current_stream(self._device).wait_event(done))

    def _start(self, call: Call, block: torch.Tensor, room: Room) -> EncodedAllReduce:
        """Send the contributions to an all-reduce."""
        tensors, label = call.outputs, call.label
        return EncodedAllReduce(
            self._all_reduces,
            self._all_to_all,
            tensors,
            call.op,
            room,
            block.view(2, self.world_size, block.numel() // (2 * self.world_size)),
            label,
            self._errors_of(call.of, tensors, label),
            self._place(label),
        )

    def _block_for(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        numels = [tensor.numel() for tensor in tensors]
        row = EncodedAllReduce.row_nbytes(self._all_reduces, numels, self.world_size)
        return self._blocks.take(2 * self.world_size * row)

    def _errors_of(
        self, sources: Sequence[object], tensors: Sequence[torch.Tensor], label: Label
    ) -> list[torch.Tensor | None]:
        if not self.wire.error_feedback or not sources:
            return [None] * len(tensors)
        found: list[torch.Tensor | None] = []
        for source, tensor in zip(sources, tensors, strict=True):
            error = self._errors.get(source)
            if error is None or error.numel() != tensor.numel():
                error = torch.zeros(tensor.numel(), dtype=torch.float32, device=tensor.device)
                self._errors[source] = reported(error, label.name)
            found.append(error)
        return found

    def _place(self, label: Label) -> tuple[int, ...]:
        """Tell the random numbers of this call from those of others."""
        if self._encoding.noise is None:
            return ()
        self._calls[label.name] += 1
        return (self.rank, zlib.crc32(label.name.encode()), self._calls[label.name])

    def _label(self, label: Label, wire: str) -> Label:
        made = self._labels.get((label, wire))
        if made is None:
            made = self._labels[label, wire] = replace(label, wire=wire)
        return made


def _shrinks(format_: WireFormat, native: torch.dtype, *others: torch.dtype) -> bool:
    """Whether a format makes values smaller that would be sent in a native dtype otherwise."""
    return ENCODABLE.issuperset((native, *others)) and _ITEM_BYTES[format_] < native.itemsize


def _both(works: Sequence[Work]) -> Work:
    """Make one work of those of a call."""
    if len(works) == 1:
        return works[0]

    def finish() -> None:
        for work in works:
            work.wait()

    return PendingWork(finish)
