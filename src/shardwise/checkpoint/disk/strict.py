"""JSON of strangers: read whole or refused, with the place where it is wrong.

Python's own reader takes more than JSON allows: ``NaN``, the same key twice, numbers of any
length. Nothing here trusts a number before it has been compared with what can be.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import CheckpointError

MAX_INT = 2**62  # larger numbers of bytes or elements exist nowhere, and sums of two still fit


def open_file(path: Path) -> tuple[int, int]:
    """Open a regular file to read, never through a symbolic link; its descriptor and its size.

    Raises:
        CheckpointError: there is none, or it is a link, a device, a pipe.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be opened ({error.strerror}); expected a regular file, no link"
        ) from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise CheckpointError(f"{path}: found {stat.filemode(status.st_mode)}, expected a file")
    return handle, status.st_size


def parse(text: bytes, where: str) -> Any:
    """Parse JSON, and nothing but JSON.

    Raises:
        CheckpointError: it is none, has a key twice in an object, or is nested too deeply.
    """

    def constant(name: str) -> NoReturn:
        raise ValueError(f"the number {name}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"the key {shorten(twice)} twice in one object")
        return found

    try:
        return json.loads(text.decode("utf-8"), parse_constant=constant, object_pairs_hook=unique)
    except RecursionError:
        raise CheckpointError(f"{where}: is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: is no JSON that can be read ({error})") from None


class Fields:
    """One JSON object, read field by field; each has the type that is asked for, or is refused.

    Args:
        value: what should be the object.
        where: the file and the entry, for messages.
    """

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            refuse(where, value, "an object")
        self._fields: dict[str, Any] = value
        self.where = where

    def any(self, name: str) -> Any:
        """A field of whatever type."""
        if name not in self._fields:
            raise CheckpointError(f"{self.where}: has no {name!r}")
        return self._fields[name]

    def all(self) -> dict[str, Any]:
        """Every field, of whatever type."""
        return self._fields

    def text(self, name: str) -> str:
        """A string without control characters or half characters, which no terminal should get."""
        value = self.any(name)
        if not isinstance(value, str):
            refuse(f"{self.where}, {name!r}", value, "a string")
        return check_text(value, f"{self.where}, {name!r}")

    def number(self, name: str, least: int = 0, most: int = MAX_INT) -> int:
        """An integer between two bounds, both included."""
        return check_number(self.any(name), f"{self.where}, {name!r}", least, most)

    def real(self, name: str) -> float:
        """A number that is finite, and not negative."""
        value = self.any(name)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            refuse(f"{self.where}, {name!r}", value, "a number, 0 or more")
        return float(value)

    def numbers(self, name: str, most_of_them: int) -> tuple[int, ...]:
        """A list of integers, none negative."""
        found = self.items(name, most_of_them)
        if not all(type(item) is int and 0 <= item <= MAX_INT for item in found):
            for item in found:
                check_number(item, f"{self.where}, {name!r}")
        return tuple(found)

    def items(self, name: str, most: int) -> Sequence[Any]:
        """A list of whatever types, not longer than ``most``."""
        value = self.any(name)
        if not isinstance(value, list):
            refuse(f"{self.where}, {name!r}", value, "a list")
        if len(value) > most:
            refuse(f"{self.where}, {name!r}", f"{len(value)} items", f"{most} at most")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object."""
        value = self.any(name)
        if not isinstance(value, dict):
            refuse(f"{self.where}, {name!r}", value, "an object")
        return value


def check_number(value: Any, where: str, least: int = 0, most: int = MAX_INT) -> int:
    """An integer between two bounds, both included.

    Raises:
        CheckpointError: it is another thing, or beyond.
    """
    if type(value) is not int or not least <= value <= most:
        refuse(where, value, f"an integer from {least} to {most}")
    return value


def check_text(value: str, where: str) -> str:
    """A string that can be shown and encoded.

    Raises:
        CheckpointError: it holds control characters or halves of characters.
    """
    if not value.isprintable():
        refuse(where, value, "printable characters")
    return value


def shorten(value: Any) -> str:
    """A value for a message, never long."""
    if isinstance(value, dict | list):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or abs(value) < MAX_INT**2 else "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse(where: str, found: Any, expected: str) -> NoReturn:
    """Say what is wrong where.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(f"{where}: found {shorten(found)}, expected {expected}")
