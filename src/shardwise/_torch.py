"""Every private torch name that Shardwise touches, each behind one small function.

Tried on torch 2.11 and 2.13. When a new torch moves one of these names, this is the only file to
mend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.distributed_c10d import _coalescing_manager, _CoalescingManager
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a ``DTensor``: not differentiable, not waited for, not copied."""
    return cast(DTensor, tensor)._local_tensor


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Mesh, placements and global shape of a ``DTensor``, to build others like it."""
    return cast(DTensor, tensor)._spec


def wrap_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A ``DTensor`` around ``local``: what ``DTensor.from_local`` does, without its checks.

    Made once per gradient and step, where the public way would cost more than the arithmetic.
    """
    make = cast(Callable[..., DTensor], DTensor)
    return make(local, spec, requires_grad=local.requires_grad)


def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put ``parameter`` under ``name``; skips ``nn.Module.__setattr__``'s checks where it can."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter now registered under ``name``."""
    return cast(nn.Parameter, module._parameters[name])


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers, by name, as the mutable dictionary that the module uses."""
    return module._buffers


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that now runs has finished."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread is inside a backward (activation checkpointing recomputes there)."""
    return torch._C._current_graph_task_id() != -1


def run_post_accumulate_hooks(parameter: torch.Tensor) -> None:
    """Run the hooks that ``register_post_accumulate_grad_hook`` put on ``parameter``."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    for hook in (hooks or {}).values():
        hook(parameter)


def has_post_accumulate_hooks(parameter: torch.Tensor) -> bool:
    """Whether someone reads ``parameter.grad`` as soon as it is there."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def mark_composable(module: nn.Module, name: str) -> None:
    """Enter ``name`` into the registry that torch's composable APIs (``replicate``) look at.

    Raises:
        ValueError: ``name`` is already applied to ``module``, or an API is that excludes it.
    """
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, {})
    if name in registry:
        raise ValueError(
            f"{name} has already been applied to this {type(module).__name__}; apply it once"
        )
    if "replicate" in registry:
        raise ValueError(
            f"{name} cannot be applied to this {type(module).__name__}: torch's replicate() "
            "already manages it"
        )
    registry[name] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's ``replicate`` manages ``module``."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, {})


@contextmanager
def launched_together(group: dist.ProcessGroup) -> Iterator[_CoalescingManager]:
    """Launch the collectives called inside as one, at the end of the block.

    They must be of one kind and one dtype, each called with ``async_op=False``. What is yielded
    has a ``wait()`` for all of them.
    """
    with _coalescing_manager(group, async_ops=True) as manager:
        yield manager


def norms(tensors: list[torch.Tensor], order: float) -> tuple[torch.Tensor, ...]:
    """The norm of every tensor, in one pass where the device has a kernel for it."""
    return tuple(torch._foreach_norm(tensors, order))


def scale_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every tensor in place by a 0-dim tensor."""
    torch._foreach_mul_(tensors, factor)
