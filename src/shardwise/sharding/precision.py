"""Dtypes: in which a group computes, in which it reduces, and the casts at module borders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.sharding.tree import map_tensors


@dataclass(frozen=True)
class Precision:
    """A :class:`MixedPrecisionPolicy`, answered parameter by parameter."""

    policy: MixedPrecisionPolicy

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Dtype of the full parameter whose shard has dtype ``stored``."""
        wanted = self.policy.param_dtype
        return stored if wanted is None or not stored.is_floating_point else wanted

    def reduce_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of such a parameter are added up and reduced."""
        wanted = self.policy.reduce_dtype
        computed = self.compute_dtype(stored)
        return computed if wanted is None or not computed.is_floating_point else wanted

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Forward inputs, floating-point tensors cast to ``param_dtype`` if the policy says so."""
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def cast_outputs(self, output: Any) -> Any:
        """Forward outputs, floating-point tensors cast to ``output_dtype`` if there is one."""
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` with its real floating-point tensors in ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, tree)
