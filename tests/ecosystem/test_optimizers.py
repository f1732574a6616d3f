"""Optimizers of torch and of others on sharded parameters: they train as on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import shardwise
from shardwise import checkpoint
from shardwise._torch import dtensor
from tests.ecosystem.llama import full
from tests.worlds import Ranks, on_processes

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Shard = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs

STEPS = 3
WIDTH, HIDDEN = 64, 128  # 8192 values: torchao quantizes the state of 4096 and more, on each rank


class Mlp(nn.Module):
    """Two matrices, whose rows two ranks divide evenly, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def _make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Mlp()


def _sharded(shard: Shard = shardwise.fully_shard, seed: int = 0) -> nn.Module:
    model = _make(seed)
    shard(model.up)
    shard(model.down)
    shard(model)
    return model


def _batch(step: int) -> torch.Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))


def _train(model: nn.Module, optimizer: Any, steps: Iterable[int], rank: int | None) -> None:
    """Train on a rank's batches, or on those of both."""
    for step in steps:
        for x in _batch(step) if rank is None else _batch(step)[rank : rank + 1]:
            (model(x).square().mean() / (2 if rank is None else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_equal(found: nn.Module, wanted: nn.Module, what: str, error: float = 1e-5) -> None:
    """Compare parameters as a whole: the norm of the difference, as a share of the norm."""
    for name, param in wanted.named_parameters():
        difference = full(found.get_parameter(name)) - full(param)
        off = (difference.norm() / full(param).norm()).item()
        assert off <= error, f"{what}: {name} differs by {off:.2e} of its norm"


def _assert_trains_alike(
    rank: int, make: MakeOptimizer, what: str, folder: Path | None, error: float = 1e-5
) -> None:
    """Train sharded and on one process; if there is a folder, go on from a checkpoint as well."""
    model, twin = _sharded(), _make()
    optimizer, its_optimizer = make(model), make(twin)
    _train(model, optimizer, range(STEPS), rank)
    _train(twin, its_optimizer, range(STEPS), None)
    _assert_equal(model, twin, what, error)
    if folder is not None:
        checkpoint.save(folder / what, model, optimizer)
        model = _sharded(seed=1)
        optimizer = make(model)
        checkpoint.load(folder / what, model, optimizer)
        _train(model, optimizer, [STEPS], rank)
        _train(twin, its_optimizer, [STEPS], None)
        _assert_equal(model, twin, f"{what}, from a checkpoint", error)


def _matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


@on_processes(2)
def test_torchs_optimizers(rank: int, world_size: int, tmp_path: Path) -> None:
    def adam(**how: Any) -> MakeOptimizer:
        return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, **how)

    def sgd(**how: Any) -> MakeOptimizer:
        return lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, **how)

    _assert_trains_alike(rank, adam(foreach=True), "adamw-foreach", tmp_path)
    _assert_trains_alike(rank, adam(fused=True), "adamw-fused", tmp_path)
    _assert_trains_alike(rank, sgd(foreach=True), "sgd-foreach", tmp_path)
    _assert_trains_alike(rank, sgd(fused=True), "sgd-fused", tmp_path)
    if hasattr(torch.optim, "Muon"):
        # Its matrix products are in bfloat16, over two ranks in another order than on one.
        _assert_trains_alike(
            rank,
            lambda model: torch.optim.Muon(_matrices_and_others(model)[0], lr=1e-2),
            "muon",
            tmp_path,
            error=2e-2,
        )


def _torchaos(model: nn.Module, name: str) -> torch.optim.Optimizer:
    import torchao.optim

    made: torch.optim.Optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
    return made


def _eight_bits(rank: int, world_size: int, folder: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return _torchaos(model, "AdamW8bit")

    torch.compiler.set_stance("force_eager")  # the same step, without a minute of compiling
    _assert_trains_alike(rank, make, "adamw-8bit", None)
    model = _sharded()
    optimizer = make(model)
    _train(model, optimizer, range(1), rank)
    state = optimizer.state[model.up.weight]["exp_avg"]
    assert type(state.to_local()).__name__ == "OptimState8bit"

    # Each rank can keep its own, as it can with torch's FSDP2.
    model_file, optimizer_file = (folder / f"{name}-{rank}.pt" for name in ("model", "optimizer"))
    torch.save(model.state_dict(), model_file)
    torch.save(optimizer.state_dict(), optimizer_file)
    other = _sharded(seed=1)
    its_optimizer = make(other)
    other.load_state_dict(torch.load(model_file))
    its_optimizer.load_state_dict(torch.load(optimizer_file))
    for each, steps in ((model, optimizer), (other, its_optimizer)):
        _train(each, steps, [1], rank)
    _assert_equal(other, model, "adamw-8bit, from files", error=0.0)


def test_torchaos_adamw_with_states_of_eight_bits(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs torchao: install .[ecosystem]")
    ranks(_eight_bits, 2, tmp_path)


LOW_BITS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def _shards(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's shards of the moments."""
    return {
        f"{name}.{key}": dtensor.plain(optimizer.state[param][key])
        for name, param in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }


def _values(shards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the moments of all ranks stand for, by rank."""
    return {name: torch.empty(each.shape).copy_(each) for name, each in shards.items()}


def _gathered(values: dict[str, torch.Tensor], world_size: int) -> dict[str, torch.Tensor]:
    """The values of all ranks, whole."""
    parts: list[Any] = [values] * world_size
    if world_size > 1:
        torch.distributed.all_gather_object(parts, values)
    return {name: torch.cat([part[name] for part in parts]) for name in values}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two shards consist of the same tensors."""
    flat, its = dtensor.flatten(one), dtensor.flatten(other)
    if flat is None or its is None:
        return flat is its and torch.equal(one, other)
    return type(one) is type(other) and all(
        torch.equal(part.view(torch.uint8), its[0][name].view(torch.uint8))
        for name, part in flat[0].items()
    )


def _saves_low_bits(rank: int, world_size: int, folder: Path) -> None:
    torch.compiler.set_stance("force_eager")
    for name in LOW_BITS:
        model = _sharded()
        optimizer = _torchaos(model, name)
        _train(model, optimizer, range(2), rank)
        checkpoint.save(folder / name, model, optimizer)
        saved = _shards(optimizer, model)
        meant = _gathered(_values(saved), world_size)
        if rank == 0:
            torch.save(meant, folder / f"{name}.pt")
        other = _sharded(seed=1)
        its_optimizer = _torchaos(other, name)
        checkpoint.load(folder / name, other, its_optimizer)
        for key, shard in _shards(its_optimizer, other).items():
            assert _same_bits(shard, saved[key]), f"{name}: {key}"
        for each, steps in ((model, optimizer), (other, its_optimizer)):
            _train(each, steps, [2], rank)
        _assert_equal(other, model, f"{name}, from a checkpoint", error=0.0)


def _loads_low_bits(rank: int, world_size: int, folder: Path, kinds: dict[str, str]) -> None:
    torch.compiler.set_stance("force_eager")
    for name in LOW_BITS:
        model = _sharded(seed=1) if world_size > 1 else _make(1)
        optimizer = _torchaos(model, name)
        checkpoint.load(folder / name, model, optimizer)
        shards = _shards(optimizer, model)
        if name in kinds:
            assert type(shards["up.weight.exp_avg"]).__name__ == kinds[name]
        found, meant = _gathered(_values(shards), world_size), torch.load(folder / f"{name}.pt")
        assert all(torch.equal(found[key], meant[key]) for key in meant), name
        _train(model, optimizer, [2], rank if world_size == 2 else None)


def test_torchaos_states_of_few_bits_are_saved_and_come_back_on_any_mesh(
    ranks: Ranks, tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="needs torchao: install .[ecosystem]")
    kinds = {
        "AdamW8bit": "OptimState8bit",
        "AdamW4bit": "OptimState4bit",
        "AdamWFp8": "OptimStateFp8",
    }
    ranks(_saves_low_bits, 2, tmp_path)
    ranks(_loads_low_bits, 1, tmp_path, kinds)  # rows of two shards, joined
    # Cuts of 128 rows of 64 that divide blocks of 256 elements.
    ranks(_loads_low_bits, 3, tmp_path, {"AdamW8bit": "Tensor", "AdamWFp8": "Tensor"})


def _muon(rank: int, world_size: int, folder: Path) -> None:
    from muon_fsdp2 import Muon

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices, others = _matrices_and_others(model)
        return Muon(
            [
                {"params": matrices, "lr": 1e-2, "use_muon": True},
                {"params": others, "lr": 1e-2, "use_muon": False},
            ]
        )

    torch.compiler.set_stance("force_eager")  # the same step, without half a minute of compiling
    model, peer = _sharded(), _sharded(torch.distributed.fsdp.fully_shard)
    optimizer, its_optimizer = make(model), make(peer)
    _train(model, optimizer, range(STEPS), rank)
    _train(peer, its_optimizer, range(STEPS), rank)
    _assert_equal(model, peer, "muon-fsdp2")
    assert not torch.equal(full(model.up.weight), _make().up.weight)
    checkpoint.save(folder / "muon", model, optimizer)
    model = _sharded(seed=1)
    optimizer = make(model)
    checkpoint.load(folder / "muon", model, optimizer)
    _train(model, optimizer, [STEPS], rank)
    _train(peer, its_optimizer, [STEPS], rank)
    _assert_equal(model, peer, "muon-fsdp2, from a checkpoint")


def test_a_muon_for_fsdp2_trains_as_with_torchs_fsdp2(ranks: Ranks, tmp_path: Path) -> None:
    # Not compared with one process: without shards, its 0.3.0 calls a function that it lacks.
    pytest.importorskip("muon_fsdp2", reason="needs muon-fsdp2: install .[ecosystem]")
    ranks(_muon, 2, tmp_path)
