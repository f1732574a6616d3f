"""Models on random meshes, filled with values that follow from names alone.

So any rank of any world can tell whether what it loaded is right.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise import fully_shard
from tests.corpus.gathering import wholes
from tests.corpus.models import MODELS, make_model

NAMES = ("mlp", "conv", "frozen", "scalars", "shared", "llama-tied", "unused")


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a model lies over a world.

    Attributes:
        model: one of :data:`tests.corpus.models.MODELS`.
        shape: of the mesh; ``None`` for a model that is not sharded.
        reshard: ``reshard_after_forward``.
        last_dim: whether matrices are cut along their last dimension.
    """

    model: str
    shape: tuple[int, ...] | None
    reshard: bool = True
    last_dim: bool = False


def random_setup(draw: random.Random, world_size: int, model: str) -> Setup:
    """ZeRO-0, 2 or 3, hybrid, or not sharded at all."""
    shapes: list[tuple[int, ...] | None] = [None, (world_size,), (world_size,), (world_size, 1)]
    shapes += [(n, world_size // n) for n in range(2, world_size) if world_size % n == 0]
    return Setup(model, draw.choice(shapes), draw.random() < 0.5, draw.random() < 0.3)


def build(setup: Setup, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, sharded, and an optimizer without state."""
    model = make_model(setup.model, seed=seed)
    if setup.shape is not None:
        names = ("replicate", "shard")[-len(setup.shape) :]
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", setup.shape, mesh_dim_names=names),
            "reshard_after_forward": setup.reshard,
        }
        if setup.last_dim:
            options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None
        for block in MODELS[setup.model].blocks(model):
            fully_shard(block, **options)
        fully_shard(model, **options)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "lr": 0.5}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW([group for group in groups if group["params"]], fused=True)


def filled(setup: Setup) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, sharded, and an optimizer, with everything that its name asks for."""
    model, optimizer = build(setup, seed=0)
    give_state(optimizer)
    fill(model, optimizer)
    return model, optimizer


def give_state(optimizer: torch.optim.Optimizer) -> None:
    """Take a step, in which frozen parameters take no part."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = param.detach().clone() if param.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Overwrite everything by what its name asks for."""
    with torch.no_grad():
        for name, tensor in named(model, optimizer).items():
            tensor.copy_(like(tensor, expected(name, tensor)))


def wrong(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of all that is not what its name asks for."""
    every = named(model, optimizer)
    found = zip(wholes(every.values()), every.items(), strict=True)
    return [name for whole, (name, t) in found if not torch.equal(whole, expected(name, t))]


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a model and its optimizer; what is tied, once."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name} {key}"] = value
    return found


def expected(name: str, tensor: Tensor) -> Tensor:
    """The whole tensor that a name asks for; positive, as counts and squares are."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) + 1


def like(tensor: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor, sharded as another one is."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
