"""Things in order, cut into portions of a limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def portions(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield all items, as many at a time as have ``most`` together; a larger one comes alone."""
    portion: list[T] = []
    total = 0
    for item in items:
        if portion and total + size(item) > most:
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += size(item)
    if portion:
        yield portion
