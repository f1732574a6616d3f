"""What everything that reads files has in common. No torch here."""

from __future__ import annotations

import os
import stat
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwise.checkpoint.disk.strict import refuse
from shardwise.errors import CheckpointError


class Closing:
    """What holds files open. Close it, or use it in a ``with`` statement."""

    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_exactly(handle: int, into: memoryview, at: int, file: Path) -> None:
    """Fill memory from a place in an open file.

    Args:
        handle: of the file.
        into: of bytes.
        at: the first byte in the file.
        file: for messages.

    Raises:
        CheckpointError: it cannot be read, or ends before.
    """
    while into.nbytes:
        try:
            got = os.preadv(handle, [into], at)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
        if not got:
            raise CheckpointError(f"{file}: ends at byte {at}, expected {into.nbytes} more")
        at += got
        into = into[got:]


class Links(Enum):
    """What to do where a file is a symbolic link."""

    REFUSE = os.O_NOFOLLOW
    FOLLOW = 0


def open_file(path: Path, links: Links = Links.REFUSE) -> tuple[int, int]:
    """Open a regular file to read; its descriptor and its size.

    Raises:
        CheckpointError: there is none, or it is a device, a pipe, or a link that is not followed.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links.value)
    except OSError as error:
        no_link = ", no link" if links is Links.REFUSE else ""
        raise CheckpointError(
            f"{path}: cannot be opened ({error.strerror}); expected a regular file{no_link}"
        ) from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise CheckpointError(f"{path}: found {stat.filemode(status.st_mode)}, expected a file")
    return handle, status.st_size


def read_small(path: Path, most: int, links: Links = Links.REFUSE) -> bytes:
    """All bytes of a regular file that holds no more than ``most``.

    Raises:
        CheckpointError: it is larger, cannot be read, or is no regular file.
    """
    handle, size = open_file(path, links)
    with os.fdopen(handle, "rb") as file:
        if size > most:
            refuse(str(path), f"{size:,} bytes", f"{most:,} at most")
        try:
            text = file.read(size + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if len(text) > size:
        refuse(str(path), "more bytes than it had when it was opened", f"{size:,}")
    return text
