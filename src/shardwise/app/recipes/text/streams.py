"""Documents as packed sequences, in an order that does not depend on the world.

A source is split into a fixed number of streams: no two streams have a document in common. Each has
files of its own if they come out about equal (``datasets.split_dataset_by_node``); if not, each
takes every n-th document. Each stream packs its own documents into sequences:

    stream 0   S a a a a S b b | b b b S c c c | ...      S: the separator in front of a document
    stream 1   S d d S e e e e | e e e e e S f | ...

    order      stream 0, stream 1, stream 0, stream 1, ...        example p: stream p mod streams

The source and the number of streams alone decide which tokens are example p. A rank takes the
examples p of a microbatch with p mod world size = rank. If the world size divides the number of
streams, one rank reads each stream; otherwise several ranks may read one, and each trains on
examples of its own.

A shuffle buffer of B documents shuffles a stream block by block. While one block is given out, in
the order that the seed decides, the next one takes its place. So the buffer reads one document for
each that it gives, and holds B of them at any time but the first:

    source      a b c d | e f g h | i j k l | ...         B = 4
    given       c a d b | h e g f | ...
    holds       b e f g   after c a d: one of the first block, three of the second

A position is, for each stream: how many sequences it has given, where its documents are, and the
tokens left over. For a shuffled stream that is where the source was at the beginning of the block,
and how many documents of it were given; resuming reads the block again. Positions are saved in
checkpoints, and any other world can go on from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.app.recipes.core.position import permute
from shardwise.app.recipes.text.data import Vocabulary
from shardwise.app.recipes.text.documents import EVEN, Dealing, StreamSource
from shardwise.base.errors import CheckpointError
from shardwise.base.mixing import mix
from shardwise.checkpoint.disk.place import Place
from shardwise.elastic.world import World
from shardwise.insight.schema.option import OptionError

LEAST_STREAMS = 8  # so that a run can go on over fewer ranks, with whole streams for each


def streams_for(world_size: int) -> int:
    """Return the default number of streams: a multiple of the world size, at least 8."""
    streams = world_size
    while streams < LEAST_STREAMS:
        streams *= 2
    return streams


@dataclass
class PackedStream:
    """One stream: documents in, sequences out.

    Attributes:
        part: of the source, in the current epoch.
        encode: text to tokens, with the separator in front.
        length: tokens of a sequence, without the one that only is a target.
        shuffle: in which order documents come.
    """

    part: StreamPart
    encode: Callable[[str], list[int]]
    length: int
    shuffle: ShuffleBuffer

    def __post_init__(self) -> None:
        self._given = 0
        self._left: list[int] = []
        self._state: dict[str, Any] | None = None
        self._begin(None)

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Return sequence ``index``, int64 of shape (length + 1,); skip those before.

        Its last token is the first of the next sequence: every token is a target once.

        Raises:
            ValueError: it was given already.
            UserError: the source cannot be read, or has no text for this stream.
        """
        if index < self._given:
            raise ValueError(f"sequence {index} of stream {self.part.stream} was given already")
        self._state = None
        while True:
            self._fill()
            tokens = self._left[: self.length + 1]
            del self._left[: self.length]
            self._given += 1
            if self._given > index:
                return np.array(tokens, dtype=np.int64)

    def _fill(self) -> None:
        while len(self._left) <= self.length:
            try:
                text = next(self._documents)
            except StopIteration:
                self._end_epoch()
            else:
                self._left += self.encode(text)
                self._empty = False

    def _end_epoch(self) -> None:
        if self._empty:
            raise OptionError(
                "--streams",
                f"{self.part.streams}, of which stream {self.part.stream} has no text to train on",
                "fewer streams, or more documents",
            )
        self.part = replace(self.part, epoch=self.part.epoch + 1)
        self._begin(None)

    def _begin(self, where: Mapping[str, Any] | None) -> None:
        self._documents = self.shuffle.order(self.part, where)
        self._empty = where is None
        self._state = None

    def state(self) -> dict[str, Any]:
        """Return the position of the stream: tensors and plain values that do not change."""
        if self._state is None:  # asked for after every batch, and few streams move in each
            self._state = {
                "given": self._given,
                "epoch": self.part.epoch,
                "source": json.dumps(self._documents.state()),
                "left": torch.tensor(self._left, dtype=torch.int64),
            }
        return self._state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the position of another stream with the same number.

        Raises:
            CheckpointError: it is no such state.
        """
        try:
            self._given = int(state["given"])
            self.part = replace(self.part, epoch=int(state["epoch"]))
            self._left = state["left"].tolist()
            self._begin(json.loads(state["source"]))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"the position of stream {self.part.stream} cannot be read ({error!r})"
            ) from None


@dataclass
class StreamBatches:
    """Training batches: int64 of shape (count, length + 1), in host memory.

    Attributes:
        source: where documents come from.
        vocabulary: what tokens mean.
        length: tokens of a sequence.
        asked: how many streams there are; None leaves it to the checkpoint, or the world.
        world: this rank.
        shuffle: in which order each stream takes its documents.
    """

    source: StreamSource
    vocabulary: Vocabulary
    length: int
    asked: int | None
    world: World
    shuffle: ShuffleBuffer | None = None

    def __post_init__(self) -> None:
        self._open: dict[int, PackedStream] = {}
        self._saved: dict[int, Mapping[str, Any]] = {}
        self.streams = self.asked or streams_for(self.world.size)
        self.dealing = self.source.dealing(self.streams)

    def __str__(self) -> str:
        uneven = self.source.unevenness(self.streams)
        found = f"{self.streams} streams, dealt out {self.dealing.value}"
        if self.dealing is Dealing.BY_FILE and uneven is not None and uneven > EVEN:
            return (
                f"{found} as the run began: the largest stream has {uneven:.1f} times as much as "
                "the smallest, whose documents come that many times as often"
            )
        return found

    def batch(self, position: int, count: int) -> torch.Tensor:
        """Return this rank's part of the microbatch that has ``position`` as its own first example.

        All ranks together get the examples that all ``position .. position + count`` make, each
        once; which rank takes which follows from the streams.
        """
        start, size = position - self.world.rank * count, self.world.size
        first = start + (self.world.rank - start) % size
        rows = [self._example(p) for p in range(first, first + count * size, size)]
        return torch.from_numpy(np.stack(rows))

    def _example(self, position: int) -> NDArray[np.int64]:
        index, number = divmod(position, self.streams)
        stream = self._open.get(number)
        if stream is None:
            part = StreamPart(self.source, number, self.streams, 0, self.dealing)
            order = self.shuffle or ShuffleBuffer()
            stream = PackedStream(part, self._encode, self.length, order)
            if number in self._saved:
                stream.load_state(self._saved[number])
            self._open[number] = stream
        return stream.sequence(index)

    def _encode(self, text: str) -> list[int]:
        return [self.vocabulary.separator, *self.vocabulary.encode(text)]

    def state(self) -> dict[str, Any]:
        """Return the positions of this rank's streams, under names that no other rank has."""
        rank = self.world.rank
        mine = {f"stream{n}-rank{rank}": stream.state() for n, stream in self._open.items()}
        # Of streams that were not opened since the run was resumed, as they were then.
        rest = {
            f"stream{n}-rank{rank}": dict(state)
            for n, state in self._saved.items()
            if n not in self._open and n % self.world.size == rank
        }
        common: dict[str, Any] = {"streams": self.streams, "dealt": self.dealing.value}
        if self.source.commit is not None:
            common["commit"] = self.source.commit
        return {**common, **mine, **rest}

    def load_state(self, state: Mapping[str, Any], where: Place) -> None:
        """Go on from :meth:`state` of all ranks of any world.

        Raises:
            CheckpointError: it is no such state.
            OptionError: it has another number of streams than was asked for.
            UserError: the dataset cannot be opened any more as it was.
        """
        streams = state.get("streams")
        if not isinstance(streams, int) or streams < 1:
            raise CheckpointError(f"{where}: found {streams!r} as extra.data.streams")
        if self.asked not in (None, streams):
            raise OptionError("--streams", self.asked, f"{streams}, as in the run to resume")
        self.streams = streams
        commit = state.get("commit")
        if isinstance(commit, str):
            self.source = self.source.at(commit)
        # Without a word of it, as by all runs before there was a choice.
        divides = self.source.unevenness(streams) is not None
        usual = Dealing.BY_FILE if divides else Dealing.BY_DOCUMENT
        dealt = state.get("dealt", usual.value)
        known = {each.value: each for each in Dealing}
        if dealt not in known or (known[dealt] is Dealing.BY_FILE and not divides):
            raise CheckpointError(f"{where}: found {dealt!r} as extra.data.dealt")
        self.dealing = known[dealt]
        for name, each in state.items():
            number, _, _ = name.removeprefix("stream").partition("-rank")
            if not isinstance(each, Mapping) or not number.isdecimal():
                continue
            kept = self._saved.get(int(number))
            # Where ranks shared a stream, the one that came furthest is nearest to what is next.
            if kept is None or int(each.get("given", 0)) > int(kept["given"]):
                self._saved[int(number)] = each
        self._open.clear()


@dataclass(frozen=True)
class StreamPart:
    """One stream of documents in one epoch.

    Attributes:
        source: where documents come from.
        stream: which stream, 0 .. streams - 1.
        streams: how many there are.
        epoch: how many times the stream has had all its documents.
        dealing: how documents are dealt out; ``None``: as the source says.
    """

    source: StreamSource
    stream: int
    streams: int
    epoch: int
    dealing: Dealing | None = None


@dataclass(frozen=True)
class ShuffleBuffer:
    """How documents are shuffled.

    Attributes:
        size: documents that are shuffled together; 0: none are.
        seed: of the order.
    """

    size: int = 0
    seed: int = 0

    def order(
        self, part: StreamPart, where: Mapping[str, Any] | None
    ) -> _InOrder | _ShuffledBlocks:
        """Return the documents of a part from a position on; None: from the beginning.

        Raises:
            ValueError, KeyError, TypeError: ``where`` is no state of such an order.
        """
        if not self.size:
            if where is not None and "buffer" in where:
                raise ValueError(f"a buffer of {where['buffer']} documents, and not none")
            return _InOrder(part, where)
        return _ShuffledBlocks(part, self, where)


class _InOrder:
    """The documents of a part, once each, in the order of the source.

    Args:
        part: which.
        where: from which state of the source on.
    """

    def __init__(self, part: StreamPart, where: Mapping[str, Any] | None) -> None:
        self._dataset = part.source.part(part.stream, part.streams, part.dealing)
        self._texts: Iterator[str] = part.source.training_texts(self._dataset, where)
        self._began_at = where

    def __next__(self) -> str:
        self._began_at = None
        return next(self._texts)

    def state(self) -> dict[str, Any]:
        """Return the position of the source."""
        # A dataset that got a position to begin at, and has not begun, does not know it yet.
        state = self._dataset.state_dict() if self._began_at is None else self._began_at
        return dict(state)


class _ShuffledBlocks:
    """The same, block after block, those of a block in the order that the seed decides.

    Args:
        part: which.
        buffer: how many are a block, and the seed.
        where: from which state on.
    """

    def __init__(
        self, part: StreamPart, buffer: ShuffleBuffer, where: Mapping[str, Any] | None
    ) -> None:
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
        """Return the next documents of the source; fewer at its end."""
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
        """Return where the block began, and how many of its documents were given."""
        return {
            "buffer": self._size,
            "block": self._block,
            "taken": self._taken,
            "source": self._began,
        }
