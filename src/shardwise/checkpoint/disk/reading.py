"""What everything that reads files has in common. No torch here."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

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
