"""The order of examples: a function of seed and position, and of nothing else.

So any rank of any world can take any part of it, and a resumed run goes on where the other stopped.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Draw:
    """What comes at a position of the order.

    Attributes:
        epoch: 0, 1, 2, ...
        index: which example of the epoch.
        key: 64 bits that belong to the epoch.
    """

    epoch: int
    index: int
    key: int


class Shuffle:
    """Every example once in each epoch, in an order of its own.

    Args:
        size: examples of an epoch.
        seed: of the order.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed

    def at(self, position: int) -> Draw:
        """What comes at a position, counted from the beginning of the training."""
        epoch, turn = divmod(position, self._size)
        key = mix(mix(self._seed) ^ epoch)
        return Draw(epoch, permute(turn, self._size, key), key)


def permute(index: int, size: int, key: int) -> int:
    """Where ``index`` goes in a pseudo-random permutation of ``range(size)``.

    A Feistel network over the next even power of two, walked until it falls into the range: every
    index by itself, in constant memory, the same on every machine and forever.
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            left, right = right, left ^ (mix(key ^ (turn << 56) ^ right) & mask)
        index = (left << half) | right
        if index < size:
            return index


def mix(value: int) -> int:
    """Spread 64 bits so that each depends on all (the finaliser of splitmix64)."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
