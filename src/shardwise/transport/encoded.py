"""A transport that encodes what it sends: parameters, gradients or both, see :class:`Wire`.

An all-gather sends encoded shards through the transport that it wraps, and every rank decodes all
of them, its own too: all compute with the same bits. Reductions are those of
:mod:`shardwise.transport.encoded_sums`. What a format would not make smaller is left to the wrapped
transport.

Nothing of it waits before the caller does. The second step of an all-reduce has to follow the first
by itself, or it would only begin at the end of backward: a :class:`Runner` takes it.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import (
    Call,
    FullBuffers,
    Label,
    PendingWork,
    Transport,
    Work,
)
from shardwise.transport.buckets import as_rows, wire_dtype
from shardwise.transport.codecs import Codec, Noise, Room, codec_of, decode, encode
from shardwise.transport.encoded_sums import EncodedSums, Encoding, RowLayout, Tally, chunks_of
from shardwise.transport.memory import Blocks, reported
from shardwise.transport.runner import Exchange, Job, Runner, SteppedWork
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
        runner: begins the second step of an all-reduce.

    Attributes:
        inner: as given.
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
        self.inner = inner
        self.wire = wire
        self._all_to_all = all_to_all
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
        return self._beside_others(call, encoded, lambda chosen: SteppedWork(self._scatter(chosen)))

    def _all_reduce(self, call: Call) -> Work:
        """Reduce-scatter, and then gather sums that are encoded once more."""
        self.runner.catch_up()
        encoded = [
            i
            for i, each in enumerate(call.outputs)
            if each.numel() and _shrinks(self._reduce, each.dtype)
        ]

        def watch(job: Job) -> None:
            self._all_to_all.wait_for(job, f"the all-reduce of {call.label.name}")

        return self._beside_others(
            call,
            encoded,
            lambda chosen: self.runner.start_watched(self._sum(chosen), self._device, watch),
        )

    def _beside_others(
        self, call: Call, encoded: Sequence[int], start: Callable[[Call], Work]
    ) -> Work:
        """Start what is encoded of a reduction, and what is not."""
        others = sorted(set(range(len(call.outputs))) - set(encoded))
        works = [self.inner.start(call.only(others))] if others else []
        if encoded:
            works.append(start(call.only(encoded)))
        if len(works) == 1:
            return works[0]

        def finish() -> None:
            for work in works:
                work.wait()

        return PendingWork(finish)

    def _scatter(self, call: Call) -> Iterator[Exchange]:
        chunks = [shard.numel() for shard in call.outputs]
        block = self._blocks.take(EncodedSums.nbytes(self._encoding, chunks, self.world_size))
        yield from self._sums(self._encoding, call, chunks, block).scatter(call.outputs)
        self._blocks.give_back(block)

    def _sum(self, call: Call) -> Iterator[Exchange]:
        encoding = self._all_reduces
        chunks = chunks_of(encoding, [each.numel() for each in call.outputs], self.world_size)
        block = self._blocks.take(EncodedSums.nbytes(encoding, chunks, self.world_size))
        yield from self._sums(encoding, call, chunks, block).all_reduce()
        self._blocks.give_back(block)

    def _sums(
        self, encoding: Encoding, call: Call, chunks: Sequence[int], block: torch.Tensor
    ) -> EncodedSums:
        return EncodedSums(
            encoding,
            self._all_to_all,
            call.inputs,
            chunks,
            call.op,
            self._room,
            block,
            call.label,
            self._errors_of(call.of, call.inputs, call.label),
            self._place(call.label),
        )

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


def _shrinks(format_: WireFormat, native: torch.dtype, *others: torch.dtype) -> bool:
    """Whether a format makes values smaller that would be sent in a native dtype otherwise."""
    return ENCODABLE.issuperset((native, *others)) and _ITEM_BYTES[format_] < native.itemsize
