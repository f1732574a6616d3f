"""Values as JSON, and back: dataclasses of plain values, enums, tuples, lists and dicts.

What is read may come from anyone, so it has exactly the fields and types that its class says, or is
refused. What a class demands beyond types, it checks in ``__post_init__`` by a ``ValueError``.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import types
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LARGEST = 2**62


def written(value: Any) -> bytes:
    """Return a dataclass as JSON that :func:`read` takes."""
    return json.dumps(asdict(value), default=lambda member: member.value).encode()


def read(kind: type[T], text: bytes) -> T:
    """Read what :func:`written` returned.

    Args:
        kind: the class of the value.
        text: JSON, in UTF-8.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _unfit(text, kind.__name__) from None
    return converted(kind, found)


def converted(kind: type[T], value: Any) -> T:
    """Return the value of a class, given what a JSON parser has made of it.

    Raises:
        ValueError: it is something else.
    """
    result: T = _convert(kind, value, kind.__name__)
    return result


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _convert(parts[0], value, where)
    if isinstance(kind, type) and is_dataclass(kind):
        fields = _fields(kind)
        if not isinstance(value, dict) or value.keys() != fields.keys():
            raise _unfit(value, f"the fields of {where}")
        return kind(**{n: _convert(fields[n], value[n], f"{where}.{n}") for n in fields})
    if origin is dict and isinstance(value, dict):
        to_key = int if parts[0] is int else str
        return {to_key(key): _convert(parts[1], each, where) for key, each in value.items()}
    if origin in (list, tuple) and isinstance(value, list | tuple):
        kinds = parts if origin is tuple and parts[-1] is not ... else parts[:1] * len(value)
        return origin(_convert(k, each, where) for k, each in zip(kinds, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if kind is float and type(value) is int and abs(value) < _LARGEST:
        return float(value)
    is_number = type(value) in (int, float) and math.isfinite(value) and abs(value) < _LARGEST
    if type(value) is kind and (is_number or type(value) in (str, bool)):
        return value
    raise _unfit(value, f"{where} of type {kind}")


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _unfit(found: object, expected: str) -> ValueError:
    shown = found if isinstance(found, bytes) else str(found)
    return ValueError(f"found {shown[:80]!r}, expected {expected}")
