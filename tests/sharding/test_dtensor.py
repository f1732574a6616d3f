"""``dp_mesh_dims``: parameters that are ``DTensor``s on one mesh are sharded on top of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from shardwise import DataParallelMeshDims, FSDPModule
from tests.corpus.models import EvenBlock
from tests.sharding.nets import (
    assert_same_gradients,
    assert_same_values,
    average_backward,
    batches,
    loss_of,
    seeded,
    shard_blocks,
)
from tests.worlds import on_threads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EvenBlock() for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("shape", "names", "dims"),
    [
        ((2, 2), "dp tp", {"shard": "dp"}),
        ((2, 2), "dp tp", {"replicate": "dp"}),
        ((2, 2), "a b", {"shard": "b", "replicate": "a"}),
        ((2, 2), "a b", {"shard": ("a", "b")}),
    ],
    ids=["shard", "replicate", "hybrid", "two that shard"],
)
@on_threads(4)
def test_data_parallel_dimensions_of_one_mesh(
    rank: int, world_size: int, shape: tuple[int, ...], names: str, dims: dict[str, Any]
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split()))

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            placements: list[Any] = [Replicate()] * mesh.ndim
            if name.endswith("up") and "tp" in names:
                placements[names.split().index("tp")] = Shard(0)
            whole = distribute_tensor(param.detach(), mesh, placements)
            module.register_parameter(key, nn.Parameter(whole))

    net, whole = seeded(Net), seeded(Net)
    distribute_module(net, mesh, place)
    given = DataParallelMeshDims(**dims)
    shard_blocks(net, mesh=mesh, dp_mesh_dims=given)
    assert_same_values(net, whole)
    for name, param in net.named_parameters():
        assert isinstance(param, DTensor), name
        is_cut = param.to_local().shape[0] < param.shape[0]
        by_tensor_parallelism = "tp" in names and ".up." in name
        assert is_cut == (bool(given.shard_names) or by_tensor_parallelism), name

    # The global batch is a DTensor, cut over the data parallel dimensions: what ranks have of a
    # gradient are parts of a sum, not of a mean.
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    cuts = [*given.shard_names, *given.replicate_names]
    placements = [Shard(0) if name in cuts else Replicate() for name in names.split()]
    for step in range(2):
        x = batches(1, step, rows=8)
        loss_of(net, distribute_tensor(x[0], mesh, placements)).backward()
        average_backward(whole, x)
    assert_same_gradients(net, whole)
