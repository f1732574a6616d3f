"""Which parameters a ``fully_shard`` call takes, and where they are registered."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor, fsdp
from shardwise.errors import MisuseError
from shardwise.sharding.form import ParamOwner, ShardedForm
from shardwise.sharding.module_state import state_of

_TAKEN = "_shardwise_form"
_GROUPS = "_shardwise_groups"


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
        if module in found or nested or fsdp.is_replicated(module):
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
        MisuseError: one is in the group of an earlier call, on a module around this one.
    """
    found: dict[nn.Parameter, tuple[str, list[ParamOwner]]] = {}
    for module, prefix in managed.items():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param in ignored:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            group = module.__dict__.get(_GROUPS, {}).get(name)
            if group is not None and isinstance(param, DTensor):
                raise MisuseError(
                    f"{fqn} of {type(module).__name__} on rank {dist.get_rank()} is in the group "
                    f"of {group} already, which fully_shard was applied to earlier; expected each "
                    "parameter in one group. Apply fully_shard from the inside out: first to this "
                    "module, then to the one around it"
                )
            if param not in found:
                found[param] = (fqn, [])
            found[param][1].append(ParamOwner(module, name))
    return found


def form_of(param: nn.Parameter) -> ShardedForm | None:
    """The sharded form of an original parameter that an earlier call has taken.

    A parameter that is tied is still registered, as it was, in modules of other calls.
    """
    return getattr(param, _TAKEN, None)


def mark_taken(param: nn.Parameter, form: ShardedForm) -> None:
    """Note the sharded form on an original parameter, for modules that still hold it."""
    setattr(param, _TAKEN, form)


def note_group(owners: Iterable[ParamOwner], fqn: str, group: str) -> None:
    """Note on the modules of a sharded parameter in which group it is.

    From then on neither another call takes it, nor torch's tensor parallelism, which comes first.

    Args:
        owners: where the parameter is registered.
        fqn: its fully qualified name.
        group: the classes of the modules that were sharded together.
    """
    for owner in owners:
        groups = owner.module.__dict__.setdefault(_GROUPS, {})
        groups[owner.name] = group
        if len(groups) > 1:
            continue  # one parameter of a module is named
        fsdp.refuse_to_distribute(
            owner.module,
            MisuseError(
                f"{fqn} of {type(owner.module).__name__} on rank {dist.get_rank()}: found tensor "
                f"parallelism applied after sharding, to the group of {group}; expected it before. "
                'Call parallelize_module(model, mesh["tp"], plan) first, then fully_shard(..., '
                'mesh=mesh["dp"])'
            ),
        )


def move_to_device(
    params: Iterable[nn.Parameter], managed: Iterable[nn.Module], device: torch.device
) -> None:
    """Move parameters and buffers to ``device``; what is on the meta device stays there."""
    buffers = [buffer for module in managed for buffer in module.buffers(recurse=False)]
    for tensor in [*params, *buffers]:
        if tensor.device == device or tensor.is_meta or isinstance(tensor, DTensor):
            continue
        if dtensor.is_wrapper(tensor):
            # Its data cannot be set; the object stays the same for those who hold it.
            with torch.no_grad():
                fsdp.swap_tensors(tensor, nn.Parameter(tensor.to(device)))
        else:
            tensor.data = tensor.to(device)
