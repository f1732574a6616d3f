"""Fake tensors: tensors with shapes, dtypes and storages, but without values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwise._torch import autograd

__all__ = ["UNTRACEABLE", "FakeTensor", "FakeTensorMode", "TorchDispatchMode"]

#: What is raised by an operation whose result depends on values.
UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def stands_for_memory(tensor: torch.Tensor, mode: FakeTensorMode) -> bool:
    """Whether a tensor of the same program with values, run without ``mode``, would have memory."""
    if not isinstance(tensor, FakeTensor):
        return False
    return tensor.fake_mode is mode and tensor.fake_device.type != "meta"


def device_of(function: Any, args: tuple[Any, ...]) -> torch.device | None:
    """Return the device of a fake tensor if ``function`` only asks for that, which is often."""
    if function is _DEVICE and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


def grouped_product(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a grouped matrix product, or ``None`` for any other operation.

    The product exists in every dtype; torch's rule for its shape refuses all but bfloat16.
    """
    if function is not _GROUPED or args[0].dtype == torch.bfloat16:
        return None
    first, second = args[0], args[1]
    shape: tuple[int, ...]
    match first.ndim, second.ndim:
        case 2, 2:
            offsets = args[2] if len(args) > 2 else kwargs["offs"]
            shape = (offsets.shape[0], first.shape[0], second.shape[1])
        case 2, _:
            shape = (first.shape[0], second.shape[-1])
        case _, 2:
            shape = (first.shape[1], second.shape[1])
        case _:
            shape = (first.shape[0], first.shape[1], second.shape[-1])
    return first.new_empty(shape)


_GROUPED = torch.ops.aten._grouped_mm.default
_DEVICE = torch.ops.prim.device.default


def adopt(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of ``mode`` like any tensor; one of its own as it is."""
    known = isinstance(tensor, FakeTensor) and tensor.fake_mode is mode
    return tensor if known else mode.from_tensor(tensor)


@functools.cache
def writes(function: Any) -> bool:
    """Whether an operation writes to one of its arguments."""
    return bool(function._schema.is_mutable)


@functools.cache
def only_views(function: Any) -> bool:
    """Whether all that an operation returns are views of its arguments."""
    returned = [each.alias_info for each in function._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


@dataclass(frozen=True)
class Flops:
    """The floating-point operations of a call.

    Attributes:
        done: what is computed. A causal mask halves attention.
        needed: what counts for model FLOPs utilization: without a mask, and without the scores
            that the backward of attention computes again (PaLM, appendix B).
    """

    done: int
    needed: int


def flops_of(function: Any, args: Any, kwargs: Any, out: Any) -> Flops:
    """Return the floating-point operations of a matrix product or the like; 0 for the rest.

    Source: the formulas of ``torch.utils.flop_counter``, which leaves out attention on CPUs.
    """
    at = _CPU_ATTENTION.get(function)
    if at is not None:
        query, key = args[at.query], args[at.query + 1]
        product = 2 * query.numel() * key.shape[-2]
        causal = args[at.causal] if len(args) > at.causal else kwargs.get("is_causal", False)
        return Flops(at.done * product // (2 if causal else 1), at.needed * product)
    count: Callable[..., int] | None = flop_registry.get(function._overloadpacket)
    found = 0 if count is None else int(count(*args, **kwargs, out_val=out))
    return Flops(found, found)


@dataclass(frozen=True)
class _Attention:
    """Positions of arguments, and how many products of query and key it takes."""

    query: int
    causal: int
    done: int
    needed: int


_CPU_ATTENTION: Mapping[Any, _Attention] = {
    autograd.cpu_attention: _Attention(0, 4, 2, 2),
    autograd.cpu_attention_backward: _Attention(1, 7, 5, 4),
}
