"""Codes of eight bits: which numbers from -1 or 0 to 1 they stand for, and the nearest one.

The values are those of dynamic tree quantization (Dettmers, arXiv 1511.04561) as 8-bit optimizers
have them (Dettmers et al., arXiv 2110.02861): seven decades, each with twice as many values, evenly
spaced, as the decade below.

The nearest code is found without a search. The bits of a float, read as an integer, grow with its
value, so the upper 16 bits divide all floats into cells. No cell has parts nearest to three codes,
and a table says of each cell which code it begins with, and where the next one takes over.
"""

from __future__ import annotations

import bisect
import enum
import functools
import itertools
import struct

import torch

CODES = 256
_DECADES = 7
_CELL_BITS = 16  # of the 32 of a float
_CELLS = 1 << _CELL_BITS
_SIGN = 1 << 31
_LOW = (1 << (32 - _CELL_BITS)) - 1


class Range(enum.Enum):
    """The numbers that codes stand for."""

    SIGNED = "from -1 to 1"
    UNSIGNED = "from 0 to 1"


@functools.cache
def values(numbers: Range) -> tuple[float, ...]:
    """The 256 numbers that the codes stand for, ascending; each is a float32.

    A decade is divided into equal parts; the code of a part stands for its middle. 0 and 1 are
    added.
    """
    found = {0.0, 1.0}
    for decade in range(_DECADES):
        parts = 2**decade if numbers is Range.SIGNED else 2 ** (decade + 1)
        for part in range(parts):
            value = (0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (decade + 1 - _DECADES)
            found |= {value, -value} if numbers is Range.SIGNED else {value}
    assert len(found) == CODES
    return tuple(_float32(value) for value in sorted(found))


class CodeBook:
    """The codes of a range on a device.

    Args:
        numbers: the range.
        device: where tensors are encoded and decoded.
    """

    def __init__(self, numbers: Range, device: torch.device) -> None:
        self._is_signed = numbers is Range.SIGNED
        self._values = torch.tensor(values(numbers), dtype=torch.float32, device=device)
        self._table = torch.tensor(_table(numbers), dtype=torch.int32, device=device)
        # As tensors, numbers need not be converted each time.
        self._sign_shift, self._cell_shift, self._magnitude, self._cell = (
            torch.tensor(number, dtype=torch.int32)
            for number in (31, 32 - _CELL_BITS, _SIGN - 1, _CELLS - 1)
        )

    def decode(self, codes: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers that codes stand for.

        Args:
            codes: uint8.
            index: memory to work in: int64, of the same shape, contiguous.
            out: float32, of the same shape, contiguous.
        """
        index.copy_(codes)
        torch.index_select(self._values, 0, index.view(-1), out=out.view(-1))

    def encode(
        self, numbers: torch.Tensor, index: torch.Tensor, work: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the code nearest to each number; of two that are as near, the larger.

        Nothing but zero becomes the code of zero in the unsigned range: second moments divide.

        Args:
            numbers: float32, contiguous, in the range. They are overwritten.
            index: memory to work in: int64, of the same shape, contiguous.
            work: the same: int32.
            out: uint8, of the same shape.
        """
        keys = numbers.view(torch.int32)
        if self._is_signed:  # the bits of negative numbers grow with their absolute value
            torch.bitwise_right_shift(keys, self._sign_shift, out=work)
            keys.bitwise_xor_(work.bitwise_and_(self._magnitude))
        torch.bitwise_right_shift(keys, self._cell_shift, out=work)
        index.copy_(work.bitwise_and_(self._cell))
        torch.index_select(self._table, 0, index.view(-1), out=work.view(-1))
        out.copy_(work.add_(keys).bitwise_right_shift_(self._cell_shift))


@functools.cache
def _table(numbers: Range) -> tuple[int, ...]:
    """For each cell, what is added to a key of it so that the upper bits of the sum are the code.

    A key of the cell is ``(cell << 16) + low``. The first term is taken off, the code put in its
    place, and a carry out of the lower bits makes it the next code.
    """
    starts = _first_keys(numbers)
    table = []
    for at in range(_CELLS):
        cell = at if at < _CELLS // 2 else at - _CELLS  # the upper half of keys is negative
        first = cell << (32 - _CELL_BITS)
        code = bisect.bisect_right(starts, first)
        inside = starts[code : bisect.bisect_right(starts, first + _LOW)]
        assert len(inside) <= 1, f"cell {cell} has {len(inside) + 1} codes"
        carry = (_LOW + 1 - (inside[0] & _LOW)) if inside else 0
        entry = (code << (32 - _CELL_BITS)) + carry - first
        table.append(min(entry, _SIGN - 1))  # the last ones are of NaN
    return tuple(table)


def _first_keys(numbers: Range) -> list[int]:
    """The key of the smallest number that each code but the first is nearest to."""
    found = []
    known = values(numbers)
    for lower, upper in itertools.pairwise(known):
        middle = (lower + upper) / 2  # exact: Python's floats have twice as many bits
        key = _key(middle)
        found.append(key if _float32(middle) >= middle else key + 1)
    if numbers is Range.UNSIGNED:
        found[0] = _key(0.0) + 1
    return found


def _float32(value: float) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def _key(value: float) -> int:
    """The bits of a float32 as a signed integer that grows with the value."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits if bits >= 0 else bits ^ (_SIGN - 1)
