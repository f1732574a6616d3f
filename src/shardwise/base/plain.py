"""Values as JSON, and back: dataclasses of plain values, enums, tuples, lists and dicts.

What there are many of is a ``NamedTuple``: a list in JSON, without the names of its fields.

What is read may come from anyone, so it has exactly the fields and types that its class says, or is
refused. What a class demands beyond types, it checks in ``__post_init__`` by a ``ValueError``.
"""

from __future__ import annotations

import enum
import functools
import json
import types
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LARGEST = 2**62


def written(value: Any) -> bytes:
    """Return a dataclass as JSON that :func:`read` takes."""
    return json.dumps(value, default=_simpler, separators=(",", ":")).encode()


def _simpler(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return {each.name: getattr(value, each.name) for each in fields(value)}


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
    if type(value) is kind and (kind in (str, bool) or _is_number(value)):
        return value
    origin, parts = _form(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _convert(parts[0], value, where)
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = _fields(kind)
        if not isinstance(value, dict) or value.keys() != kinds.keys():
            raise _unfit(value, f"the fields of {where}")
        return kind(**{n: _convert(kinds[n], value[n], f"{where}.{n}") for n in kinds})
    if origin is dict and isinstance(value, dict):
        return {parts[0](key): _convert(parts[1], each, where) for key, each in value.items()}
    if origin in (list, tuple) and isinstance(value, list | tuple):
        each_kind = parts if origin is tuple and parts[-1] is not ... else parts[:1] * len(value)
        return origin(_convert(k, each, where) for k, each in zip(each_kind, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if isinstance(kind, type) and issubclass(kind, tuple):
        kinds = _fields(kind)
        if not isinstance(value, list) or len(value) != len(kinds):
            raise _unfit(value, f"the fields of {where}")
        return kind(*(_convert(kinds[n], v, where) for n, v in zip(kinds, value, strict=True)))
    if kind is float and type(value) is int and _is_number(value):
        return float(value)
    raise _unfit(value, f"{where} of type {kind}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST  # as infinity and NaN are not


@functools.cache
def _form(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _unfit(found: object, expected: str) -> ValueError:
    shown = found if isinstance(found, bytes) else str(found)
    return ValueError(f"found {shown[:80]!r}, expected {expected}")
