"""Shards that live on the host while computing happens on a device.

On a mesh of CPUs there is nothing to offload: shards are on the host already, and the policy
changes nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardwise._torch import autograd


@dataclass
class Offload:
    """Where the shards and sharded gradients of one ``fully_shard`` call live.

    The call's parameters and groups have one in common: the copies that the parameters start are
    those that the groups wait for.

    Attributes:
        enabled: whether they live on the host, away from ``device``.
        pin_memory: whether host memory is pinned, so that copies overlap with computing.
        device: where this rank computes.
    """

    enabled: bool
    pin_memory: bool
    device: torch.device
    # The last copy to the host on each stream; those before it on that stream end before it.
    _copied: dict[torch.Stream, torch.Event] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, policy: OffloadPolicy, device: torch.device) -> Offload:
        """Read torch's policy for a mesh on ``device``."""
        enabled = isinstance(policy, CPUOffloadPolicy) and device.type != "cpu"
        pin = enabled and isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
        return cls(enabled, pin, device)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Offload:
        """Copy for copied modules, which have no gradients on their way."""
        return dataclasses.replace(self, _copied={})

    @property
    def home(self) -> torch.device:
        """The device that shards live on."""
        return torch.device("cpu") if self.enabled else self.device

    def place(self, shard: torch.Tensor) -> torch.Tensor:
        """``shard`` where it belongs; shards on the meta device stay there."""
        if not self.enabled or shard.is_meta:
            return shard
        shard = shard.to(self.home)
        return shard.pin_memory() if self.pin_memory and not shard.is_pinned() else shard

    def grad_to_host(self, grad: torch.Tensor, sharded: nn.Parameter) -> torch.Tensor:
        """Start the copy of a reduced gradient to the host; :meth:`wait` ends it.

        The copy is awaited at once where a hook on ``sharded`` reads the gradient at once.
        """
        if not self.enabled:
            return grad
        overlap = self.pin_memory and not autograd.has_post_accumulate_hooks(sharded)
        host = torch.empty_like(grad, device="cpu", pin_memory=self.pin_memory)
        # The source may be freed right after: its memory is reused on this stream only, behind
        # the copy.
        host.copy_(grad, non_blocking=overlap)
        if overlap:
            stream = torch.accelerator.current_stream()
            self._copied[stream] = stream.record_event()
        return host

    def wait(self) -> None:
        """Block until gradients that are on their way have arrived on the host."""
        while self._copied:
            self._copied.popitem()[1].synchronize()
