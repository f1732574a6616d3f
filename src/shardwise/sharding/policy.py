"""What a user chooses for a group: dtypes, when things happen, and whether shards are offloaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise import devices
from shardwise._torch import autograd
from shardwise.sharding.tree import map_tensors
from shardwise.transport.base import Reduce


@dataclass(frozen=True)
class Precision:
    """The dtypes of a :class:`MixedPrecisionPolicy`, for each parameter."""

    policy: MixedPrecisionPolicy

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype of the full parameter whose shard has the dtype ``stored``."""
        wanted = self.policy.param_dtype
        return stored if wanted is None or not stored.is_floating_point else wanted

    def reduce_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of such a parameter are accumulated and reduced."""
        wanted = self.policy.reduce_dtype
        if wanted is None and self.policy.param_dtype is None:
            return stored
        computed = self.compute_dtype(stored)
        return computed if wanted is None or not computed.is_floating_point else wanted

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


@dataclass
class Offload:
    """Where the shards and sharded gradients of one ``fully_shard`` call are stored.

    On a CPU mesh there is nothing to offload, and the policy changes nothing. The parameters and
    groups of the call share one object: groups wait for the copies that parameters start.

    Attributes:
        enabled: whether they are stored on the host, apart from ``device``.
        pin_memory: whether host memory is pinned, so that copies overlap with compute. Never on
            devices without pinned memory, whatever the policy says.
        device: the device on which this rank computes.
    """

    enabled: bool
    pin_memory: bool
    device: torch.device
    # The last copy to the host on each stream. Earlier ones on that stream end before it.
    _copied: dict[torch.Stream, torch.Event] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, policy: OffloadPolicy, device: torch.device) -> Offload:
        """Read torch's policy for a mesh on ``device``."""
        enabled = isinstance(policy, CPUOffloadPolicy) and device.type != "cpu"
        pin = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
        return cls(enabled, enabled and pin and devices.pins(device), device)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Offload:
        """Copy for copied modules, whose gradients are not being copied to the host."""
        return dataclasses.replace(self, _copied={})

    @property
    def home(self) -> torch.device:
        """The device that shards are stored on."""
        return devices.CPU if self.enabled else self.device

    def place(self, shard: torch.Tensor) -> torch.Tensor:
        """Move ``shard`` to where it is stored. Shards on the meta device stay there."""
        if not self.enabled or shard.is_meta:
            return shard
        shard = shard.to(self.home)
        return devices.pinned(shard) if self.pin_memory else shard

    def grad_to_host(self, grad: torch.Tensor, sharded: nn.Parameter) -> torch.Tensor:
        """Start to copy a reduced gradient to the host. :meth:`wait` waits for it.

        If ``sharded`` has hooks that read the gradient at once, this waits.
        """
        if not self.pin_memory:
            return devices.copy_to_host(grad, devices.Copy.PAGEABLE)
        if autograd.has_post_accumulate_hooks(sharded):
            return devices.copy_to_host(grad, devices.Copy.PINNED)
        host = devices.copy_to_host(grad, devices.Copy.STARTED)
        stream = devices.current_stream(self.device)
        self._copied[stream] = stream.record_event()
        return host

    def wait(self) -> None:
        """Block until all gradients have been copied to the host."""
        while self._copied:
            self._copied.popitem()[1].synchronize()
