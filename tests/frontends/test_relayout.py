"""``relayout``: what a model and its optimizer hold after it is what a checkpoint would bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import checkpoint, fully_shard, optim, relayout
from shardwise._torch import dtensor
from shardwise.checkpoint.disk.boxes import Box
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.ranks.state import state_of
from tests.checkpoint.meshes import NAMES, expected, fill, give_state, named
from tests.corpus.models import MODELS, make_model
from tests.worlds import Ranks

Shape = tuple[int, ...]


def _mesh(shape: Shape, first: int = 0) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    ranks = torch.arange(torch.Size(shape).numel()).view(shape) + first
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def _build(
    name: str, mesh: DeviceMesh, seed: int, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, on ranks of ``mesh`` sharded over it, on others over all."""
    model = make_model(name, seed=seed)
    for block in MODELS[name].blocks(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def _move_along(rank: int, world_size: int, name: str, shapes: list[Shape]) -> list[str]:
    """Go from layout to layout, and say what is wrong in any of them."""
    meshes = [_mesh(shape) for shape in shapes]
    member = meshes[0].get_coordinate() is not None
    model, optimizer = _build(name, meshes[0] if member else _alone(), seed=rank)
    if not member:
        model.to("meta")
    params = list(model.parameters())
    if member:
        give_state(optimizer)
        fill(model, optimizer)
    found = []
    for shape, mesh in zip(shapes[1:], meshes[1:], strict=True):
        relayout(model, optimizer, mesh=mesh)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        if mesh.get_coordinate() is not None:
            found += [f"{name} on {shape}: {each}" for each in _wrong(model, optimizer)]
            for param in params:
                assert isinstance(param, DTensor)
                assert param.device_mesh == mesh
        else:
            assert all(dtensor.local_of(param).is_meta for param in params)
    return found


def _wrong(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of all whose part on this rank is not what its name asks for."""
    return [
        name
        for name, tensor in named(model, optimizer).items()
        if not torch.equal(dtensor.plain(tensor), part_of(tensor, expected(name, tensor)))
    ]


def part_of(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank has of a tensor."""
    return narrow(whole, Box(*dtensor.chunk_of(tensor)))


def _alone() -> DeviceMesh:
    """A mesh of this rank, which joins later."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))


@pytest.mark.parametrize("name", NAMES)
def test_any_layout_becomes_any_other(ranks: Ranks, name: str) -> None:
    shapes: list[Shape] = [(2,), (4,), (3,), (2, 2), (4, 1), (1, 2), (4,)]
    for found in ranks(_move_along, 4, name, shapes):
        assert not found, "\n".join(found)


Optimizers = dict[str, Callable[[nn.Module, str], torch.optim.Optimizer]]

OPTIMIZERS: Optimizers = {
    "AdamW": lambda model, _: torch.optim.AdamW(model.parameters()),
    "SGD": lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW8bit": lambda model, _: optim.AdamW8bit(model.parameters()),
    "Lion": lambda model, _: optim.Lion(model.parameters()),
    "Adafactor": lambda model, _: optim.Adafactor(model.parameters()),
    "Muon": lambda model, _: optim.Muon(optim.muon_groups(model)),
    "on a disk": lambda model, folder: optim.offload(
        torch.optim.AdamW(model.parameters()), f"disk:{folder}"
    ),
    "8 bits on a disk": lambda model, folder: optim.offload(
        optim.AdamW8bit(model.parameters()), f"disk:{folder}"
    ),
    "in backward": lambda model, _: optim.in_backward(model, torch.optim.AdamW),
}


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _sharded(mesh: DeviceMesh, seed: int, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 150), nn.Linear(150, 32)) for _ in range(2))
    )
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _goes_on_alike(rank: int, world_size: int, name: str, folder: Path) -> None:
    first, second = _mesh((2,)), _mesh((4,))
    make = OPTIMIZERS[name]
    model = _sharded(first, seed=rank) if rank < 2 else _sharded(_alone(), seed=rank).to("meta")
    optimizer = make(model, str(folder))
    pair = dist.new_group([0, 1])
    if rank < 2:
        _steps(model, optimizer, 2)
        checkpoint.save(folder / "saved", model, optimizer, group=pair)
    relayout(model, optimizer, mesh=second)
    other = _sharded(second, seed=9)
    its = make(other, str(folder))
    checkpoint.load(folder / "saved", other, its)
    for steps in (0, 2):
        _steps(model, optimizer, steps)
        _steps(other, its, steps)
        _assert_alike(model, optimizer, other, its)


def _assert_alike(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    other: nn.Module,
    its: torch.optim.Optimizer,
) -> None:
    mine, theirs = (state_of(*each, None) for each in ((model, optimizer), (other, its)))
    assert mine.tensors.keys() == theirs.tensors.keys()
    for name, tensor in mine.tensors.items():
        assert mine.origins[name] == theirs.origins[name], name
        assert torch.equal(dtensor.plain(tensor), dtensor.plain(theirs.tensors[name])), name
    assert mine.values == theirs.values


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_from_a_checkpoint(ranks: Ranks, name: str, tmp_path: Path) -> None:
    ranks(_goes_on_alike, 4, name, tmp_path)
