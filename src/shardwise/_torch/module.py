"""Private names of ``nn.Module``: what state dicts contain, and who takes part in loading them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise._torch.fsdp import children_of

#: What state dicts call the extra state of a module.
EXTRA_STATE = "_extra_state"
# Wrappers that leave their part of a name out of state dicts, by hooks of their own.
_UNNAMED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_COMPILED, _PARALLEL = "_orig_mod", "DistributedDataParallel"
# Hooks from there change names of wrappers, and check, but do not change values.
_NEUTRAL = ("shardwise.", "torch.distributed.")


@dataclass(frozen=True)
class Visit:
    """A module where it is in a model.

    Attributes:
        module: the module.
        name: its name, without the parts that wrappers add.
        key: its name in state dicts, which has those of compilation and ``DataParallel``.
        path: its name with all parts.
    """

    module: nn.Module
    name: str
    key: str
    path: str


def visits(module: nn.Module, name: str = "", key: str = "", path: str = "") -> Iterator[Visit]:
    """Visit a module and all inside it, in the order of state dicts; one with two names twice."""
    yield Visit(module, name, key, path)
    for part, child in children_of(module):
        is_parallel = part == "module" and _is_parallel(module)
        is_hidden = part in _UNNAMED
        yield from visits(
            child,
            name if is_hidden or is_parallel or part == _COMPILED else joined(name, part),
            key if is_hidden else joined(key, part),
            joined(path, part),
        )


def _is_parallel(module: nn.Module) -> bool:
    return any(each.__name__ == _PARALLEL for each in type(module).__mro__)


def joined(prefix: str, name: str) -> str:
    """The name of something inside a module."""
    return f"{prefix}.{name}" if prefix else name


def saved_tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and buffers that state dicts have, by name."""
    for name, param in module._parameters.items():
        if param is not None:
            yield name, param
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def has_extra_state(module: nn.Module) -> bool:
    """Whether state dicts have an extra state of the module."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def version_of(module: nn.Module) -> int:
    """The version of a module's state dict."""
    return module._version


def versions_in(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a state dict notes of modules, their versions among it, by their names."""
    found = getattr(state_dict, "_metadata", None)
    return found if isinstance(found, dict) else {}


def with_versions(
    state: Iterable[tuple[str, Any]], versions: Mapping[str, Any]
) -> OrderedDict[str, Any]:
    """A state dict that notes the versions of modules."""
    made = OrderedDict(state)
    made._metadata = versions  # type: ignore[attr-defined]
    return made


def customizes_loading(modules: Iterable[nn.Module]) -> bool:
    """Whether modules have a say in what ``load_state_dict`` makes of values and names."""
    hooks = "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
    return _have_foreign(modules, hooks, ("_load_from_state_dict", "load_state_dict"))


def customizes_saving(modules: Iterable[nn.Module]) -> bool:
    """Whether modules have a say in what ``state_dict`` returns."""
    hooks = "_state_dict_pre_hooks", "_state_dict_hooks"
    return _have_foreign(modules, hooks, ("_save_to_state_dict", "state_dict"))


def _have_foreign(
    modules: Iterable[nn.Module], hooks: Iterable[str], methods: Iterable[str]
) -> bool:
    """Whether a module has hooks or methods of its own, by the names of torch's."""
    return any(
        any(_has_foreign(getattr(module, each).values()) for each in hooks)
        or any(_is_overridden(module, each) for each in methods)
        for module in modules
    )


def _is_overridden(module: nn.Module, name: str) -> bool:
    # All of its classes, for a sharded module has one of ours in front of the user's.
    places = [module, *(each for each in type(module).__mro__ if each is not nn.Module)]
    return _has_foreign(vars(each)[name] for each in places if name in vars(each))


def _has_foreign(functions: Iterable[Callable[..., Any]]) -> bool:
    for function in functions:
        inner: Any = getattr(function, "hook", function)  # torch wraps hooks that get the module
        inner = getattr(inner, "func", inner)  # as functools.partial does
        if not str(getattr(inner, "__module__", "")).startswith(_NEUTRAL):
            return True
    return False


def skip_in_names(cls: Any, inner: str) -> None:
    """Have ``torch.distributed.checkpoint`` leave the wrapper of ``inner`` out of names."""
    cls._fqn_modifiers = lambda module: {"": inner}
