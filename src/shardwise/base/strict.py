"""Strict reading of JSON, and of numbers and names, from files that may be hostile.

Python's JSON parser accepts more than JSON allows: ``NaN``, the same key twice, numbers of any
length. Here a file is read in full or refused, and the error says where it is wrong. No number is
trusted before it has been compared with what is possible. Torch is not imported.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from shardwise.base.errors import CheckpointError

MAX_INT = 2**62  # no file has more bytes or elements, and the sum of two still fits in 64 bits
MAX_DIMS = 64  # of a tensor, and keys of a path
MAX_DEPTH = 200  # levels of nesting; encoded values have up to 64, and need two for each
FREE = 1 << 26  # bytes of memory that reading a file may take beyond the size of the file
# Bytes of memory that Python takes for what each of these belongs to, at most.
_COSTS = {b"[": 104, b"{": 248, b":": 200, b",": 48, b'"': 32}
_NESTED = (dict, list)  # a union would be made anew for each value of a large file
_MAX_SAME_HASH = 16  # keys of a dict; by chance not even two have the same hash


def parse(
    text: bytes | bytearray, where: str, size: int = 0, decoder: json.JSONDecoder | None = None
) -> Any:
    """Parse JSON, and nothing but JSON.

    Args:
        text: the JSON text, in UTF-8.
        where: the file, for error messages.
        size: bytes of the file that the text is in, or of the files that it describes, if that is
            more than the text: so much memory it may take, and 64 MiB.
        decoder: reads the text; ``None``: the strict one.

    Raises:
        CheckpointError: it is not JSON, has a key twice in one object, is nested too deeply, or
            would take far more memory than it has bytes.
    """
    check_memory(memory_of(text), max(size, len(text)), where)
    try:
        found = (decoder or _JSON).decode(text.decode("utf-8"))
    except RecursionError:
        raise CheckpointError(f"{where}: is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: is not valid JSON ({error})") from None
    check_depth(found, where)
    return found


def memory_of(text: bytes | bytearray) -> int:
    """Bytes of memory that JSON takes at most, once it is parsed."""
    needed = sum(text.count(mark) * cost for mark, cost in _COSTS.items())
    return needed + (2 if text.isascii() else 8) * len(text)


def check_memory(needed: int, size: int, where: str) -> None:
    """Check that reading a file does not take far more memory than the file has bytes.

    Raises:
        CheckpointError: it takes more than 64 MiB beyond that.
    """
    if needed > FREE + size:
        raise CheckpointError(
            f"{where}: takes up to {needed:,} bytes in memory, expected at most {FREE + size:,}: "
            f"the files have {size:,}"
        )


def _constant(name: str) -> NoReturn:
    raise ValueError(f"found the number {name}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"found the key {shorten(twice)} twice in one object")
    return found


_JSON = json.JSONDecoder(parse_constant=_constant, object_pairs_hook=_unique)


def check_depth(value: Any, where: str) -> None:
    """Check that lists and objects from JSON are not nested too deeply for recursive code.

    Raises:
        CheckpointError: they are.
    """
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, _NESTED)
        ]
        if not level:
            return
    raise CheckpointError(
        f"{where}: is nested too deeply: found more than {MAX_DEPTH} levels of lists and objects"
    )


class Collisions:
    """A counter of hash collisions among the keys of a dict.

    A file can contain numbers or tuples that all have the same hash, which would make a dict slow.
    Strings are not counted: Python hashes them differently in every process.

    Args:
        where: the file and the entry, for error messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen: dict[int, int] = {}

    def check(self, key: Any) -> None:
        """Count a key before it goes into the dict.

        Raises:
            CheckpointError: too many keys have its hash.
            TypeError: it cannot be hashed.
        """
        if isinstance(key, str):
            return
        found = hash(key)
        times = self._seen[found] = self._seen.get(found, 0) + 1
        if times > _MAX_SAME_HASH:
            refuse(self._where, f"{times} keys with the same hash", f"at most {_MAX_SAME_HASH}")


class Fields:
    """A JSON object that is read field by field; a field of the wrong type is refused.

    Args:
        value: parsed JSON.
        where: the file and the entry, for error messages.

    Raises:
        CheckpointError: the value is not an object. All methods raise it too, if the field is
            missing or does not have the type asked for.
    """

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            refuse(where, value, "an object")
        self._fields: dict[str, Any] = value
        self.where = where

    def any(self, name: str) -> Any:
        """A field of any type."""
        if name not in self._fields:
            raise CheckpointError(f"{self.where}: has no {name!r}")
        return self._fields[name]

    def all(self) -> dict[str, Any]:
        """All fields, by name."""
        return self._fields

    def text(self, name: str) -> str:
        """A string of printable characters, which is safe to show on a terminal."""
        value = self.any(name)
        if not isinstance(value, str):
            refuse(f"{self.where}, {name!r}", value, "a string")
        return check_text(value, f"{self.where}, {name!r}")

    def number(self, name: str, least: int = 0, most: int = MAX_INT) -> int:
        """An integer from ``least`` to ``most``."""
        return check_number(self.any(name), f"{self.where}, {name!r}", least, most)

    def real(self, name: str) -> float:
        """A finite number, 0 or more."""
        value = self.any(name)
        # An integer may be larger than any float.
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
            refuse(f"{self.where}, {name!r}", value, "a finite number, 0 or more")
        return float(value)

    def numbers(self, name: str, most_of_them: int = MAX_DIMS) -> tuple[int, ...]:
        """A list of at most ``most_of_them`` integers, all 0 or more."""
        found = self.items(name, most_of_them)
        if not all(type(item) is int and 0 <= item <= MAX_INT for item in found):
            for item in found:
                check_number(item, f"{self.where}, {name!r}")
        return tuple(found)

    def items(self, name: str, most: int) -> Sequence[Any]:
        """A list of at most ``most`` items of any type."""
        value = self.any(name)
        if not isinstance(value, list):
            refuse(f"{self.where}, {name!r}", value, "a list")
        if len(value) > most:
            refuse(f"{self.where}, {name!r}", f"{len(value)} items", f"at most {most}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object."""
        value = self.any(name)
        if not isinstance(value, dict):
            refuse(f"{self.where}, {name!r}", value, "an object")
        return value


def check_number(value: Any, where: str, least: int = 0, most: int = MAX_INT) -> int:
    """Check that a value is an integer from ``least`` to ``most``, and return it.

    Raises:
        CheckpointError: it is not.
    """
    if type(value) is not int or not least <= value <= most:
        refuse(where, value, f"an integer from {least} to {most}")
    return value


def check_shape(shape: Sequence[int], itemsize: int, where: str) -> None:
    """Check that a tensor of this shape is possible. An empty one must be possible with sizes of 1.

    Raises:
        CheckpointError: its bytes or its strides exceed the integers that torch has.
    """
    nbytes = math.prod(max(1, size) for size in shape) * itemsize
    check_number(nbytes, f"{where}, bytes of shape {list(shape)}")


def check_keys(keys: Sequence[Any], where: str) -> None:
    """Check that the keys of a path are names and positions.

    Raises:
        CheckpointError: they are not, or there are too many.
    """
    if len(keys) > MAX_DIMS:
        refuse(where, keys, f"at most {MAX_DIMS} keys")
    for key in keys:
        if isinstance(key, str):
            check_text(key, where)
        else:
            check_number(key, where, most=10**6)


def check_text(value: str, where: str) -> str:
    """Check that a string can be shown and encoded, and return it.

    Raises:
        CheckpointError: it contains control characters or lone surrogates.
    """
    if not value.isprintable():
        refuse(where, value, "printable characters")
    return value


def shorten(value: Any) -> str:
    """A short text for a value in an error message, whatever its size."""
    if isinstance(value, dict | list | tuple | set):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str | bytes):
        value = value[:80]
    text = repr(value) if not isinstance(value, int) or abs(value) < MAX_INT**2 else "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse(where: str, found: Any, expected: str) -> NoReturn:
    """Raise an error that says what was found and what was expected.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(f"{where}: found {shorten(found)}, expected {expected}")
