r"""A training state taken apart: tensors and values with paths, and values as JSON.

    {"model": {"a.weight": T}, "extra": {"rows": [T, T]}}

has the leaves ``("model", "a.weight")``, ``("extra", "rows", 0)`` and ``("extra", "rows", 1)``. The
numbers of items of a tuple come after a key ``$tuple``.

Plain Python values become JSON and come back exactly; anything else is refused by name, because a
checkpoint holds no pickled objects. JSON has no tuples, bytes, dicts with keys other than strings,
or non-finite numbers. They become objects with a single key that begins with ``$``:

    (0.9, 0.95)        {"$tuple": [0.9, 0.95]}
    b"\x00"            {"$bytes": "AA=="}
    float("inf")       {"$float": "inf"}
    {1: "a"}           {"$items": [[1, "a"]]}
    torch.float32      {"$dtype": "F32"}
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shardwise.base.errors import CheckpointError
from shardwise.base.strict import Collisions, refuse
from shardwise.checkpoint.disk.entries import (
    DTYPE_NAMES,
    PathKey,
    StatePath,
    dtype_name,
    torch_dtype,
)

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DEEPEST = 64
#: In a path, the key before the number of an item of a tuple; of a list, there is none.
TUPLE = "$tuple"
#: In a path, the key before the number of the rank whose value it is.
RANKS = "$ranks"


def encode(value: Any, name: str, depth: int = 0) -> Any:
    """Encode a plain value as JSON.

    Args:
        value: ``None``, a bool, int, float, str, bytes or dtype, or a list, tuple or dict of those.
        name: name of the value, for error messages.
        depth: number of containers that enclose it.

    Raises:
        TypeError: the value is, or contains, anything else, or is nested too deeply.
    """
    if depth > _DEEPEST:
        raise TypeError(f"{name}: found more than {_DEEPEST} levels of nesting, expected fewer")
    # Exact types only: an enum that is also an integer would come back as something else.
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
            return {TUPLE: _encode_all(value, name, depth)}
        case dict():
            return _encode_dict(value, name, depth)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind == "torch.dtype":  # by name, so that reading a manifest does not import torch
        return {"$dtype": dtype_name(value)}
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


def decode(value: Any, where: str, depth: int = 0) -> Any:
    """Decode what :func:`encode` returned.

    Args:
        value: parsed JSON.
        where: the file and the entry, for error messages.
        depth: number of containers that enclose it.

    Raises:
        CheckpointError: it is not something that :func:`encode` returns.
    """
    if depth > _DEEPEST:
        raise CheckpointError(
            f"{where}: found more than {_DEEPEST} levels of nesting, expected fewer"
        )
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
        case t, list() if t == TUPLE:
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
    refuse(where, tag, "$tuple, $bytes, $float, $dtype or $items, with a value of its kind")


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
            refuse(where, key, "a hashable key")
    return found


def leaves(path: StatePath, tree: Any) -> Iterator[tuple[StatePath, Any]]:
    """Yield the tensors of a nested state, and the largest parts without tensors, with their paths.

    Dicts are always taken apart, so that each rank can add keys of its own.

    Args:
        path: path of ``tree``.
        tree: nested dicts and lists of tensors and plain values.

    Raises:
        TypeError: the tree as a whole is not a dict with string keys.
        ValueError: a dict with tensors has the key that tells tuples from lists.
    """
    if isinstance(tree, Mapping) and TUPLE in tree:
        if _holds_tensor(tree):
            raise ValueError(
                f"{'.'.join(map(str, path))}: found tensors beside the key {TUPLE!r}, which tells "
                "tuples from lists, expected another key"
            )
        yield path, tree
    elif isinstance(tree, Mapping) and tree and all(type(key) is str for key in tree):
        for key, item in tree.items():
            yield from leaves((*path, key), item)
    elif (type(tree) is list or (type(tree) is tuple and len(path) > 1)) and _holds_tensor(tree):
        for i, item in enumerate(tree):
            yield from leaves((*path_of_items(path, tree), i), item)
    elif len(path) > 1:
        yield path, tree
    elif tree:
        raise TypeError(f"{path[0]}: found {type(tree).__name__}, expected a dict with string keys")


def path_of_items(path: StatePath, items: list[Any] | tuple[Any, ...]) -> StatePath:
    """The path that the numbers of items follow, of a list or a tuple at a path."""
    return (*path, TUPLE) if isinstance(items, tuple) else path


def _holds_tensor(tree: Any) -> bool:
    from torch import Tensor  # only for this, and not to read a manifest

    return any(isinstance(each, Tensor) for each in held_in(tree))


def held_in(tree: Any) -> Iterator[Any]:
    """Yield what nested dicts, lists and tuples hold, in their order."""
    if isinstance(tree, Mapping | list | tuple):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from held_in(item)
    else:
        yield tree


def replaced_in(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with other values in place of what they hold."""
    if isinstance(tree, dict):
        return {key: replaced_in(item, replace) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(replaced_in(item, replace) for item in tree)
    return replace(tree)


def unflatten(found: Iterable[tuple[StatePath, Any]], where: str) -> dict[str, Any]:
    """Build the nested state that paths describe.

    Args:
        found: paths and their tensors or values, in any order.
        where: the checkpoint, for error messages.

    Raises:
        CheckpointError: items of a list are missing.
    """
    root: dict[PathKey, Any] = {}
    for path, value in found:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _OpenNode())
        node[path[-1]] = value
    return {str(key): _built(value, str(key), where) for key, value in root.items()}


class _OpenNode(dict[PathKey, Any]):
    """A dict or list under construction. It has a type of its own, which no saved value has."""


def _built(node: Any, name: str, where: str) -> Any:
    if not isinstance(node, _OpenNode):
        return node
    if node.keys() == {TUPLE} and isinstance(node[TUPLE], _OpenNode):
        items = _built(node[TUPLE], f"{name}.{TUPLE}", where)
        if not isinstance(items, list):
            raise CheckpointError(
                f"{where}: {name} is a tuple with items of other keys than numbers"
            )
        return tuple(items)
    if all(type(key) is str for key in node):
        return {key: _built(item, f"{name}.{key}", where) for key, item in node.items()}
    if sorted(node) != list(range(len(node))):
        raise CheckpointError(f"{where}: {name} is a list with missing items")
    return [_built(node[i], f"{name}.{i}", where) for i in range(len(node))]
