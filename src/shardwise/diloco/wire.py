"""How fp32 values become bytes, and how far what comes back may be from them.

| format | bytes an element | error of one encoding |
| --- | --- | --- |
| fp32 | 4 | none |
| fp16 | 2 | 2^-11 of the value (2^-25 below 2^-14); infinite above 65504 |
| bf16 | 2 | 2^-8 of the value (2^-134 below 2^-126) |
| int8 | 1 + 4 / 256 | 1/254 of the largest value of the same block of 256 (at least 2^-127) |

Values that are not finite stay so in every format; in int8 they make their block so.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.diloco.settings import WireFormat

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
