"""Ranks that compute on the device of :mod:`tests.devices.device`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.base import devices
from tests.devices.device import NAME, register
from tests.devices.process_group import PretendGroup, register_backend
from tests.harness import run_ranks


def run_on_device(check: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run ``check(rank, world_size, *args)`` on ranks that each have a device of their own."""
    return run_ranks(_enter, world_size, check, *args, backend=None)


def _enter(rank: int, world_size: int, check: Callable[..., Any], *args: Any) -> Any:
    register()
    register_backend()
    dist.init_process_group(devices.backends_for(torch.device(NAME)))
    return check(rank, world_size, *args)


def calls() -> list[str]:
    """The collectives of the default group so far, on tensors of the device."""
    group = dist.group.WORLD
    assert isinstance(group, PretendGroup)
    return group.calls


class Block(nn.Module):
    """A residual block of uneven sizes, with a buffer and a scalar."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.empty(()))
        self.register_buffer("shift", torch.empty(5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.5)
        self.shift.fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x)).tanh()
        out: torch.Tensor = x + self.gain * self.down(hidden) + self.shift.to(x.dtype)
        return out


def model() -> nn.Sequential:
    """Two blocks and a head, on the CPU, with the same values on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(5, 3, bias=False))


def batch(step: int, rank: int) -> torch.Tensor:
    """What a rank trains on, on the CPU."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator)


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that needs every parameter."""
    loss: torch.Tensor = net(x).square().mean()
    return loss
