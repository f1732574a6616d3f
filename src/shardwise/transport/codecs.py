"""Codecs: how floating-point values become bytes on the wire, and what that loses.

| format | bytes per element | error of one encoding |
| --- | --- | --- |
| fp32 | 4 | none |
| fp16 | 2 | 2^-11 of the value (2^-25 below 2^-14); infinite above 65504 |
| bf16 | 2 | 2^-8 of the value (2^-134 below 2^-126) |
| fp8 | 1 + 4 / 256 | 2^-4 of the value, or 2^-19 of the largest in the same block of 256 |
| int8 | 1 + 4 / 256 | 1/254 of the largest value in the same block of 256 (at least 2^-127) |

:mod:`shardwise.diloco.few_bits` has formats of less than a byte. Values that are not finite stay so
in every format. In formats with blocks they make all of their block so.

A *piece* is a stretch of values that is encoded by itself: no block has values of two pieces. It
passes through in tiles that fit into the cache of a processor, so encoding reads its input from
memory once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise._torch import dtensor
from shardwise.base.devices import CPU
from shardwise.base.mixing import mix
from shardwise.transport.memory import reported
from shardwise.transport.runner import is_beside
from shardwise.transport.wire import WireFormat

#: What is encoded of a call. Other dtypes are sent as they are.
ENCODABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: Elements that share one scale.
BLOCK = 256
#: Pieces begin at multiples of this many bytes, so that their parts can be viewed in their dtypes.
_ALIGNMENT = 16
#: Elements that are encoded at once: on the host, as many as its cache holds a few times.
_HOST_TILE = 128 * 1024
_DEVICE_TILE = 4 * 1024 * 1024


@dataclass(frozen=True)
class Piece:
    """The memory of an encoded piece.

    Attributes:
        numbers: one per element, or bytes with several.
        scales: fp32, one per block or a few; ``None`` in formats without scales.
    """

    numbers: torch.Tensor
    scales: torch.Tensor | None = None


class Room:
    """Memory to work in: tiles of fp32, which the next encoding overwrites.

    What goes on beside the program has tiles of its own.

    Args:
        device: where values are encoded and decoded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tiles: dict[tuple[int, bool], torch.Tensor] = {}
        self.tile = _tile(device)

    def take(self, which: int, numel: int) -> torch.Tensor:
        """Return fp32 memory for at most a tile. Different numbers are in different memory."""
        key = which, is_beside()
        found = self._tiles.get(key)
        if found is None or found.numel() < numel:
            size = min(self.tile, -(-numel // 4096) * 4096)
            found = torch.empty(size, dtype=torch.float32, device=self._device)
            self._tiles[key] = reported(found)
        return found[:numel]

    def tiles(self, numel: int) -> Iterator[slice]:
        """Divide a stretch of ``count`` elements into tiles."""
        for start in range(0, numel, self.tile):
            yield slice(start, min(start + self.tile, numel))


def _tile(device: torch.device) -> int:
    # Tensors without values cost the same however large they are.
    is_host = device.type == CPU.type and dtensor.has_values(torch.empty(0))
    return _HOST_TILE if is_host else _DEVICE_TILE


class Noise:
    """Numbers between 0 and 1 that follow from a seed and a place alone.

    A table has as many evenly spread numbers as a tile has elements, in random order. Each tile of
    each encoding begins to read it somewhere else, so every element meets all of them over time.

    Args:
        seed: of the table and of where to begin.
        device: where values are encoded.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._size = _tile(device)
        if not dtensor.has_values(torch.empty(0)):
            order = torch.arange(self._size)
        else:
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(self._size, generator=generator, device="cpu")
        table = (order.float() + 0.5).div_(self._size).to(device)
        self._table = reported(torch.cat([table, table]))

    def at(self, place: Sequence[int], numel: int) -> torch.Tensor:
        """Return the numbers for a tile.

        Args:
            place: tells the tile and the encoding from all others.
            numel: at most a tile.
        """
        mixed = self._seed
        for each in place:
            mixed = mix(mixed ^ each)
        start = mixed % self._size
        return self._table[start : start + numel]


class Codec(ABC):
    """Encodes and decodes tiles of fp32 values; see :func:`encode` and :func:`decode` for pieces.

    Attributes:
        block: tiles begin at multiples of this many elements.
    """

    block = 1

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the bytes of a piece of ``numel`` elements."""

    @abstractmethod
    def piece(self, raw: torch.Tensor, numel: int) -> Piece:
        """Return the parts of the piece of ``numel`` elements that lies in ``raw``, uint8."""

    @abstractmethod
    def write(
        self,
        values: torch.Tensor,
        piece: Piece,
        start: int,
        room: torch.Tensor,
        noise: torch.Tensor | None = None,
    ) -> None:
        """Encode a tile.

        Args:
            values: fp32, 1-D.
            piece: where it goes.
            start: the element of the piece at which the tile begins.
            room: fp32, as long as the tile, to work in; may be ``values`` themselves.
            noise: for each element, the share of a step from which on it is rounded down; ``None``
                rounds to the nearest number.
        """

    @abstractmethod
    def read(self, piece: Piece, start: int, out: torch.Tensor) -> None:
        """Decode as many elements as ``out`` has, fp32 and contiguous, from ``start`` on."""

    def spoiled(self, piece: Piece, numel: int) -> torch.Tensor | None:
        """Count the blocks of a piece's first elements that decode to no finite numbers.

        Returns:
            Their number, 0-dim; ``None`` if there are no blocks.
        """
        return None


class CastCodec(Codec):
    """Casts values to a floating-point dtype.

    Args:
        dtype: the dtype on the wire.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a piece."""
        return aligned(numel * self._dtype.itemsize)

    def piece(self, raw: torch.Tensor, numel: int) -> Piece:
        """View the piece in the dtype."""
        return Piece(raw[: numel * self._dtype.itemsize].view(self._dtype))

    def write(
        self,
        values: torch.Tensor,
        piece: Piece,
        start: int,
        room: torch.Tensor,
        noise: torch.Tensor | None = None,
    ) -> None:
        """Round to the dtype."""
        assert noise is None, "casts round to the nearest number"
        piece.numbers[start : start + values.numel()].copy_(values)

    def read(self, piece: Piece, start: int, out: torch.Tensor) -> None:
        """Decode exactly."""
        out.copy_(piece.numbers[start : start + out.numel()])


class BlockCodec(Codec):
    """Numbers of one byte, and for every block the fp32 scale to multiply them by.

    A piece is ``| scales | numbers |``. A scale is the largest magnitude of its block divided by
    the largest number, but at least the smallest normal fp32.
    """

    block = BLOCK
    largest: float
    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a piece."""
        return aligned(4 * -(-numel // BLOCK) + self._bytes_of(numel))

    def piece(self, raw: torch.Tensor, numel: int) -> Piece:
        """Divide the piece into numbers and scales."""
        end = 4 * -(-numel // BLOCK)
        numbers = raw[end : end + self._bytes_of(numel)]
        return Piece(numbers.view(self.dtype), raw[:end].view(torch.float32))

    def write(
        self,
        values: torch.Tensor,
        piece: Piece,
        start: int,
        room: torch.Tensor,
        noise: torch.Tensor | None = None,
    ) -> None:
        """Divide every block by its scale, and round."""
        for place in split_blocks(values.numel()):
            self._encode_rows(
                rows_of(values[place]),
                scales_of(piece, start, place),
                rows_of(room[place]),
                self.numbers_of(piece, start, place),
                None if noise is None else rows_of(noise[place]),
            )

    def read(self, piece: Piece, start: int, out: torch.Tensor) -> None:
        """Multiply by the scales."""
        self._to_float(piece.numbers[start : start + out.numel()], out)
        for place in split_blocks(out.numel()):
            rows_of(out[place]).mul_(scales_of(piece, start, place))

    def spoiled(self, piece: Piece, numel: int) -> torch.Tensor | None:
        """Count the blocks whose largest number is not finite."""
        assert piece.scales is not None
        largest = piece.scales[: -(-numel // BLOCK)] * self.largest
        return largest.isfinite().logical_not_().sum()

    def _encode_rows(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor,
        work: torch.Tensor,
        numbers: torch.Tensor,
        noise: torch.Tensor | None,
    ) -> None:
        """Write scales and numbers of blocks; ``work`` may be the memory of ``rows``."""
        self.find_scales(rows, scales)
        # Nearly a division, in half of the time.
        self._round(torch.mul(rows, scales.reciprocal(), out=work), numbers, noise)

    def find_scales(self, rows: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the scales of blocks."""
        torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_(), out=scales)
        scales.div_(self.largest).clamp_(min=torch.finfo(torch.float32).tiny)

    def _round(self, work: torch.Tensor, numbers: torch.Tensor, noise: torch.Tensor | None) -> None:
        raise NotImplementedError

    def _to_float(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(numbers)

    def _bytes_of(self, numel: int) -> int:
        return numel

    def numbers_of(self, piece: Piece, start: int, place: slice) -> torch.Tensor:
        """View the numbers of some blocks; see :func:`scales_of`."""
        first, last = (self._bytes_of(start + end) for end in (place.start, place.stop))
        return piece.numbers[first:last]


class Int8Codec(BlockCodec):
    """Integers from -127 to 127; the error is at most half a scale."""

    largest = 127.0
    dtype = torch.int8

    def _round(self, work: torch.Tensor, numbers: torch.Tensor, noise: torch.Tensor | None) -> None:
        if noise is None:
            work.round_()
        else:  # a number just above 127 may become 128
            work.add_(noise).floor_().clamp_(-self.largest, self.largest)
        numbers.view(work.shape).copy_(work)


class Fp8Codec(BlockCodec):
    """Floats of 8 bits, e4m3: 3 bits of fraction, and the range of a block is 2^18."""

    largest = 448.0
    dtype = torch.float8_e4m3fn

    def _round(self, work: torch.Tensor, numbers: torch.Tensor, noise: torch.Tensor | None) -> None:
        assert noise is None, "fp8 rounds to the nearest number"
        numbers.view(work.shape).copy_(work)

    def _to_float(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        # Torch's own conversion takes ten times as long on CPUs. With the sign at the top and the
        # rest moved to where fp16 has exponent and fraction, the exponents differ by 8. NaN does
        # not matter: its block has a scale that is not finite.
        bits = numbers.view(torch.int8).to(torch.int16)
        bits.bitwise_left_shift_(7).bitwise_and_(-0x4001)
        out.copy_(bits.view(torch.float16)).mul_(256.0)


_CODECS: dict[WireFormat, Codec] = {
    WireFormat.FP32: CastCodec(torch.float32),
    WireFormat.FP16: CastCodec(torch.float16),
    WireFormat.BF16: CastCodec(torch.bfloat16),
    WireFormat.FP8: Fp8Codec(),
    WireFormat.INT8: Int8Codec(),
}


def codec_of(format_: WireFormat) -> Codec:
    """Return the codec of a format."""
    return _CODECS[format_]


def split_blocks(numel: int) -> Iterator[slice]:
    """Divide a tile into all of its whole blocks, and the rest."""
    whole = numel // BLOCK * BLOCK
    if whole:
        yield slice(0, whole)
    if whole < numel:
        yield slice(whole, numel)


def rows_of(values: torch.Tensor) -> torch.Tensor:
    """View whole blocks, or less than one, as rows."""
    return values.view(-1, min(BLOCK, values.numel()))


def scales_of(piece: Piece, start: int, place: slice) -> torch.Tensor:
    """View the scales of some blocks as a column.

    Args:
        piece: has one scale per block.
        start: the element of the piece at which the tile begins.
        place: the elements of the tile.
    """
    assert piece.scales is not None
    first, last = (start + place.start) // BLOCK, -(-(start + place.stop) // BLOCK)
    return piece.scales[first:last].unsqueeze(1)


def aligned(nbytes: int) -> int:
    """Round up to where the next piece may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def encode(
    codec: Codec,
    values: torch.Tensor,
    piece: Piece,
    room: Room,
    *,
    start: int = 0,
    error: torch.Tensor | None = None,
    noise: Noise | None = None,
    place: Sequence[int] = (),
) -> None:
    """Encode values.

    Args:
        codec: how.
        values: 1-D, of a floating dtype.
        piece: where they go.
        room: memory to work in.
        start: the element of the piece at which they begin, a multiple of a block.
        error: fp32, as long as the values: what was lost before. It is added to them, and becomes
            what is lost now: nothing where the result is not finite.
        noise: rounds at random.
        place: tells the random numbers of this piece from those of others.
    """
    for tile in room.tiles(values.numel()):
        part = values[tile]
        count = part.numel()
        work = room.take(0, count)
        if error is not None:
            part = error[tile].add_(part)
        elif part.dtype != torch.float32:
            part = work.copy_(part)
        at = start + tile.start
        codec.write(part, piece, at, work, None if noise is None else noise.at((*place, at), count))
        if error is not None:
            kept = room.take(1, count)
            codec.read(piece, at, kept)
            part.sub_(kept)
            # On the host the sum tells in a third of the time whether it has to. A device would
            # have to be waited for.
            is_host = part.device.type == CPU.type and dtensor.has_values(part)
            if not is_host or not math.isfinite(part.sum().item()):
                torch.nan_to_num(part, 0.0, 0.0, 0.0, out=part)


def decode(codec: Codec, piece: Piece, out: torch.Tensor, room: Room) -> None:
    """Decode as many elements as ``out`` has, into any floating dtype.

    Args:
        codec: how they were encoded.
        piece: where they are.
        out: 1-D, contiguous.
        room: memory to work in.
    """
    for tile in room.tiles(out.numel()):
        part = out[tile]
        if part.dtype == torch.float32:
            codec.read(piece, tile.start, part)
        else:
            work = room.take(0, part.numel())
            codec.read(piece, tile.start, work)
            part.copy_(work)
