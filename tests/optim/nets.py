"""Parameters for optimizers, on any mesh, and gradients that are the same in any world."""

from __future__ import annotations

import copy
import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import FSDPModule, fully_shard, init_mesh
from shardwise._torch import dtensor
from shardwise.optim import Muon, muon_groups
from shardwise.sharding.part import placed, take

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Wide, tall and square matrices, whose rows few world sizes divide, and a stack of three."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)
        self.square = nn.Linear(5, 5, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 7, 4))
        self.norm = nn.LayerNorm(6)
        for name, param in self.named_parameters():
            nn.init.normal_(param, generator=_generator(name, 0))


class OneByOne(torch.optim.Optimizer):
    """Updates one parameter after the other; ``settings`` are those of its groups."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)

    def update(self, param: Any, grad: torch.Tensor, state: dict[str, Any], group: Any) -> None:
        """Update a parameter and its state."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How the net lies over ranks.

    Attributes:
        sizes: of the mesh, by dimension; a dimension ``tp`` cuts ``up`` and ``down``.
        dim: the dimension that is sharded.
    """

    sizes: dict[str, int]
    dim: int = 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    def build(self, dtype: torch.dtype = torch.float32) -> Net:
        """Make the net, sharded. All ranks call it."""
        net = Net().to(dtype)
        mesh = init_mesh(device_type="cpu", **self.sizes)
        names = [name for name in self.sizes if name != "tp"]
        if "tp" in self.sizes:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(net, mesh["tp"], plan)
        data: DeviceMesh = mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]
        dim = self.dim
        fully_shard(net, mesh=data, shard_placement_fn=lambda p: Shard(dim if p.ndim > dim else 0))
        return net


def make_muon(net: nn.Module, **settings: Any) -> Muon:
    """Make Muon for the hidden matrices of a net, and AdamW for the rest."""
    return Muon(muon_groups(net, adamw={"lr": 0.02}), lr=0.1, **settings)


def set_gradients(
    net: nn.Module, step: int, has: Callable[[str], bool] = lambda name: True
) -> None:
    """Give each parameter the gradient of a step: this rank's part of what one process has."""
    for name, param in net.named_parameters():
        grad = torch.randn(param.shape, generator=_generator(name, step)).to(param.dtype)
        param.grad = part_of(grad, param) if has(name) else None


def part_of(full: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor, placed as a parameter is."""
    if not isinstance(param, DTensor):
        return full.clone()
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None
    part = placed(full.shape, param.placements, param.device_mesh.shape, coordinate)
    return dtensor.wrap_local(take(full, part).contiguous(), dtensor.spec_of(param))


Set = Callable[[FSDPModule, bool], None]


def _sharded_gradients(net: FSDPModule, is_last: bool) -> None:
    net.set_is_last_backward(is_last)


def _full_gradients(net: FSDPModule, is_last: bool) -> None:
    net.set_requires_gradient_sync(is_last)


#: What a program calls before each backward, where the gradients of several are added up.
ACCUMULATIONS: tuple[Set, ...] = (_sharded_gradients, _full_gradients)


def train_on_microbatches(
    rank: int, world_size: int, make: Make, reference: Make, tell: Set
) -> None:
    """Train on two microbatches a step; compare with one process that has those of all ranks.

    Args:
        rank: this rank.
        world_size: the number of ranks.
        make: makes the optimizer of the sharded net.
        reference: makes that of the whole one.
        tell: says which backward is the last of a step.
    """
    mine = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5))
    for name, param in mine.named_parameters():
        nn.init.normal_(param, generator=_generator(name, 0))
    whole = copy.deepcopy(mine)
    fully_shard(mine)
    assert isinstance(mine, FSDPModule)
    optimizer, other = make(mine), reference(whole)
    for step in range(2):
        for micro in range(2):
            of_ranks = [
                torch.randn(3, 6, generator=_generator(f"{step}, {micro}", each))
                for each in range(world_size)
            ]
            tell(mine, micro == 1)
            mine(of_ranks[rank]).square().mean().backward()
            for batch in of_ranks:
                (whole(batch).square().mean() / world_size).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        for name, param in mine.named_parameters():
            wanted = part_of(whole.get_parameter(name).detach(), param)
            torch.testing.assert_close(dtensor.plain(param.detach()), dtensor.plain(wanted))


def _generator(name: str, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
