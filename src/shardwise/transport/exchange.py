"""Memory through which ranks of one host hand each other tensors that do not live in common memory.

A rank lays its tensors out in a part of its own range of the arena, tells where, and its peers
read them there. Where a part lies is the writer's business alone, so ranks need not agree on it. A
part is written to again when all peers have read it; nobody waits for that, as another one is
taken until then. Ranks wait for each other in every collective, so there are few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.transport.arena import Arena, Window, whole_pages

_ALIGNMENT = 64
# Addresses of a part. They cost nothing: it takes as much memory as was ever laid out in it.
_ROOM = 2**32
# Of each peer so many parts stay mapped.
_SEEN = 3


@dataclass
class Part:
    """A piece of memory of this rank.

    Attributes:
        at: where in the arena it begins.
        window: through which it is seen here.
        use: the number of its last use.
        is_open: whether this rank has not yet finished that use itself.
    """

    at: int
    window: Window
    use: int = 0
    is_open: bool = False


def lay_out(numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> tuple[list[int], int]:
    """Where tensors lie that follow each other, in bytes, and where the last one ends."""
    offsets, end = [], 0
    for numel, dtype in zip(numels, dtypes, strict=True):
        offsets.append(end)
        end += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def tensors_in(
    window: Window, numels: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """The tensors of a layout, as a window shows them."""
    offsets, _ = lay_out(numels, dtypes)
    return [
        window.tensor(offset, numel, dtype)
        for offset, numel, dtype in zip(offsets, numels, dtypes, strict=True)
    ]


class Exchange:
    """The parts of this rank, and what it sees of its peers'.

    Args:
        arena: this rank's own range.
        read_by_all: how many uses all peers are done with.
    """

    def __init__(
        self,
        arena: Arena,
        read_by_all: Callable[[], int],
    ) -> None:
        self._arena = arena
        self._read_by_all = read_by_all
        self._parts: list[Part] = []
        # Of each peer the parts that were read last, by where they begin.
        self._seen: dict[int, dict[int, Window]] = {}

    def part(self, use: int, nbytes: int) -> Part:
        """Take a part of at least ``nbytes`` for this rank's use number ``use``."""
        over = self._read_by_all()
        for part in self._parts:
            if part.use <= over and not part.is_open and part.window.length >= nbytes:
                break
        else:
            part = self._make(max(whole_pages(nbytes), _ROOM))
            self._parts.append(part)
        part.use, part.is_open = use, True
        return part

    def see(self, rank: int, at: int, nbytes: int) -> Window:
        """The part of a peer that begins at ``at``."""
        length = whole_pages(max(nbytes, 1))
        seen = self._seen.setdefault(rank, {})
        window = seen.pop(at, None)
        if window is None or window.length < length:
            window = Window(length)
            window.open_sparse(self._arena.fd, at)
        seen[at] = window  # as the last one
        if len(seen) > _SEEN:
            del seen[next(iter(seen))]
        return window

    def _make(self, length: int) -> Part:
        window = Window(length)
        made = Part(self._arena.take(length), window)
        window.open_sparse(self._arena.fd, made.at)
        return made
