"""Find and replace the tensors in the arguments and outputs of modules."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

# The number of objects of users' own classes that are searched in one output.
_MOST_OBJECTS = 1000
_OPAQUE = (str, bytes, int, float, complex, type, nn.Module, types.ModuleType, types.FunctionType)


def every_tensor_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, and the non-leaf ones in the attributes of other objects.

    Modules are not searched. A leaf of autograd's graph in such an object was there before, so it
    is not an output of the module that returns the object.
    """
    if isinstance(tree, torch.Tensor):
        return [tree]
    found, inside = tensors_and_those_in_objects(tree)
    return found + [tensor for tensor in inside if tensor.grad_fn is not None]


def tensors_and_those_in_objects(tree: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors in nested containers, and those in the attributes of other objects."""
    if isinstance(tree, torch.Tensor):
        return [tree], []
    found: list[torch.Tensor] = []
    inside: list[torch.Tensor] = []
    objects: list[object] = []
    _collect(tree, found, objects)
    seen = {id(each) for each in objects}
    for each in objects:  # the list grows
        met: list[object] = []
        _collect(_attributes(each), inside, met)
        for other in met:
            if id(other) not in seen and len(objects) < _MOST_OBJECTS:
                seen.add(id(other))
                objects.append(other)
    return found, inside


def _collect(tree: Any, tensors: list[torch.Tensor], objects: list[object]) -> None:
    """Sort the contents of nested containers into tensors and other objects."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            _collect(value, tensors, objects)
    elif isinstance(tree, tuple | list | set | frozenset):
        for value in tree:
            _collect(value, tensors, objects)
    elif tree is not None and not isinstance(tree, _OPAQUE):
        objects.append(tree)


def _attributes(each: object) -> list[object]:
    """The values of the attributes of an object, without running code of its class."""
    values: list[object] = []
    with contextlib.suppress(AttributeError):  # an object with slots has no __dict__
        values += object.__getattribute__(each, "__dict__").values()
    for kind in type(each).__mro__:
        for member in vars(kind).values():
            if isinstance(member, types.MemberDescriptorType):  # a slot
                with contextlib.suppress(AttributeError):  # a slot may be empty
                    values.append(member.__get__(each))
    return values


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Replace every tensor in ``tree`` by ``fn(tensor)``.

    Objects without a changed tensor are returned as they are. The caller's own objects are never
    modified.
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
    result = copy.copy(tree)  # keeps the class: OrderedDict, a ModelOutput of transformers
    for key, value in new.items():
        result[key] = value
    return result


def _map_sequence(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    new = [fn(each) if isinstance(each, torch.Tensor) else map_tensors(fn, each) for each in tree]
    if all(map(operator.is_, new, tree)):
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
