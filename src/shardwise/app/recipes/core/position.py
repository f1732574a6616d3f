"""How long a training is, how far it is, and which example comes where.

A training that is counted in epochs takes its examples in an endless order, epoch after epoch. A
step that begins in one epoch may end in the next: no example is left out, and none comes twice in
an epoch, whatever the size of a step. So the number of examples says all about a position, and a
position means the same on any number of ranks.

The order of examples is a function of seed and position alone. Any rank of any world can take any
part of it, and a resumed run goes on where the other one stopped.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shardwise.base.mixing import mix
from shardwise.insight.schema.training import TrainConfig


@dataclass(frozen=True)
class Position:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        examples: examples that all ranks together have trained on.
    """

    step: int = 0
    examples: int = 0


class Every(enum.Enum):
    """What ``--eval-every`` counts."""

    STEP = "step"
    EPOCH = "epoch"


@dataclass(frozen=True, kw_only=True)
class TrainingSpan:
    """How long a training is.

    Attributes:
        steps: the most optimizer steps; None: epochs alone decide.
        epochs: the most epochs; None: steps alone decide.
        per_epoch: examples per epoch; None: nothing is counted in epochs, or the data have not been
            opened yet.
        evaluation: what evaluations are counted in, if there are epochs.
    """

    steps: int | None = None
    epochs: int | None = None
    per_epoch: int | None = None
    evaluation: Every = Every.EPOCH

    @classmethod
    def of(cls, config: TrainConfig, per_epoch: int | None = None) -> TrainingSpan:
        """Return the span that a configuration asks for, with ``examples`` per epoch."""
        return cls(steps=config.steps, epochs=config.epochs, per_epoch=per_epoch)

    def left(self, position: Position, per_step: int) -> int:
        """Return the steps left from a position on, of ``per_step`` examples each; 0 at the end.

        At least 1 if epochs alone decide, and their length is not known yet.
        """
        left = []
        if self.steps is not None:
            left.append(self.steps - position.step)
        if self.epochs is not None and self.per_epoch is not None:
            left.append(-((position.examples - self.epochs * self.per_epoch) // per_step))
        assert left or self.epochs is not None, "a training ends somewhere"
        return max(0, min(left, default=1))

    def steps_in_all(self, per_step: int) -> int:
        """Return the steps of the whole training, of ``per_step`` examples each."""
        return self.left(Position(), per_step)

    def epoch(self, position: Position) -> float | None:
        """Return the epochs done, with their fraction; None: nothing is counted in epochs."""
        return None if self.per_epoch is None else position.examples / self.per_epoch

    def evaluation_count(self, position: Position) -> int:
        """Return what ``--eval-every`` counts: full epochs done, or steps."""
        if self.per_epoch is None or self.evaluation is Every.STEP:
            return position.step
        return int(position.examples // self.per_epoch)

    def shown(self, position: Position) -> str:
        """Return a position for people: ``step 12 of 600``, or ``epoch 1.50 of 2 (step 12)``."""
        epoch = self.epoch(position)
        if epoch is None or self.epochs is None:
            return f"step {position.step} of {self.steps}"
        return f"epoch {epoch:.2f} of {self.epochs} (step {position.step})"


@dataclass(frozen=True)
class Draw:
    """The example at a position of the order.

    Attributes:
        epoch: 0, 1, 2, ...
        index: which example of the epoch.
        key: 64 random bits that belong to the epoch.
    """

    epoch: int
    index: int
    key: int


class Shuffle:
    """Every example once in each epoch, in an order of its own.

    Args:
        size: examples per epoch.
        seed: of the order.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed

    def at(self, position: int) -> Draw:
        """Return what comes at a position, counted from the beginning of the training."""
        epoch, turn = divmod(position, self._size)
        key = mix(mix(self._seed) ^ epoch)
        return Draw(epoch, permute(turn, self._size, key), key)


def permute(index: int, size: int, key: int) -> int:
    """Return where ``index`` goes in a pseudorandom permutation of ``range(size)``.

    A Feistel network over the next even power of two, repeated until the result is in the range:
    constant memory, any index by itself, the same on every machine.
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
