"""In which order a stream takes its documents: the source's, or shuffled in a buffer.

The buffer of B documents shuffles its stream block by block. While it gives one block away, in the
order that the seed decides, the next one fills up in its place, so that it reads one document for
each that it gives, and holds B at any time but the first:

    source      a b c d | e f g h | i j k l | ...         B = 4
    given       c a d b | h e g f | ...
    holds       b e f g   with c a d given: one of the first block, three of the second

So a block's documents follow from where the block begins, and a position needs none of their texts:
where the source stood at the beginning of the block, and how many of it are given. Going on reads
the block again. (A buffer that keeps a document for as long as chance wants has no such place.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.recipes.documents import Source
from shardwise.recipes.shuffle import mix, permute


class DocumentOrder(Protocol):
    """The documents of one stream, once each."""

    def __next__(self) -> str:
        """The next document; ``StopIteration`` behind the last."""

    def state(self) -> dict[str, Any]:
        """Where the order stands: plain values that JSON can hold."""


@dataclass(frozen=True)
class Part:
    """Which documents, in which epoch.

    Attributes:
        source: where documents come from.
        stream: which stream, 0 .. streams - 1.
        streams: how many there are.
        epoch: how many times the stream has had all its documents.
    """

    source: Source
    stream: int
    streams: int
    epoch: int


@dataclass(frozen=True)
class ShuffleBuffer:
    """How documents are shuffled.

    Attributes:
        size: documents that are shuffled together; 0: none are.
        seed: of the order.
    """

    size: int = 0
    seed: int = 0

    def order(self, part: Part, where: Mapping[str, Any] | None) -> DocumentOrder:
        """The documents of a part, from where another such order stood; None: from the beginning.

        Raises:
            ValueError, KeyError, TypeError: ``where`` is no state of such an order.
        """
        if not self.size:
            if where is not None and "buffer" in where:
                raise ValueError(f"a buffer of {where['buffer']} documents, and not none")
            return _InOrder(part, where)
        return _Shuffled(part, self, where)


class _InOrder:
    """Documents as they come.

    Args:
        part: which.
        where: from which state of the source on.
    """

    def __init__(self, part: Part, where: Mapping[str, Any] | None) -> None:
        self._dataset = part.source.part(part.stream, part.streams)
        self._texts: Iterator[str] = part.source.training_texts(self._dataset, where)
        self._began_at = where

    def __next__(self) -> str:
        self._began_at = None
        return next(self._texts)

    def state(self) -> dict[str, Any]:
        """That of the source."""
        # A dataset that was told where to begin, and has not begun, does not know it yet.
        state = self._dataset.state_dict() if self._began_at is None else self._began_at
        return dict(state)


class _Shuffled:
    """Documents of a block in the order that the seed decides, block after block.

    Args:
        part: which.
        buffer: how many are a block, and the seed.
        where: from which state on.
    """

    def __init__(self, part: Part, buffer: ShuffleBuffer, where: Mapping[str, Any] | None) -> None:
        self._size = buffer.size
        self._key = mix(mix(mix(buffer.seed) ^ part.stream) ^ part.epoch)
        self._block, self._taken, began = 0, 0, None
        if where is not None:
            if where["buffer"] != self._size:
                raise ValueError(f"a buffer of {where['buffer']} documents, and not {self._size}")
            self._block, self._taken = int(where["block"]), int(where["taken"])
            began = where["source"]
        self._source = _InOrder(part, began)
        self._began = began
        self._now: list[str] | None = None  # the block that is given; read when the first is asked
        self._next: list[str] = []
        self._next_began: dict[str, Any] = {}

    def __next__(self) -> str:
        if self._now is None:
            self._now = self._shuffled(self._read(self._size))
            self._next_began = self._source.state()
            self._next = self._read(self._taken)
        if self._taken == len(self._now):
            self._block, self._taken = self._block + 1, 0
            self._now, self._began = self._shuffled(self._next), self._next_began
            self._next, self._next_began = [], self._source.state()
        if self._taken >= len(self._now):
            raise StopIteration  # the source has ended
        self._next += self._read(1)
        text, self._now[self._taken] = self._now[self._taken], ""  # given: no memory for it
        self._taken += 1
        return text

    def _read(self, count: int) -> list[str]:
        """The next documents of the source; fewer where it ends."""
        texts = []
        for _ in range(count):
            try:
                texts.append(next(self._source))
            except StopIteration:
                break
        return texts

    def _shuffled(self, texts: list[str]) -> list[str]:
        key = mix(self._key ^ self._block)
        return [texts[permute(i, len(texts), key)] for i in range(len(texts))]

    def state(self) -> dict[str, Any]:
        """Where the block began, and how many documents of it were given."""
        return {
            "buffer": self._size,
            "block": self._block,
            "taken": self._taken,
            "source": self._began,
        }
