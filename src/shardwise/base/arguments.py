"""Checks of arguments: are their types those of the signature, and are seconds a time to wait?"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache
from itertools import islice
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

#: What stands for a type in messages, where its name does not.
_WORDS = {
    "None": "None",
    "NoneType": "None",
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "PathLike": "a path",
    "Module": "an nn.Module",
    "dtype": "a torch.dtype (such as torch.bfloat16)",
    "device": "a torch.device",
    "DeviceMesh": "a DeviceMesh (such as shardwise.init_mesh(dp=2))",
    "Callable": "a function",
    "Mapping": "a dict",
}
_COLLECTIONS = {"Sequence": "list or tuple", "set": "set"}
_FREE = (bool, object, Any)  # anything has a truth value
_LOOKED_AT = 16  # items of a list, which may have thousands
_SHOWN = (str, bytes, int, float, os.PathLike, enum.Enum, types.NoneType)


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check the types of arguments, before anything has changed.

    Annotations say what is expected, also of the fields of torch's own dataclasses, which check
    nothing. What they cannot say at run time, and truth values, pass.

    Args:
        function: what was called; or a dataclass, for its fields.
        given: its arguments by name: ``locals()``, in the first line.

    Raises:
        TypeError: an argument has another type; the message names it.
    """
    for name, expected in _expected(function).items():
        several = given[name[2:]] if name.startswith("**") else {name: given[name]}
        for each, value in several.items():
            _check(each, value, expected)
            kind = type(value)
            if dataclasses.is_dataclass(kind) and kind.__module__.startswith("torch."):
                for field, wanted in _expected(kind).items():
                    _check(f"{each}.{field}", getattr(value, field), wanted)


def check_seconds(name: str, value: float) -> None:
    """Check a time to wait.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0, or it is NaN or infinite, which would be forever.
    """
    _check(name, value, float)
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: found {value}, expected seconds, a number above 0")


def check_timeout(name: str, value: float) -> None:
    """Check the longest time to wait, which may be 0, or infinite: forever.

    Raises:
        TypeError: it is no number.
        ValueError: it is below 0 or NaN.
    """
    _check(name, value, float)
    if not value >= 0:
        raise ValueError(f"{name}: found {value}, expected seconds, 0 or more")


def _check(name: str, value: Any, expected: Any) -> None:
    if not _fits(value, expected):
        raise TypeError(f"{name}: found {_shown(value)}, expected {_in_words(expected)}")


def _shown(value: Any) -> str:
    if isinstance(value, _SHOWN):
        return repr(value)[:80]
    items = islice(value, _LOOKED_AT) if isinstance(value, list | tuple | set) else ()
    kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in items))
    return f"{_a(type(value).__name__)}{kinds and f' of {kinds}'}"


@cache
def _expected(function: Any) -> dict[str, Any]:
    """What each argument has to be, without those of which nothing is known."""
    made = inspect.unwrap(function)
    names = vars(sys.modules[made.__module__])
    found = {}
    for name, each in inspect.signature(made).parameters.items():
        if each.kind is each.VAR_POSITIONAL or each.annotation is each.empty:
            continue
        name = f"**{name}" if each.kind is each.VAR_KEYWORD else name
        # What is imported for type checkers alone is not there.
        with contextlib.suppress(NameError, AttributeError, TypeError):
            text = each.annotation
            found[name] = eval(text, names) if isinstance(text, str) else text
    return found


def _fits(value: Any, expected: Any) -> bool:
    origin, parts = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in parts)
    if origin is Annotated:
        return _fits(value, parts[0])
    if origin is Literal:
        return isinstance(value, tuple(map(type, parts)))
    if isinstance(expected, TypeVar):
        return _fits(value, expected.__bound__ or object)
    if expected is None:
        return value is None
    kind = origin or expected
    if not isinstance(kind, type) or kind in _FREE:
        return kind is not collections.abc.Callable or callable(value)
    if issubclass(kind, enum.Enum):
        return isinstance(value, kind | str)  # functions know what names stand for
    if kind in (int, float):
        return isinstance(value, SupportsIndex if kind is int else SupportsIndex | SupportsFloat)
    if kind is os.PathLike or issubclass(kind, os.PathLike):
        return isinstance(value, os.PathLike)
    if kind is tuple and parts and ... not in parts:  # functions say how many, in better words
        return isinstance(value, tuple | list) and all(map(_fits, value, parts))
    if kind in (list, tuple, set):  # any other that can be gone through will do
        kind = collections.abc.Iterable
    if issubclass(kind, collections.abc.Iterable) and issubclass(collections.abc.Sequence, kind):
        is_right = isinstance(value, kind) and not isinstance(value, str | bytes)
        seen = value if parts and isinstance(value, list | tuple | set) else ()
        return is_right and all(_fits(each, parts[0]) for each in islice(seen, _LOOKED_AT))
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol, perhaps of functions
        return all(hasattr(value, each) for each in vars(kind) if each not in vars(Protocol))


def _in_words(expected: Any) -> str:
    origin, parts = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_in_words, parts)))
    if origin is Annotated or isinstance(expected, TypeVar):
        return _in_words(parts[0] if parts else expected.__bound__)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is tuple and ... not in parts:
        return f"({', '.join(map(_in_words, parts))})"
    kind = origin or expected
    name = getattr(kind, "__name__", str(kind))
    if name in _WORDS:
        return _WORDS[name]
    if name in ("list", "set", "Iterable", "Collection", "Sequence"):
        each = f", each {_in_words(parts[0])}" if parts and parts[0] is not Any else ""
        return f"a {_COLLECTIONS.get(name, 'list')}{each}"
    return _a(name)


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' or name.startswith('FSDP') else 'a'} {name}"
