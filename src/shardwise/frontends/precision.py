"""``MixedPrecision``, FSDP1's way to say in which dtypes to compute, in terms of the runtime.

Parameters and reduction go to ``fully_shard`` as its own policy. What that does not have is here:
casting inputs at the root only, buffers, and classes that stay in full precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from shardwise import _torch
from shardwise.sharding.precision import cast_floating


def policy_of(mixed_precision: MixedPrecision) -> MixedPrecisionPolicy:
    """What ``fully_shard`` is told; inputs are cast by :func:`cast_inputs`."""
    return MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype,
        cast_forward_inputs=False,
    )


def cast_inputs(
    mixed_precision: MixedPrecision, is_root: bool, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Inputs of a forward, in ``param_dtype`` where the policy casts them."""
    casts = (
        mixed_precision.cast_root_forward_inputs if is_root else mixed_precision.cast_forward_inputs
    )
    dtype = mixed_precision.param_dtype
    if dtype is None or not casts:
        return args, kwargs
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def cast_buffers(
    modules: Iterable[tuple[str, nn.Module]], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Cast floating-point buffers to ``dtype``, in place; tell by name which dtypes they had."""
    before: dict[str, torch.dtype] = {}
    if dtype is None:
        return before
    for prefix, module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                before[f"{prefix}.{name}" if prefix else name] = buffer.dtype
                _torch.buffers_of(module)[name] = buffer.to(dtype)
    return before


def modules_in_full_precision(
    model: nn.Module, mixed_precision: MixedPrecision | None
) -> list[nn.Module]:
    """The modules in ``model`` of classes that mixed precision is to leave alone."""
    if mixed_precision is None:
        return []
    classes = _torch.module_classes_to_ignore(mixed_precision)
    return [each for each in model.modules() if isinstance(each, classes) and each is not model]


def keep_in_full_precision(module: nn.Module) -> None:
    """Let ``module`` compute in float32 amid others that do not: cast what goes in and out."""
    wanted: list[torch.dtype | None] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        found = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        wanted.append(next((each.dtype for each in found if each.is_floating_point()), None))
        return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        dtype = wanted.pop()
        return output if dtype is None else cast_floating(output, dtype)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)
