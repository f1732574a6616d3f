"""``relayout``: what a model and its optimizer hold after it is what a checkpoint would bring."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise import checkpoint, fully_shard, optim, relayout
from shardwise._torch import dtensor
from shardwise.base.boxes import Box, narrow
from shardwise.base.errors import CheckpointError, PeerLostError
from shardwise.checkpoint.ranks import moving
from shardwise.checkpoint.ranks.rows import RowExchange
from shardwise.checkpoint.ranks.state import state_of
from shardwise.sharding.param import forms_of
from shardwise.transport.peers import new_group
from tests.checkpoint.meshes import NAMES, expected, fill, give_state, named
from tests.corpus.models import MODELS, make_model
from tests.harness import run_ranks
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


def _move_along(
    rank: int, world_size: int, name: str, meshes: list[DeviceMesh], options: dict[str, Any]
) -> list[str]:
    """Go from layout to layout, and say what is wrong in any of them."""
    member = meshes[0].get_coordinate() is not None
    model, optimizer = _build(name, meshes[0] if member else _alone(), seed=rank, **options)
    for form in [] if member else forms_of(model.parameters()):
        form.leave()  # buffers that nothing saves stay
    params = list(model.parameters())
    if member:
        give_state(optimizer)
        fill(model, optimizer)
    found = []
    for mesh in meshes[1:]:
        relayout(model, optimizer, mesh=mesh)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        if mesh.get_coordinate() is not None:
            found += [f"{name} on {mesh}: {each}" for each in _wrong(model, optimizer)]
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
    group = new_group([dist.get_rank()])
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))


SHAPES: list[Shape] = [(2,), (4,), (3,), (2, 2), (4, 1), (1, 2), (4,)]


def _through(rank: int, world_size: int, name: str, shapes: Sequence[Shape]) -> list[str]:
    return _move_along(rank, world_size, name, [_mesh(shape) for shape in shapes], {})


@pytest.mark.parametrize("name", NAMES)
def test_any_layout_becomes_any_other(threads: Ranks, name: str) -> None:
    shapes = SHAPES if name == NAMES[0] else SHAPES[::2]  # random chains have the others
    for found in threads(_through, 4, name, shapes):
        assert not found, "\n".join(found)


def test_any_layout_becomes_any_other_in_processes(ranks: Ranks) -> None:
    for found in ranks(_through, 4, "shared", SHAPES[:4]):
        assert not found, "\n".join(found)


def _random_chain(rank: int, world_size: int, seed: int) -> list[str]:
    """Go along a random chain of layouts over any of the ranks."""
    draw = random.Random(seed)
    name = draw.choice(NAMES)
    meshes = []
    for _ in range(4):
        shape = draw.choice([(1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (1, 4), (3, 1)])
        ranks = sorted(draw.sample(range(world_size), torch.Size(shape).numel()))
        names = ("replicate", "shard")[-len(shape) :]
        meshes.append(DeviceMesh("cpu", torch.tensor(ranks).view(shape), mesh_dim_names=names))
    options: dict[str, Any] = {"reshard_after_forward": draw.random() < 0.5}
    if draw.random() < 0.3:
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None
    return _move_along(rank, world_size, name, meshes, options)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.long if n > 5 else ()) for n in range(60)]
)
def test_random_chains_of_layouts(threads: Ranks, seed: int) -> None:
    for found in threads(_random_chain, 4, seed):
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
def test_training_goes_on_as_from_a_checkpoint(threads: Ranks, name: str, tmp_path: Path) -> None:
    threads(_goes_on_alike, 4, name, tmp_path)


def _live_bytes() -> int:
    """The bytes of all tensors that Python knows on this rank; what shares memory counts once."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(each.nbytes() for pointer, each in storages.items() if pointer)


def _peak_beside(
    rank: int, world_size: int, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> float:
    """The largest size of what this rank holds, over that of the larger of its layouts."""
    first, second = _mesh((before,)), _mesh((after,))
    monkeypatch.setattr(moving, "_AT_ONCE", 1 << 14)
    gc.collect()
    idle = _live_bytes()
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    mine = first if first.get_coordinate() is not None else _alone()
    for layer in model:
        fully_shard(layer, mesh=mine)
    fully_shard(model, mesh=mine)
    optimizer = torch.optim.AdamW(model.parameters())
    if mine is first:
        model(torch.ones(1, 64)).sum().backward()  # full parameters may share memory with shards
        optimizer.step()
        optimizer.zero_grad()
    else:
        model.to("meta")
    gc.collect()
    whole = 3 * 8 * 64 * 64 * 4
    layouts = [whole // ranks if rank < ranks else 0 for ranks in (before, after)]
    seen: list[int] = []
    opened = moving._Arrivals.open

    def look(self: Any, entry: Any) -> Any:
        found = opened(self, entry)
        seen.append(_live_bytes() - 4 * moving._AT_ONCE)  # apart from the buffers of messages
        return found

    monkeypatch.setattr(moving._Arrivals, "open", look)
    relayout(model, optimizer, mesh=second)
    return (max(seen) - idle) / max(layouts) if seen else 0.0


def _peaks(rank: int, world_size: int) -> list[float]:
    found = []
    for before, after in ((1, 2), (4, 2), (3, 4)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            found.append(_peak_beside(rank, world_size, before, after, monkeypatch))
    return found


@pytest.mark.usefixtures("new_ranks")
def test_a_rank_holds_little_beside_the_larger_of_its_layouts(ranks: Ranks) -> None:
    for found in ranks(_peaks, 4):
        assert max(found) < 1.1, found


def _loses_a_rank(rank: int, world_size: int, moment: str) -> str:
    model, mesh = _sharded(_mesh((3,)), seed=0), _mesh((2,))

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        of = moving._Migration if hasattr(moving._Migration, moment) else RowExchange
        setattr(of, moment, die)
    with pytest.raises(CheckpointError) as error:
        relayout(model, mesh=mesh)
    assert isinstance(error.value.__cause__, PeerLostError)
    return str(error.value)


@pytest.mark.parametrize("moment", ["run", "send", "_into", "check"])
def test_a_rank_that_is_killed_in_the_middle_is_named(moment: str) -> None:
    found = run_ranks(_loses_a_rank, 3, moment, pg_timeout=600, expect_failures=True)
    assert found[1].exitcode == -signal.SIGKILL
    for each in (found[0], found[2]):
        assert each.ok, each.error
    assert re.search(r"\branks? 1\b", found[0].result)


def _hands_over(rank: int, world_size: int, name: str, leaving: set[int]) -> list[str]:
    """Have some ranks hand their rows over, and train with the others; say what is wrong then."""
    stay = [each for each in range(world_size) if each not in leaving]
    mesh, fewer = _mesh((world_size,)), DeviceMesh("cpu", stay, mesh_dim_names=("shard",))
    group = dist.new_group(stay)
    model, optimizer = _build(name, mesh, seed=0)
    give_state(optimizer)
    fill(model, optimizer)
    departure = moving.Departure((model, optimizer), {f"rank{rank}": {"position": rank}})
    moving.hand_over(departure, leaving)
    if rank in leaving:
        return []
    target, its = _build(name, fewer, seed=1)
    extra = checkpoint.transfer(departure, (target, its), group=group)
    assert extra == {f"rank{each}": {"position": each} for each in range(world_size)}
    return [f"{name} without {leaving}: {each}" for each in _wrong(target, its)]


@pytest.mark.parametrize("leaving", [{0}, {1}, {2}, {0, 1}, {1, 2}])
def test_ranks_that_leave_hand_over_what_only_they_have(threads: Ranks, leaving: set[int]) -> None:
    for name in ("mlp", "scalars", "shared"):
        for found in threads(_hands_over, 3, name, leaving):
            assert not found, "\n".join(found)
