"""Nested state as paths that lead to its leaves, and back.

    {"model": {"a.weight": T}, "extra": {"rows": [T, T]}}

is ``("model", "a.weight")``, ``("extra", "rows", 0)`` and ``("extra", "rows", 1)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from shardwise.checkpoint.disk.entries import PathKey, StatePath
from shardwise.errors import CheckpointError


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
