"""Replicas as ranks: a model sharded inside each replica, and DiLoCo across them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import FullyShardedDataParallel, fully_shard
from shardwise.diloco import DiLoCo
from tests.corpus.gathering import in_full, own_part
from tests.diloco.reference import ROWS, adamw_of, batch_of
from tests.sharding.nets import Net, loss_of, seeded

Values = dict[str, torch.Tensor]


def two_replicas() -> DeviceMesh:
    """Return a mesh (replicate, shard) of two replicas over all ranks."""
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh | None, seed: int = 0) -> nn.Module:
    """Return ``Net``, sharded block by block, or not sharded without a mesh."""
    net = seeded(Net, seed)
    if mesh is not None:
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


class Replica:
    """One rank of one replica.

    Args:
        mesh: (replicate, shard).
        wrapped: sharded by the wrapper, not by the function.
        inner_of: makes the inner optimizer of the sharded model.
        settings: of DiLoCo.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        wrapped: bool = False,
        inner_of: Callable[[nn.Module], torch.optim.Optimizer] = adamw_of,
        **settings: Any,
    ) -> None:
        self.number, self.part = mesh.get_coordinate()
        self.parts = mesh.size(1)
        self.model = (
            FullyShardedDataParallel(sharded(None), device_mesh=mesh["shard"])
            if wrapped
            else sharded(mesh["shard"])
        )
        self.inner = inner_of(self.model)
        self.diloco = DiLoCo(self.model, self.inner, group=mesh["replicate"], **settings)

    def train(self, first: int, last: int) -> None:
        """Take inner steps ``first`` .. ``last``, both included."""
        for step in range(first, last + 1):
            rows = ROWS // self.parts
            batch = batch_of(self.number, step)[self.part * rows :][:rows]
            loss_of(self.model, batch).backward()
            self.diloco.step()
            self.diloco.zero_grad()

    def inner_values(self) -> Values:
        """Return the full inner parameters of this replica."""
        return whole(self.model)

    def outer_values(self) -> Values:
        """Return the full outer parameters."""
        with self.diloco.outer_parameters():
            return whole(self.model)

    def outer_bits(self) -> list[torch.Tensor]:
        """Return this rank's part of the outer state."""
        packed = self.diloco.state_dict()["state"].values()
        found = [each["diloco"][name] for each in packed for name in ("outer", "momentum")]
        return [own_part(each) for each in found]

    def errors(self) -> Values:
        """Return what encoding has lost, in full, by parameter; nothing without error feedback."""
        names = [name for name, _ in self.model.named_parameters()]
        packed = [self.diloco.state_dict()["state"][i]["diloco"] for i in range(len(names))]
        return {
            name: in_full(each["error"]).clone()
            for name, each in zip(names, packed, strict=True)
            if "error" in each
        }


def whole(model: nn.Module) -> Values:
    """Return copies of all parameters, unsharded."""
    return {name: in_full(each).detach().clone() for name, each in model.named_parameters()}


def equal_everywhere(tensors: list[torch.Tensor], mesh: DeviceMesh) -> bool:
    """Whether all replicas have the same bits."""
    found: list[Any] = [None] * mesh.size(0)
    dist.all_gather_object(found, tensors, group=mesh.get_group("replicate"))
    return all(
        torch.equal(mine, theirs)
        for other in found
        for mine, theirs in zip(tensors, other, strict=True)
    )


def assert_values(found: Values, expected: nn.Module, what: str, tolerance: float = 1e-5) -> None:
    """Compare with a model of the reference, by name."""
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(
            found[name],
            parameter.detach(),
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, name=name: f"{what}, {name}: {text}",
        )
