"""A model that torch's own FSDP2 shards, in each way that the page promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HIDDEN, BLOCKS = 32, 48, 3


@dataclass(frozen=True)
class Way:
    """How torch's FSDP2 shards the model.

    Attributes:
        shape: of the mesh.
        names: of its dimensions.
        reshard: whether blocks are freed after forward.
        param_dtype: of forward and backward.
    """

    shape: tuple[int, ...] = (2,)
    names: tuple[str, ...] = ("shard",)
    reshard: bool = True
    param_dtype: torch.dtype | None = None


WAYS = {
    "ZeRO-3": Way(),
    "ZeRO-2": Way(reshard=False),
    "bf16": Way(param_dtype=torch.bfloat16),
    "hybrid": Way((2, 2), ("replicate", "shard")),
    "tensor parallel": Way((2, 2), ("shard", "tp")),
}


class Block(nn.Module):
    """Two linear layers beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make(seed: int = 0) -> Any:
    """Build the model, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 8))


def mesh_of(way: Way) -> DeviceMesh:
    """Make the mesh."""
    return init_device_mesh("cpu", way.shape, mesh_dim_names=way.names)


def shard(way: Way, seed: int = 0, with_: Any = fully_shard) -> Any:
    """Build the model, and shard it."""
    model, mesh = make(seed), mesh_of(way)
    if "tp" in way.names:
        for block in model[:BLOCKS]:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        mesh = mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=way.param_dtype, reduce_dtype=torch.float32)
    for block in model[:BLOCKS]:
        with_(block, mesh=mesh, reshard_after_forward=way.reshard, mp_policy=policy)
    with_(model, mesh=mesh, mp_policy=policy)
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    """What a rank sees in a step; two ranks that divide a model by tensor parallelism the same."""
    rank = rank // 2 if dist.get_world_size() == 4 else rank
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    """Take steps; return the losses."""
    losses = []
    for step in steps:
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather all parameters."""
    found: Any = model.named_parameters()
    return {name: param.detach().full_tensor().clone() for name, param in found}
