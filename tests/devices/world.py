"""Ranks that compute on the device of :mod:`tests.devices.device`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

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
