r"""Plain Python values as JSON, and back, exactly. What is none of them is refused by name.

JSON knows no tuples, bytes, dicts with other keys than strings, or numbers that are not finite.
They become objects with a single key that begins with ``$``:

    (0.9, 0.95)        {"$tuple": [0.9, 0.95]}
    b"\x00"           {"$bytes": "AA=="}
    float("inf")       {"$float": "inf"}
    {1: "a"}           {"$items": [[1, "a"]]}
    torch.float32      {"$dtype": "F32"}

Nested state as paths that lead to its leaves, and back.

    {"model": {"a.weight": T}, "extra": {"rows": [T, T]}}

is ``("model", "a.weight")``, ``("extra", "rows", 0)`` and ``("extra", "rows", 1)``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from shardwise.checkpoint.disk.entries import (
    DTYPE_NAMES,
    PathKey,
    StatePath,
    dtype_name,
    torch_dtype,
)
from shardwise.checkpoint.disk.strict import Collisions, refuse
from shardwise.errors import CheckpointError

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DEEPEST = 64


def encode(value: Any, name: str, depth: int = 0) -> Any:
    """What stands for a value in JSON.

    Args:
        value: ``None``, booleans, numbers, strings, bytes, dtypes, and lists, tuples and dicts of
            them.
        name: what it is called, for messages.
        depth: how many containers it is in.

    Raises:
        TypeError: it is, or holds, anything else.
    """
    if depth > _DEEPEST:
        raise TypeError(f"{name}: is nested more than {_DEEPEST} deep")
    # The exact types: an enum that is an integer too would come back as something else.
    match value:
        case None | bool() | int() | str() if type(value) in (type(None), bool, int, str):
            return value
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        case list() if type(value) is list:
            return _encode_all(value, name, depth)
        case tuple() if type(value) is tuple:
            return {"$tuple": _encode_all(value, name, depth)}
        case dict():
            return _encode_dict(value, name, depth)
    if _is_dtype(value):
        return {"$dtype": dtype_name(value)}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(
        f"{name}: found {kind}, expected a tensor or a plain value (None, bool, int, float, str, "
        "bytes, list, tuple, dict, torch.dtype); checkpoints hold no pickled objects"
    )


def _encode_all(values: list[Any] | tuple[Any, ...], name: str, depth: int) -> list[Any]:
    return [encode(value, f"{name}[{i}]", depth + 1) for i, value in enumerate(values)]


def _encode_dict(value: dict[Any, Any], name: str, depth: int) -> Any:
    if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
        return {key: encode(item, f"{name}.{key}", depth + 1) for key, item in value.items()}
    items = [
        [
            encode(key, f"{name}, key {key!r}", depth + 2),
            encode(item, f"{name}[{key!r}]", depth + 2),
        ]
        for key, item in value.items()
    ]
    return {"$items": items}


def _is_dtype(value: Any) -> bool:
    # Told by the name, so that reading a manifest does not import torch.
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


def decode(value: Any, where: str, depth: int = 0) -> Any:
    """The value that JSON stands for.

    Raises:
        CheckpointError: nothing that :func:`encode` writes.
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"{where}: is nested more than {_DEEPEST} deep")
    match value:
        case list():
            return [decode(item, where, depth + 1) for item in value]
        case dict():
            tag = next((key for key in value if key.startswith("$")), None)
            if tag is None:
                return {key: decode(item, where, depth + 1) for key, item in value.items()}
            if len(value) != 1:
                raise CheckpointError(f"{where}: found {tag} beside other keys, expected it alone")
            return _decode_tagged(tag, value[tag], where, depth)
        case float() if not math.isfinite(value):
            refuse(where, value, "a finite number, or $float")
    return value


def _decode_tagged(  # noqa: RET503 (refuse raises)
    tag: str, value: Any, where: str, depth: int
) -> Any:
    match tag, value:
        case "$tuple", list():
            return tuple(decode(item, where, depth + 1) for item in value)
        case "$bytes", str():
            try:
                return base64.b64decode(value, validate=True)
            except ValueError:
                refuse(where, value, "base64")
        case "$float", str() if value in _NOT_FINITE:
            return _NOT_FINITE[value]
        case "$dtype", str() if value in DTYPE_NAMES:
            return torch_dtype(value)
        case "$items", list():
            return _decode_items(value, where, depth)
    refuse(where, tag, "$tuple, $bytes, $float, $dtype or $items, with what belongs there")


def _decode_items(pairs: list[Any], where: str, depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    collisions = Collisions(where)
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            refuse(where, pair, "a key and a value")
        key, value = decode(pair[0], where, depth + 2), decode(pair[1], where, depth + 2)
        try:
            collisions.check(key)
            if key in found:
                refuse(where, key, "each key once")
            found[key] = value
        except TypeError:
            refuse(where, key, "a key that can be hashed")
    return found


def leaves(path: StatePath, tree: Any) -> Iterator[tuple[StatePath, Any]]:
    """Tensors, and the largest parts of a tree without any, each with its path.

    Dicts are always taken apart, so that ranks can each add keys of their own.
    """
    if isinstance(tree, Mapping) and tree and all(type(key) is str for key in tree):
        for key, item in tree.items():
            yield from leaves((*path, key), item)
    elif type(tree) is list and _holds_tensor(tree):
        for i, item in enumerate(tree):
            yield from leaves((*path, i), item)
    elif len(path) > 1:
        yield path, tree
    elif tree:
        raise TypeError(f"{path[0]}: found {type(tree).__name__}, expected a dict with string keys")


def _holds_tensor(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(_holds_tensor(item) for item in tree.values())
    if isinstance(tree, list | tuple):
        return any(_holds_tensor(item) for item in tree)
    return isinstance(tree, Tensor)


def unflatten(found: Iterable[tuple[StatePath, Any]], where: str) -> dict[str, Any]:
    """The tree that paths lead through.

    Raises:
        CheckpointError: a list lacks an item.
    """
    root: dict[PathKey, Any] = {}
    for path, value in found:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
        node[path[-1]] = value
    return {str(key): _grown(value, str(key), where) for key, value in root.items()}


class _Node(dict[PathKey, Any]):
    """A dict or list to be: no value that was saved is one."""


def _grown(node: Any, name: str, where: str) -> Any:
    if not isinstance(node, _Node):
        return node
    if all(type(key) is str for key in node):
        return {key: _grown(item, f"{name}.{key}", where) for key, item in node.items()}
    if sorted(node) != list(range(len(node))):
        raise CheckpointError(f"{where}: {name} is a list of which items are missing")
    return [_grown(node[i], f"{name}.{i}", where) for i in range(len(node))]
