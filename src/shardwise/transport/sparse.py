"""A codec of the largest values alone: their positions, and their signs and sizes in two bits.

Of every chunk of 4,096 elements it sends those of the largest magnitude, in the order of their
positions. The sizes of a chunk are two numbers: the mean of the sizes above their mean, and that of
those below it. For ``k`` values of a chunk it sends

| part | bytes |
| --- | --- |
| two sizes, fp32 | 8 |
| for each value, its place in a bucket of 64 elements, its sign, and which size | k |
| for each bucket, a 1 for each of its values, and a 0 | (k + 64) / 8 |

This is 0.027 bytes per element for 2 %. Positions take 7.8 bits each instead of twelve (the code of
Elias and Fano for sorted numbers).
"""

from __future__ import annotations

import torch

from shardwise.transport.codecs import Piece, aligned, rows_of, split_blocks

#: Elements of a chunk.
CHUNK = 4096
#: Elements of a bucket.
_BUCKET = 64
#: A code is the place in the bucket, a bit for the sign, and a bit for the size.
_NEGATIVE, _LARGE = _BUCKET, 2 * _BUCKET


class TopKCodec:
    """The largest values of every chunk.

    The last chunk of a piece is decoded as long as it was encoded: how much it sends depends on its
    length.

    Args:
        density: the share of the elements that is sent.
    """

    block = CHUNK

    def __init__(self, density: float) -> None:
        self._density = density

    def count(self, numel: int) -> int:
        """Return how many values of a chunk of so many elements are sent."""
        return min(numel, max(1, round(self._density * numel)))

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a piece."""
        return aligned(8 * -(-numel // CHUNK) + self._bytes_of(numel))

    def piece(self, raw: torch.Tensor, numel: int) -> Piece:
        """Divide the piece into sizes, and positions with signs."""
        end = 8 * -(-numel // CHUNK)
        return Piece(raw[end : end + self._bytes_of(numel)], raw[:end].view(torch.float32))

    def write(
        self,
        values: torch.Tensor,
        piece: Piece,
        start: int,
        room: torch.Tensor,
        noise: torch.Tensor | None = None,
    ) -> None:
        """Select the largest values of every chunk, and pack them."""
        assert noise is None, "the largest values are not rounded at random"
        for place in split_blocks(values.numel(), CHUNK):
            rows = rows_of(values[place], CHUNK)
            largest = rows.abs().topk(self.count(rows.shape[1]), dim=1, sorted=False).indices
            positions = largest.sort(dim=1).values
            found = rows.gather(1, positions)
            sizes = found.abs()
            is_large = sizes >= sizes.mean(1, keepdim=True)
            levels = self._levels(piece, start, place)
            # A value that is not finite makes at least one of them so: it is in one of the sums.
            torch.stack([_mean(sizes, ~is_large), _mean(sizes, is_large)], dim=1, out=levels)
            codes, counts = self._parts(piece, start, place, rows.shape[1])
            codes.copy_(positions % _BUCKET + (found < 0) * _NEGATIVE + is_large * _LARGE)
            counts.copy_(_counted(positions // _BUCKET, 8 * counts.shape[1]))

    def read(self, piece: Piece, start: int, out: torch.Tensor) -> None:
        """Set all elements to 0, and then those that were sent."""
        for place in split_blocks(out.numel(), CHUNK):
            rows = rows_of(out[place], CHUNK)
            codes, counts = self._parts(piece, start, place, rows.shape[1])
            codes = codes.long()
            positions = _buckets(counts, codes.shape[1]) * _BUCKET + codes % _BUCKET
            levels = self._levels(piece, start, place)
            # 0, unless a size is not finite: then nothing of the chunk is.
            rows.copy_(levels.sum(1, keepdim=True).mul_(0.0).expand_as(rows))
            found = levels.gather(1, codes // _LARGE)
            found = torch.where((codes & _NEGATIVE).bool(), -found, found)
            rows.scatter_(1, positions, found)

    def spoiled(self, piece: Piece, numel: int) -> torch.Tensor | None:
        """Count the chunks with a size that is not finite."""
        assert piece.scales is not None
        sizes = piece.scales[: 2 * -(-numel // CHUNK)].view(-1, 2)
        return sizes.isfinite().all(1).logical_not_().sum()

    def _bytes_of(self, numel: int) -> int:
        """Return the bytes of the values of so many elements."""
        whole, rest = divmod(numel, CHUNK)
        return whole * sum(self._widths(CHUNK)) + (sum(self._widths(rest)) if rest else 0)

    def _widths(self, width: int) -> tuple[int, int]:
        """Return the bytes of codes and of counts of a chunk of so many elements."""
        count = self.count(width)
        buckets = -(-width // _BUCKET)
        return count, -(-(count + buckets) // 8)

    def _parts(
        self, piece: Piece, start: int, place: slice, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and the counts of some chunks of so many elements, one row for each."""
        first, last = (self._bytes_of(start + end) for end in (place.start, place.stop))
        codes, counts = self._widths(width)
        rows = piece.numbers[first:last].view(-1, codes + counts)
        return rows[:, :codes], rows[:, codes:]

    def _levels(self, piece: Piece, start: int, place: slice) -> torch.Tensor:
        """Return the two sizes of each chunk, the smaller one first."""
        assert piece.scales is not None
        first, last = (start + place.start) // CHUNK, -(-(start + place.stop) // CHUNK)
        return piece.scales[2 * first : 2 * last].view(-1, 2)


def _mean(sizes: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the mean of the chosen sizes of each row, or 0."""
    return (sizes * chosen).sum(1).div_(chosen.sum(1).clamp_(min=1))


def _counted(buckets: torch.Tensor, bits: int) -> torch.Tensor:
    """Write down how many values each bucket has: a 1 for each of them, and a 0 after the last.

    Args:
        buckets: that each value is in, ascending, ``(chunks, values)``.
        bits: of the result, a multiple of eight; those behind the last value are 0.

    Returns:
        uint8, ``(chunks, bits / 8)``.
    """
    chunks, count = buckets.shape
    order = torch.arange(count, device=buckets.device)
    ones = torch.zeros(chunks, bits, dtype=torch.uint8, device=buckets.device)
    # In front of a value there are those before it, and a 0 for each bucket before its own.
    ones.scatter_(1, buckets + order, 1)
    eighths = ones.view(chunks, -1, 8) << torch.arange(8, dtype=torch.uint8, device=buckets.device)
    return eighths.sum(2, dtype=torch.uint8)


def _buckets(counts: torch.Tensor, count: int) -> torch.Tensor:
    """Return the bucket of each value, int64, ``(chunks, values)``; see :func:`_counted`."""
    ones = counts.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=counts.device) & 1
    places = ones.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :count]
    return places - torch.arange(count, device=counts.device)
