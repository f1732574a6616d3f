"""Codecs of less than a byte per element, for values whose errors are kept and sent later.

| format | bytes per element | numbers | squared error of normal values |
| --- | --- | --- | --- |
| int4 | 1/2 + 4 / 256 | -7 to 7, times the largest value of the block / 7 | 1.6 % |
| ternary | 1/5 + 5 / 256 | -1, 0 and 1, times a level of the block | 19 % |

A ternary number has 1.58 bits, and five of them fit into a byte. The bytes of a block begin with
those that its first elements are in: of a block of 256, byte ``j`` has the elements ``j``,
``j + 52``, ``j + 104``, and so on.
"""

from __future__ import annotations

import torch

from shardwise.transport import codecs
from shardwise.transport.codecs import (
    BLOCK,
    BlockCodec,
    Codec,
    Piece,
    rows_of,
    scales_of,
    split_blocks,
)
from shardwise.transport.wire import WireFormat

#: The best threshold between 0 and 1 for normal values is 0.612 standard deviations, which is this
#: share of their mean magnitude.
_THRESHOLD = 0.767


class _PackedCodec(BlockCodec):
    """Several numbers in a byte, as the digits of a number.

    A block of less than 256 elements, which is the last one of a piece, is decoded as long as it
    was encoded: where its numbers are depends on its length.
    """

    dtype = torch.uint8
    base: int
    per_byte: int
    #: What a digit of 0 stands for.
    lowest: int

    def _encode_rows(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor,
        work: torch.Tensor,
        numbers: torch.Tensor,
        noise: torch.Tensor | None,
    ) -> None:
        assert noise is None, "formats of less than a byte round to the nearest number"
        self._to_digits(rows, scales, work)
        step = -(-work.shape[1] // self.per_byte)
        packed = work[:, :step]
        for i in range(1, self.per_byte):
            part = work[:, i * step : (i + 1) * step]
            packed[:, : part.shape[1]].add_(part, alpha=self.base**i)
        numbers.view(-1, step).copy_(packed)

    def read(self, piece: Piece, start: int, out: torch.Tensor) -> None:
        """Multiply the numbers by the scales."""
        for place in split_blocks(out.numel()):
            rows = rows_of(out[place])
            step = -(-rows.shape[1] // self.per_byte)
            packed = self.numbers_of(piece, start, place).view(-1, step).float()
            for i in range(self.per_byte):
                part = rows[:, i * step : (i + 1) * step]
                # The numbers are whole, so that half of one keeps the quotient away from them.
                rest = packed.add(0.5).mul_(1 / self.base).floor_()
                digits = packed.sub_(rest, alpha=self.base)
                part.copy_(digits[:, : part.shape[1]])
                packed = rest
            rows.add_(self.lowest).mul_(scales_of(piece, start, place))

    def _to_digits(self, rows: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write scales and digits; ``out`` may be the memory of ``rows``."""
        raise NotImplementedError

    def _bytes_of(self, numel: int) -> int:
        whole, rest = divmod(numel, BLOCK)
        return whole * -(-BLOCK // self.per_byte) + -(-rest // self.per_byte)


class Int4Codec(_PackedCodec):
    """Integers from -7 to 7, two in a byte; the error is at most half a scale."""

    largest = 7.0
    base, per_byte, lowest = 16, 2, -7

    def _to_digits(self, rows: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        self.find_scales(rows, scales)
        torch.mul(rows, scales.reciprocal(), out=out).round_().sub_(self.lowest)


class TernaryCodec(_PackedCodec):
    """Signs of the larger values of a block, and 0 for the others; five in a byte.

    The scale is the mean magnitude of the values that are not 0, with which no other scale has a
    smaller squared error: at most that of sending zeros. The threshold is found in two steps, for
    normal values first, and then half of the scale that follows.
    """

    largest = 1.0
    base, per_byte, lowest = 3, 5, -1

    def _to_digits(self, rows: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        mean = torch.linalg.vector_norm(rows, 1, 1, keepdim=True).div_(rows.shape[1])
        level = self._level(rows, self._signs(rows, mean * _THRESHOLD))
        signs = self._signs(rows, level / 2)
        # If a value is not finite, neither is the mean, whatever was counted.
        torch.add(self._level(rows, signs), mean.mul_(0.0), out=scales)
        torch.sub(signs, self.lowest, out=out)

    def _signs(self, rows: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        """Return -1, 0 or 1 for each value."""
        return (rows > threshold).float().sub_((rows < -threshold).float())

    def _level(self, rows: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
        """Return the mean magnitude of the values that are not 0 in ``signs``."""
        count = torch.linalg.vector_norm(signs, 1, 1, keepdim=True).clamp_(min=1.0)
        total: torch.Tensor = torch.linalg.vecdot(rows, signs)
        return total.unsqueeze(1).div_(count)


_FEW_BITS: dict[WireFormat, Codec] = {
    WireFormat.INT4: Int4Codec(),
    WireFormat.TERNARY: TernaryCodec(),
}


def codec_of(format_: WireFormat) -> Codec:
    """Return the codec of a format, of those that :class:`Wire` does not have, too."""
    return _FEW_BITS.get(format_) or codecs.codec_of(format_)
