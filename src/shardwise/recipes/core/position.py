"""How long a training is, and how far it has come: in steps, or in epochs.

A training that is counted in epochs takes its examples in an order without end, epoch after epoch.
A step that begins in one epoch may end in the next: no example is left out, and none is taken twice
within an epoch, whatever the size of a step. So the number of examples says all about a position,
and the same position means the same on another number of ranks.

The order of examples: a function of seed and position, and of nothing else.

So any rank of any world can take any part of it, and a resumed run goes on where the other stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.recipes.core.config import TrainConfig


@dataclass(frozen=True)
class Position:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        examples: examples that all ranks together have taken.
    """

    step: int = 0
    examples: int = 0


@dataclass(frozen=True, kw_only=True)
class Span:
    """How long a training is.

    Attributes:
        steps: at most so many optimizer steps; None where epochs decide alone.
        epochs: at most so many epochs; None where steps decide alone.
        per_epoch: examples of an epoch; None where nothing is counted in epochs.
    """

    steps: int | None = None
    epochs: int | None = None
    per_epoch: int | None = None

    @classmethod
    def of(cls, config: TrainConfig, per_epoch: int | None = None) -> Span:
        """The span that a configuration asks for, of data with so many examples."""
        return cls(steps=config.steps, epochs=config.epochs, per_epoch=per_epoch)

    def left(self, position: Position, per_step: int) -> int:
        """Steps to make from a position on, of ``per_step`` examples each; 0 at the end."""
        left = []
        if self.steps is not None:
            left.append(self.steps - position.step)
        if self.epochs is not None and self.per_epoch is not None:
            left.append(-((position.examples - self.epochs * self.per_epoch) // per_step))
        assert left, "a training ends somewhere"
        return max(0, min(left))

    def steps_in_all(self, per_step: int) -> int:
        """Steps of the whole training, of ``per_step`` examples each."""
        return self.left(Position(), per_step)

    def epoch(self, position: Position) -> float | None:
        """Epochs done, with their fraction."""
        return None if self.per_epoch is None else position.examples / self.per_epoch

    def judged(self, position: Position) -> int:
        """What evaluations are counted by: whole epochs done, or steps."""
        return position.step if self.per_epoch is None else int(position.examples // self.per_epoch)

    def shown(self, position: Position) -> str:
        """A position for people: ``step 12 of 600``, or ``epoch 1.50 of 2 (step 12)``."""
        epoch = self.epoch(position)
        if epoch is None or self.epochs is None:
            return f"step {position.step} of {self.steps}"
        return f"epoch {epoch:.2f} of {self.epochs} (step {position.step})"


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
