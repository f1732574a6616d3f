"""Which composition of messages a ``torch.distributed`` process group gets."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.transport.base import Transport
from shardwise.transport.collectives import CollectivesTransport
from shardwise.transport.gloo import GlooTransport
from shardwise.transport.nccl import NcclTransport


def c10d_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Make the fastest transport that is known for the backend.

    Args:
        group: the process group of a mesh dimension.
        device: where the full tensors live. Of a group with several backends, such as
            ``"cpu:gloo,cuda:nccl"``, the one for this device's type counts.
    """
    backend = backend_name(group, device)
    if backend == "gloo" and device.type == "cpu":
        return GlooTransport(group)
    if backend == "nccl" and device.type == "cuda":
        return NcclTransport(group)
    return CollectivesTransport(group, backend)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name the backend of ``group`` that serves tensors on ``device``.

    Raises:
        ValueError: the group has no backend for that type of device.
    """
    config = dist.get_backend_config(group)
    by_device = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    if not by_device:
        return config
    if device.type not in by_device:
        raise ValueError(
            f"the process group has backends for {', '.join(by_device)} ({config}), none for "
            f"{device.type}: name one in init_process_group, such as "
            f'"cpu:gloo,{device.type}:<backend>"'
        )
    return by_device[device.type]
