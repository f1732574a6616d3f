"""Who decides which simulated rank's turn is next.

A right program does the same in every order of turns. To look for one that does not, pass the turn
at random, or try all orders::

    shardwise.simulate(train, 2, schedule=shardwise.schedules.Random(7))
    shardwise.simulate(train, 2, schedule=shardwise.schedules.Exhaustive(500))
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Exhaustive", "FixedOrder", "Random"]


class Schedule:
    """Decides whose turn is next: here the next rank that can go on, where one has to wait.

    Attributes:
        is_everywhere: whether the turn may pass at every operation on what ranks share.
    """

    is_everywhere = False

    def choose(self, count: int) -> int:
        """Choose between ``count`` ranks that can go on: 0 is the first behind the one that ran."""
        return 0


class Random(Schedule):
    """The turn passes at random, at every operation on what ranks share.

    Args:
        seed: the same seed is the same order.
    """

    is_everywhere = True

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)

    def choose(self, count: int) -> int:
        """Choose one at random.

        Args:
            count: how many ranks can go on.

        Returns:
            Which of them goes on, from 0.
        """
        return self._random.randrange(count)

    def __repr__(self) -> str:
        return f"Random({self._seed})"


class FixedOrder(Schedule):
    """The turn passes as it did in another run, which printed this.

    Args:
        choices: what was chosen, one after the other; behind them, the next rank that can go on.
    """

    is_everywhere = True

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = list(choices)
        #: What was chosen, and between how many.
        self.made: list[tuple[int, int]] = []

    def choose(self, count: int) -> int:
        """Choose as that run did.

        Args:
            count: how many ranks can go on.

        Returns:
            Which of them goes on, from 0.
        """
        at = len(self.made)
        choice = self._choices[at] if at < len(self._choices) else 0
        self.made.append((min(choice, count - 1), count))
        return self.made[-1][0]

    def __repr__(self) -> str:
        choices = [choice for choice, _ in self.made]
        while choices and not choices[-1]:
            choices.pop()
        return f"FixedOrder({choices})"


@dataclass(frozen=True)
class Exhaustive:
    """All orders of a small program, one run for each.

    Attributes:
        limit: the most runs.
    """

    limit: int

    def orders(self) -> Iterator[FixedOrder]:
        """Find one order after the other.

        Yields:
            An order, which is to be followed before the next is found.
        """
        choices: list[int] = []
        for _ in range(self.limit):
            yield (order := FixedOrder(choices))
            made = list(order.made)
            while made and made[-1][0] + 1 == made[-1][1]:
                made.pop()
            if not made:
                return
            choices = [*(choice for choice, _ in made[:-1]), made[-1][0] + 1]
