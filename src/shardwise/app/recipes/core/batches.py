"""Training batches: in an order that the seed decides, and read ahead.

A background thread reads batches while the step before them computes:

    thread      read 4 | read 5 | read 6 | wait for room ........ | read 7
    queue       4 5 6                                               5 6
    training             step 3 ................................. | step 4

With each batch the thread notes the position of the data after it. So a checkpoint holds the
position of what was trained on, whatever was read beyond that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

from shardwise.app.recipes.core.checkpointing import Resumable
from shardwise.app.recipes.core.position import Draw, Shuffle
from shardwise.app.recipes.core.recipe import Data
from shardwise.checkpoint.disk.place import Place


class Shuffled:
    """Training batches in an order that the seed and the position alone decide.

    Args:
        size: examples of an epoch.
        seed: of the order.
        read: makes a batch of examples.
    """

    def __init__(self, size: int, seed: int, read: Callable[[Sequence[Draw]], Any]) -> None:
        self._order = Shuffle(size, seed)
        self._read = read

    def batch(self, position: int, count: int) -> Any:
        """Return examples ``position`` .. ``position + count`` of the order."""
        return self._read([self._order.at(p) for p in range(position, position + count)])

    def state(self) -> dict[str, Any]:
        """Return nothing: the number of examples says where the data stand."""
        return {}

    def load_state(self, state: Mapping[str, Any], where: Place) -> None:
        """Do nothing; see :meth:`state`."""


AHEAD = 8  # batches: room for a source that stands still for some steps, and next to no memory
END = 5.0  # seconds that the thread gets to end, after which it is left to the process's end


class Readable(Data, Resumable, Protocol):
    """Data that know where they stand."""


#: Where a batch begins, its size, the batch itself, and where the data stand behind it.
_Read: TypeAlias = tuple[int, int, Any, dict[str, Any]]


class ReadAhead:
    """Training batches, read some batches before they are asked for.

    The thread begins with the first batch; :meth:`close` ends it.

    Args:
        data: where batches come from; from the first batch on only the thread reads it.
        ranks: each of n ranks takes its part of a microbatch, one after the other: from one
            batch of this rank to its next it is as many batches.
        ahead: how many batches wait at most.
    """

    def __init__(self, data: Readable, ranks: int, ahead: int = AHEAD) -> None:
        self._data = data
        self._ranks = ranks
        self._queue: SimpleQueue[_Read | BaseException] = SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: dict[str, Any] | None = None

    def batch(self, position: int, count: int) -> Any:
        """Examples ``position`` .. ``position + count``; they have to follow those before.

        Raises:
            ValueError: they do not.
            Exception: what the thread met with, in its own traceback.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._read, args=(position, count), name="read-ahead", daemon=True
            )
        if self._thread.ident is None:  # Ctrl-C may have come before it was started
            self._thread.start()
        read = self._queue.get()  # signals are handled meanwhile
        if isinstance(read, BaseException):
            self._queue.put(read)  # nothing follows it
            raise read
        first, size, batch, state = read
        if (first, size) != (position, count):
            raise ValueError(
                f"found {count} examples from {position} asked for, expected {size} from {first}, "
                "which were read ahead"
            )
        self._state = state
        self._room.release()
        return batch

    def _read(self, position: int, count: int) -> None:
        try:
            while self._room.acquire() and not self._closed.is_set():
                batch = self._data.batch(position, count)
                self._queue.put((position, count, batch, self._data.state()))
                position += self._ranks * count
        except BaseException as error:  # whatever it is, the step that needs the batch raises it
            self._queue.put(error)

    def close(self) -> None:
        """End the thread; no batch follows.

        A thread that waits for a network is left waiting: it ends with the process.
        """
        self._closed.set()
        self._room.release()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(END)

    def state(self) -> dict[str, Any]:
        """Where the data stood behind the last batch that was asked for."""
        return self._data.state() if self._state is None else self._state

    def load_state(self, state: Mapping[str, Any], where: Place) -> None:
        """Go on from :meth:`state` of all ranks of any world, before the first batch.

        Raises:
            CheckpointError: it is no such state.
            OptionError: it has another number of streams than was asked for.
        """
        self._data.load_state(state, where)
