"""Walking the tensors in what modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts, dataclasses and packed sequences, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced by ``fn`` of it.

    What holds no changed tensor is returned as it is, so that the caller's own objects are never
    modified and unchanged ones keep their identity.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, PackedSequence):
        data = fn(tree.data)
        return tree if data is tree.data else tree._replace(data=data)
    if isinstance(tree, dict):
        return _map_dict(fn, tree)
    if isinstance(tree, tuple | list):
        return _map_sequence(fn, tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(fn, tree)
    return tree


def _map_dict(fn: Callable[[torch.Tensor], torch.Tensor], tree: dict[Any, Any]) -> Any:
    new = {key: map_tensors(fn, value) for key, value in tree.items()}
    if all(new[key] is value for key, value in tree.items()):
        return tree
    result = copy.copy(tree)  # keeps the class: OrderedDict, model outputs of transformers
    for key, value in new.items():
        result[key] = value
    return result


def _map_sequence(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    new = [map_tensors(fn, value) for value in tree]
    if all(a is b for a, b in zip(new, tree, strict=True)):
        return tree
    if hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*new)
    return type(tree)(new)


def _map_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    old = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    new = {name: map_tensors(fn, value) for name, value in old.items()}
    if all(new[name] is old[name] for name in old):
        return tree
    result = copy.copy(tree)
    for name, value in new.items():
        object.__setattr__(result, name, value)  # frozen dataclasses too
    return result
