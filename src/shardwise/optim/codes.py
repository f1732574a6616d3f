"""Codes of eight bits: which numbers from -1 or 0 to 1 they stand for, and rounding.

The values are those of dynamic tree quantization (Dettmers, arXiv 1511.04561) as 8-bit optimizers
have them (Dettmers et al., arXiv 2110.02861): seven decades, each with twice as many values, evenly
spaced, as the decade below.

A number between two codes becomes one of them: the nearer one, or the upper one if it is more than
some share of the way up. A second moment changes by a thousandth of itself in a step, which is less
than half of the way to the next code. Rounded to the nearest, most would never change, and would
stay too small. With shares spread evenly over the steps, as :func:`share_of` gives them, it becomes
the upper code as often as it should, and is right on average.

The code is found without a search. The bits of a float, read as an integer, grow with its value, so
the upper 16 bits divide all floats into cells. No cell has parts of three codes, and a table says
of each cell which code it begins with, and where the next one takes over.
"""

from __future__ import annotations

import enum
import functools
from array import array

import torch

from shardwise._torch import dtensor

CODES = 256
#: The share with which the nearest code is taken.
NEAREST = 0.5
_DECADES = 7
_GOLDEN = (5**0.5 - 1) / 2
_CELL_BITS = 16  # of the 32 of a float
_SIGN = 1 << 31
_LOW = (1 << (32 - _CELL_BITS)) - 1


class Range(enum.Enum):
    """The numbers that codes stand for."""

    SIGNED = "from -1 to 1"
    UNSIGNED = "from 0 to 1"


# Numbers from 0 to 1 have the first of the cells.
_CELLS = {Range.SIGNED: 1 << _CELL_BITS, Range.UNSIGNED: 1 << (_CELL_BITS - 2)}


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
    return tuple(array("f", sorted(found)))


def share_of(step: float) -> float:
    """The share from which on second moments are rounded up in a step.

    Multiples of the golden ratio, modulo 1, are spread evenly however many there are.

    Args:
        step: the number of the step, from 1.
    """
    return step * _GOLDEN % 1.0


class CodeBook:
    """The codes of a range on a device.

    Args:
        numbers: the range.
        device: where tensors are encoded and decoded.
        share: of the way from a code to the next one, between 0 and 1. Numbers from there on become
            the next one.
    """

    def __init__(self, numbers: Range, device: torch.device, share: float = NEAREST) -> None:
        self._is_signed = numbers is Range.SIGNED
        self._values = torch.tensor(values(numbers), dtype=torch.float32, device=device)
        if dtensor.has_values(self._values):
            self._table = _table(numbers, share).to(device)
        else:  # in a rehearsal
            self._table = torch.empty(_CELLS[numbers], dtype=torch.int32, device=device)
        # As tensors, numbers need not be converted each time.
        self._sign_shift, self._cell_shift, self._magnitude, self._cell = (
            torch.tensor(number, dtype=torch.int32)
            for number in (31, 32 - _CELL_BITS, _SIGN - 1, _CELLS[numbers] - 1)
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
        """Write the code of each number.

        In the unsigned range, nothing but zero becomes the code of zero: second moments divide. And
        nothing but 1, the largest of a block, becomes the code of 1.

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


def _table(numbers: Range, share: float) -> torch.Tensor:
    """For each cell, what is added to a key of it so that the upper bits of the sum are the code.

    A key of the cell is ``(cell << 16) + low``. The first term is taken off, the code put in its
    place, and a carry out of the lower bits makes it the next code.
    """
    starts = _first_keys(numbers, share)
    count = _CELLS[numbers]
    lowest = -count // 2 if numbers is Range.SIGNED else 0
    at = (starts >> (32 - _CELL_BITS)) - lowest
    begins, carry = torch.zeros(2, count, dtype=torch.int64)
    begins[at] = 1
    assert int(begins.sum()) == len(starts), "a cell has parts of three codes"
    carry[at] = _LOW + 1 - (starts & _LOW)
    first = torch.arange(lowest, lowest + count) << (32 - _CELL_BITS)
    code = begins.cumsum(0) - begins  # at the beginning of the cell
    entry: torch.Tensor = (code << (32 - _CELL_BITS)) + carry - first
    # Those of NaN are too large. Negative cells come last: as bits, they have no sign.
    return entry.clamp(max=_SIGN - 1).int().roll(lowest)


def _first_keys(numbers: Range, share: float) -> torch.Tensor:
    """The key of the smallest number that is encoded as each code but the first; int64."""
    known = torch.tensor(values(numbers), dtype=torch.float64)
    wanted = known[:-1] + (known[1:] - known[:-1]) * share
    if numbers is Range.UNSIGNED:
        wanted[0] = 0.0
        wanted[-1] = 1.0  # else a cell near it might have three codes
    nearest = wanted.float()
    # The bits of negative numbers, without the sign, grow with their absolute value.
    bits = nearest.view(torch.int32).long()
    keys = torch.where(bits >= 0, bits, bits ^ (_SIGN - 1))
    keys[nearest.double() < wanted] += 1
    if numbers is Range.UNSIGNED:
        keys[0] += 1
    return keys
