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

Values that are not finite stay so in every format; in int8 they make their whole block so.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.diloco.settings import WireFormat
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


#: Elements that share one scale.
BLOCK = 256


class Codec(Protocol):
    """Rows of fp32 to rows of bytes, and back.

    Attributes:
        block: rows have a multiple of so many elements.
    """

    block: int

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """From fp32 ``(rows, n)`` to uint8 ``(rows, bytes)``; may share its memory."""

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """From uint8 ``(rows, bytes)`` to fp32 ``(rows, n)``; may share its memory."""


class CastCodec:
    """Values in a floating-point dtype.

    Args:
        dtype: on the wire.
    """

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Round to the dtype."""
        return rows.to(self._dtype).view(torch.uint8)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Exact."""
        return rows.view(self._dtype).to(torch.float32)


class Int8Codec:
    """Whole numbers from -127 to 127, and for every block the fp32 scale to multiply them by.

    A row is ``| scales | numbers |``. A scale is the largest magnitude of its block divided by 127,
    but at least the smallest normal fp32: so the error is at most half a scale.
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
    """The codec of a wire format."""
    match format_:
        case WireFormat.INT8:
            return Int8Codec()
        case WireFormat.FP16:
            return CastCodec(torch.float16)
        case WireFormat.BF16:
            return CastCodec(torch.bfloat16)
        case WireFormat.FP32:
            return CastCodec(torch.float32)
