"""Which parameters a ``fully_shard`` call takes, and where they are registered."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import _torch
from shardwise.sharding.hooks import state_of
from shardwise.sharding.param import ParamOwner

_TAKEN = "_shardwise_taken_as"


def outermost(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """``modules`` without those that another of them contains, in order, each once."""
    unique = list(dict.fromkeys(modules))
    inside = {child for module in unique for child in module.modules() if child is not module}
    return tuple(module for module in unique if module not in inside)


def managed_modules(tops: tuple[nn.Module, ...]) -> dict[nn.Module, str]:
    """The modules under ``tops`` that no nested call has taken, with their names from there."""
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, name: str) -> None:
        nested = module not in tops and state_of(module) is not None
        if module in found or nested or _torch.is_replicated(module):
            return
        found[module] = name
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    for top in tops:
        visit(top, "")
    return found


def parameters_of(
    managed: dict[nn.Module, str], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, tuple[str, list[ParamOwner]]]:
    """Every parameter to shard, with its name and all its owners, in module order.

    Raises:
        NotImplementedError: a parameter is tied to one that an earlier call has sharded.
    """
    found: dict[nn.Parameter, tuple[str, list[ParamOwner]]] = {}
    for module, prefix in managed.items():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param in ignored:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            taken_as = getattr(param, _TAKEN, None)
            if taken_as is not None:
                raise NotImplementedError(
                    f"parameter {fqn} is tied to {taken_as}, which an earlier fully_shard call has "
                    "sharded; shard both modules in one call, fully_shard([a, b]), or leave both "
                    "to the call on the module that contains them"
                )
            if param not in found:
                found[param] = (fqn, [])
            found[param][1].append(ParamOwner(module, name))
    return found


def mark_taken(param: nn.Parameter, fqn: str) -> None:
    """Note on an original parameter that it has been sharded, for modules that still hold it."""
    setattr(param, _TAKEN, fqn)


def move_to_device(
    params: Iterable[nn.Parameter], managed: Iterable[nn.Module], device: torch.device
) -> None:
    """Move parameters and buffers to ``device``; what is on the meta device stays there."""
    buffers = [buffer for module in managed for buffer in module.buffers(recurse=False)]
    for tensor in [*params, *buffers]:
        if tensor.device == device or tensor.is_meta or isinstance(tensor, DTensor):
            continue
        tensor.data = tensor.to(device)
