"""Where a checkpoint is written that is complete or not there: a file, a folder, or a store."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.base.boxes import Box
from shardwise.checkpoint.disk.beside import check_destination, check_name, written_beside
from shardwise.checkpoint.disk.entries import StatePath
from shardwise.checkpoint.disk.place import Place
from shardwise.checkpoint.formats.source import Progress, ReadWindow, Source

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.store_path import StorePath


class Destination(abc.ABC):
    """A file or folder to make; :func:`destination_of` finds out which.

    Attributes:
        window: makes the buffer that what is read for it passes through; see :class:`ReadWindow`.
    """

    window: type[ReadWindow]

    @abc.abstractmethod
    def opened(self, last: str | None) -> AbstractContextManager[Any]:
        """Write to what this yields; it is committed at the end of the block, unless that raises.

        Args:
            last: the file that commits a folder in an object store; ``None``: this is a file.

        Yields:
            The path of a new file, or its name; or a new folder, as a path or a ``NewFolder``.
        """


class _HostDestination(Destination):
    """A file or folder of this host; see :func:`written_beside`."""

    window = ReadWindow

    def __init__(self, path: Path, source: Place | None, *, force: bool) -> None:
        self._path, self._source, self._force = path, source, force
        check_destination(path, source, force=force)

    @contextlib.contextmanager
    def opened(self, last: str | None) -> Iterator[Path]:
        with written_beside(self._path, self._source, force=self._force) as partial:
            if last is not None:
                partial.mkdir()
            yield partial


class _NewWindow(ReadWindow):
    """A buffer for what goes to an object store: new for each part, since parts are sent later.

    A thread of its own reads. Whoever sends asks for parts from inside obstore, where no request
    to a store can be made.
    """

    def __init__(self, buffer: int, progress: Progress) -> None:
        super().__init__(buffer, progress)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardwise window")

    def read(self, source: Source, path: StatePath, part: Box) -> torch.Tensor:
        """Read one of the boxes that :meth:`boxes` yields, to memory of its own."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        return self._pool.submit(super().read, source, path, part).result()


class _StoreDestination(Destination):
    """A file or folder in an object store; see :class:`.StoreCommit`."""

    window = _NewWindow

    def __init__(self, name: StorePath, source: Place | None, *, force: bool) -> None:
        self._name = name
        self._replaces = check_name(name, source, force=force)

    def opened(self, last: str | None) -> AbstractContextManager[Any]:
        from shardwise.checkpoint.disk.store_commit import committed  # of no use to folders

        if last is None:
            return contextlib.nullcontext(self._name)
        return committed(self._name, last, self._replaces)


def destination_of(
    place: Place, source: Place | None = None, *, force: bool = False
) -> Destination:
    """Check that something can be written to a place, before anything is read.

    Args:
        place: the file or folder to make.
        source: the checkpoint that is read, which must not be replaced; ``None`` if there is none.
        force: replace a file of that name, or a folder that contains nothing but a checkpoint.

    Raises:
        DestinationError: it cannot be written.
        StoreError: the object store does not answer.
    """
    if isinstance(place, Path):
        return _HostDestination(place, source, force=force)
    return _StoreDestination(place, source, force=force)
