"""What a ``DeviceMesh`` means to sharding: over which ranks to shard, over which to replicate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise.transport.base import Transport
from shardwise.transport.select import select_transport


@dataclass(frozen=True)
class DataMesh:
    """A data parallel mesh: its last dimension shards, the one before it (if any) replicates.

    Attributes:
        mesh: 1-D ``(shard,)`` or 2-D ``(replicate, shard)``.
        shard: transport over the ranks that parameters are sharded on.
        replicate: transport over the ranks that hold the same shard; ``None`` on a 1-D mesh.
        device: where this rank computes.
    """

    mesh: DeviceMesh
    shard: Transport
    replicate: Transport | None
    device: torch.device

    @classmethod
    def of(cls, mesh: DeviceMesh, transport: str | None = None) -> DataMesh:
        """Read a mesh and choose the transport of each of its dimensions.

        Raises:
            ValueError: the mesh is neither 1-D nor 2-D, or this rank is not part of it.
        """
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard expects a 1-D (shard) or 2-D (replicate, shard) DeviceMesh, found "
                f"{mesh.ndim} dimensions: {mesh}. Pass the data parallel part of it, for example "
                'mesh["dp"]'
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not part of {mesh}; call fully_shard only on the ranks "
                "of the mesh"
            )
        device = device_of(mesh)
        return cls(
            mesh=mesh,
            shard=select_transport(mesh.get_group(mesh.ndim - 1), device, transport),
            replicate=(
                select_transport(mesh.get_group(0), device, transport) if mesh.ndim == 2 else None
            ),
            device=device,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks that gradients are averaged over."""
        return self.shard.world_size * (self.replicate.world_size if self.replicate else 1)

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """Placements of a parameter that is cut along ``dim`` (``None``: not cut)."""
        last: Placement = Replicate() if dim is None else Shard(dim)
        return (Replicate(), last) if self.replicate is not None else (last,)


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over all ranks, on the accelerator where there is one, else on CPUs."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank computes under ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
