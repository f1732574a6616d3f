"""What a user chooses for a group: dtypes, and when things happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise._torch import fsdp
from shardwise.sharding.tree import map_tensors
from shardwise.transport.base import Reduce


@dataclass(frozen=True)
class Precision:
    """The dtypes of a :class:`MixedPrecisionPolicy`, for each parameter."""

    policy: MixedPrecisionPolicy

    @classmethod
    def of(cls, policy: MixedPrecisionPolicy) -> Precision:
        """Those of a policy, for parameters of which it says nothing else.

        Raises:
            ValueError: one of them is no dtype of floating-point numbers.
        """
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(policy, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(
                    f"mp_policy.{name}: found {dtype}, expected a dtype of floating-point numbers, "
                    "such as torch.bfloat16"
                )
        return cls(fsdp.without_override(policy))

    def for_parameter(
        self, policy: MixedPrecisionPolicy, param: nn.Parameter, fqn: str
    ) -> Precision:
        """Those for one parameter, if the policy has a ``param_dtype_override_fn``.

        Args:
            policy: the policy that these are of.
            param: the parameter, before it is sharded.
            fqn: its name, for messages.

        Raises:
            ValueError: the function returned a dtype other than those of the policy and of the
                parameter.
        """
        dtype = fsdp.dtype_override(policy, param)
        if dtype in (None, self.policy.param_dtype):
            return self
        if dtype != param.dtype:
            raise ValueError(
                f"{fqn}: param_dtype_override_fn returned {dtype!r}, expected None, the "
                f"param_dtype {self.policy.param_dtype}, or {param.dtype}, the dtype of the "
                "parameter"
            )
        return Precision(replace(self.policy, param_dtype=None))

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype of the full parameter whose shard has the dtype ``stored``."""
        wanted = self.policy.param_dtype
        return stored if wanted is None or not stored.is_floating_point else wanted

    def reduce_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of such a parameter are accumulated and reduced."""
        wanted, computed = self.policy.reduce_dtype, self.compute_dtype(stored)
        if wanted is None:
            return stored if fsdp.REDUCES_AS_STORED else computed
        return wanted if computed.is_floating_point else computed

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cast floating-point forward inputs to ``param_dtype``, if the policy says so."""
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def cast_outputs(self, output: Any) -> Any:
        """Cast floating-point forward outputs to ``output_dtype``, if the policy has one."""
        dtype = self.policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in ``tree`` to ``dtype``. Complex ones stay as they are."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, tree)


#: Called with the reduced gradients of a group, concatenated to 1-D, before they are divided.
AllReduceHook = Callable[[torch.Tensor], object]


@dataclass
class GroupOptions:
    """The options of one group. Each is documented at the ``FSDPModule`` method that sets it."""

    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_unsharded: bool = False
    keep_unsharded_storage: bool = False
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    gradient_divide_factor: float | None = None
    reduce_op: Reduce = Reduce.AVG
    reduce_scatter_unused_params: bool = False
    reduce_scatter_max_input_buffers: int = 1
    all_reduce_hook: AllReduceHook | None = None
    all_reduce_hook_stream: torch.Stream | None = None
    keep_low_precision_grads: bool = False
