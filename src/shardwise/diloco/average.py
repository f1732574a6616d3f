"""The average of a vector over the ranks of a group, encoded on the wire, bitwise equal on all.

    1.  each rank cuts its vector into as many chunks as there are ranks, encodes them, and sends
        chunk r to rank r
    2.  rank r decodes what it received, adds it up in the order of ranks, divides, encodes the
        result, and sends it to all ranks, which all decode the same bytes

A rank sends 2 (R - 1) / R of its encoded vector, as in a ring all-reduce, whatever the format. A
value is encoded twice: its error is at most the mean of the ranks' errors in step 1 plus the error
of step 2.

| format | bytes per element | error of one encoding |
| --- | --- | --- |
| fp32 | 4 | none |
| fp16 | 2 | 2^-11 of the value (2^-25 below 2^-14); infinite above 65504 |
| bf16 | 2 | 2^-8 of the value (2^-134 below 2^-126) |
| int8 | 1 + 4 / 256 | 1/254 of the largest value in the same block of 256 (at least 2^-127) |

Values that are not finite stay so in every format; in int8 they make their entire block so.
"""

from __future__ import annotations

import enum
from typing import Protocol

import torch

from shardwise.diloco.settings import WireFormat
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Label, Work

#: Elements that share one scale.
BLOCK = 256


class Average:
    """An average in progress, which every rank of the group creates; the first half starts at once.

    Args:
        vector: fp32, 1-D; may change afterwards.
        all_to_all: moves rows between the ranks.
        codec: encodes and decodes the rows.
        label: names the vector in errors; equal on all ranks.
        error: fp32, as long as the vector: what encoding has lost of this rank's earlier
            contributions. It is added to this vector, and replaced by what encoding loses now once
            the average is known. ``None`` drops what is lost, as the second encoding always does.
    """

    def __init__(
        self,
        vector: torch.Tensor,
        all_to_all: AllToAll,
        codec: Codec,
        label: str,
        error: torch.Tensor | None = None,
    ) -> None:
        ranks = all_to_all.world_size
        self._numel = vector.numel()
        self._all_to_all = all_to_all
        self._codec = codec
        self._label = label
        self._error = error
        self._chunk = -(-self._numel // (ranks * codec.block)) * codec.block
        self._result: torch.Tensor | None = None
        self._work: Work | None = None
        self._half = _Half.FIRST
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
        """Start the second half, after waiting for the first. A no-op if it has started.

        Raises:
            PeerLostError: a peer is lost.
        """
        if self._work is None or self._half is _Half.SECOND:
            return
        self._work.wait()
        total: torch.Tensor | None = None
        for rank in range(self._all_to_all.world_size):
            decoded = self._codec.decode(self._received[rank : rank + 1])
            total = decoded.clone() if total is None else total.add_(decoded)
        assert total is not None
        total.div_(self._all_to_all.world_size)
        encoded = self._codec.encode(total)
        self._send(encoded.expand(self._all_to_all.world_size, -1), "average")
        self._half = _Half.SECOND

    def wait(self) -> torch.Tensor:
        """Wait for the result.

        Returns:
            fp32, 1-D, as long as the vector; bitwise equal on all ranks.

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
        self._work = self._all_to_all.start(rows, self._received, label)


class _Half(enum.Enum):
    """How far an average is."""

    FIRST = "first"  # contributions are on their way to the ranks that average them
    SECOND = "second"  # averages are on their way to all ranks


class Codec(Protocol):
    """Encodes rows of fp32 as rows of bytes, and decodes them.

    Attributes:
        block: rows have a multiple of ``block`` elements.
    """

    block: int

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode fp32 ``(rows, n)`` as uint8 ``(rows, bytes)``, which may share its memory."""

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Decode uint8 ``(rows, bytes)`` to fp32 ``(rows, n)``, which may share its memory."""


class CastCodec:
    """Casts values to a floating-point dtype.

    Args:
        dtype: the dtype on the wire.
    """

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Round to the dtype."""
        return rows.to(self._dtype).view(torch.uint8)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Decode exactly."""
        return rows.view(self._dtype).to(torch.float32)


class Int8Codec:
    """Integers from -127 to 127, and for every block the fp32 scale to multiply them by.

    A row is ``| scales | numbers |``. A scale is the largest magnitude of its block divided by 127,
    but at least the smallest normal fp32, so the error is at most half a scale.
    """

    block = BLOCK

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Round to the nearest multiple of the block's scale."""
        blocks = rows.view(len(rows), -1, BLOCK)
        scales = blocks.abs().amax(dim=2, keepdim=True).div_(127)
        scales.clamp_(min=torch.finfo(torch.float32).tiny)
        numbers = (blocks / scales).round_().clamp_(-127, 127).to(torch.int8)
        parts = (scales, numbers)
        return torch.cat([part.view(len(rows), -1).view(torch.uint8) for part in parts], dim=1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply by the scales."""
        count = rows.shape[1] // (BLOCK + 4)
        scales = rows[:, : 4 * count].view(torch.float32).unsqueeze(2)
        numbers = rows[:, 4 * count :].view(torch.int8).to(torch.float32)
        return (numbers.view(len(rows), count, BLOCK) * scales).flatten(1)


def codec_of(format_: WireFormat) -> Codec:
    """Return the codec of a wire format."""
    match format_:
        case WireFormat.INT8:
            return Int8Codec()
        case WireFormat.FP16:
            return CastCodec(torch.float16)
        case WireFormat.BF16:
            return CastCodec(torch.bfloat16)
        case WireFormat.FP32:
            return CastCodec(torch.float32)
