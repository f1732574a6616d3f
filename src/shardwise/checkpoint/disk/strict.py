"""JSON of strangers: read whole or refused, with the place where it is wrong.

Python's own reader takes more than JSON allows: ``NaN``, the same key twice, numbers of any
length. Nothing here trusts a number before it has been compared with what can be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from shardwise.errors import CheckpointError

MAX_INT = 2**62  # larger numbers of bytes or elements exist nowhere, and sums of two still fit
MAX_DEPTH = 200  # containers within containers; values of ours, which nest 64 deep, need two each
_FEW = 1 << 20  # lists and objects that any file may hold; more of them take a longer file
_ALIKE = 16  # keys of a dict that have the same hash; by chance there are no two
_BYTES_EACH = 8  # of a longer file, for each of its lists and objects


def parse(text: bytes, where: str) -> Any:
    """Parse JSON, and nothing but JSON.

    Raises:
        CheckpointError: it is none, has a key twice in an object, is nested too deeply, or would
            take far more memory than it has bytes.
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

    # An empty list is two bytes in the file, and sixty in memory.
    if text.count(b"[") + text.count(b"{") > _FEW + len(text) // _BYTES_EACH:
        refuse(where, f"more than {_FEW:,} lists and objects", "fewer, for a file of its size")
    try:
        found = json.loads(text.decode("utf-8"), parse_constant=constant, object_pairs_hook=unique)
    except RecursionError:
        raise CheckpointError(f"{where}: is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: is no JSON that can be read ({error})") from None
    check_depth(found, where)
    return found


def check_depth(value: Any, where: str) -> None:
    """Check that lists and objects from JSON are not nested deeper than code can follow.

    Raises:
        CheckpointError: they are.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise CheckpointError(
        f"{where}: is nested too deeply: found more than {MAX_DEPTH} lists and objects within "
        "each other"
    )


class Collisions:
    """Keys of a dict, checked before they go in: those made to have one hash would make it slow.

    Strings cannot be, since Python hashes them in a way that differs from process to process;
    numbers and tuples can.

    Args:
        where: the file and the entry, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen: dict[int, int] = {}

    def check(self, key: Any) -> None:
        """Count a key.

        Raises:
            CheckpointError: too many have its hash.
            TypeError: it has none.
        """
        if isinstance(key, str):
            return
        found = hash(key)
        times = self._seen[found] = self._seen.get(found, 0) + 1
        if times > _ALIKE:
            refuse(self._where, f"{times} keys of one hash", f"{_ALIKE} at most")


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


def check_shape(shape: Sequence[int], itemsize: int, where: str) -> None:
    """Check that a tensor of this shape can be; without elements, that one like it could.

    Raises:
        CheckpointError: its bytes, or its strides, are larger than any number that torch has.
    """
    nbytes = math.prod(max(1, size) for size in shape) * itemsize
    check_number(nbytes, f"{where}, bytes of shape {list(shape)}")


def check_text(value: str, where: str) -> str:
    """A string that can be shown and encoded.

    Raises:
        CheckpointError: it holds control characters or halves of characters.
    """
    if not value.isprintable():
        refuse(where, value, "printable characters")
    return value


def shorten(value: Any) -> str:
    """A value for a message, never long; it may hold itself a billion times over."""
    if isinstance(value, dict | list | tuple | set):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str | bytes):
        value = value[:80]
    text = repr(value) if not isinstance(value, int) or abs(value) < MAX_INT**2 else "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse(where: str, found: Any, expected: str) -> NoReturn:
    """Say what is wrong where.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(f"{where}: found {shorten(found)}, expected {expected}")
