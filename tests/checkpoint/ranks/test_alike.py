"""What ranks should have in common, and have not: whose is saved, and what is said."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import checkpoint, fully_shard, publish, subscribe
from shardwise.checkpoint import CheckpointError, PerRank, per_rank
from shardwise.sharding.placement import full_tensor
from tests.worlds import Ranks


def _with_statistics(rank: int) -> nn.Module:
    """A sharded model with a batch norm that has seen other data on each rank."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    torch.manual_seed(rank)
    model(torch.randn(16, 4) * (1 + rank))
    return model


def _buffers_of_all(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    mine = {name: each.clone() for name, each in model.named_buffers()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _said(act: Callable[[], Any]) -> str:
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return "; ".join(str(each.message) for each in caught)


_BUFFERS = "model.1.running_mean and 1 more: found a tensor that differs between rank 0 and rank 1"


def _saves_statistics(rank: int, world_size: int, folder: str) -> None:
    model = _with_statistics(rank)
    every = _buffers_of_all(model)
    first = every[0]
    writers: dict[str, Callable[[str], object]] = {
        "save": lambda path: checkpoint.save(path, model),
        "async": lambda path: checkpoint.async_save(path, model).result(),
        "hf": lambda path: checkpoint.save_hf(path, model),
    }
    for name, write in writers.items():
        path = f"{folder}/{name}"
        said = _said(functools.partial(write, path))
        assert said.startswith(_BUFFERS), (name, said)
        loaded = _with_statistics(rank)
        checkpoint.load_weights(path, loaded)
        assert all(torch.equal(first[n], each) for n, each in loaded.named_buffers()), name
    weights: list[Any] = []
    said = _said(lambda: weights.append(publish(model, "it", to=folder)))
    assert said.startswith(_BUFFERS), said
    published = dict(subscribe("it", at=folder))
    assert all(torch.equal(first[name], published[name]) for name in first)
    dist.barrier()
    weights[0].close()

    checkpoint.save_rank_checkpoint(f"{folder}/each", model)
    dist.barrier()
    full, _ = checkpoint.consolidate_sharded_model_checkpoints(f"{folder}/each", save_model=False)
    assert all(torch.equal(full[name], each) for name, each in first.items())


def test_of_buffers_that_differ_one_ranks_are_saved_by_every_writer(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(_saves_statistics, 3, str(tmp_path))


def _saves_replicas(rank: int, world_size: int, folder: str) -> None:
    """Save replicas that have drifted apart, and parameters that nothing shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    left_out = set(model[1].parameters())
    fully_shard(model, mesh=mesh, ignored_params=left_out)
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    path = f"{folder}/same"
    assert _said(lambda: checkpoint.save(path, model, optimizer)) == ""
    writers = {piece.file for each in _manifest(path).tensors for piece in each.pieces}
    assert len(writers) == 4, "what is the same is written by all ranks"

    with torch.no_grad():
        model[0].weight.add_(rank // 2)
        model[1].weight.add_(rank)
        optimizer.state[model[1].bias]["exp_avg"].add_(rank)
    whole = _wholes(model)
    dist.broadcast_object_list(whole, src=0)
    path = f"{folder}/apart"
    said = _said(lambda: checkpoint.save(path, model, optimizer))
    assert said.startswith("model.1.weight and 2 more: found a tensor that differs")
    with torch.no_grad():
        model[0].weight.zero_()
    checkpoint.load(path, model, optimizer)
    for found, expected in zip(_wholes(model), whole, strict=True):
        assert torch.equal(found, expected)
    assert optimizer.state[model[1].bias]["exp_avg"].max() < 1


def _wholes(model: nn.Module) -> list[torch.Tensor]:
    """The parameters as this replica has them."""
    found = (each.detach() for each in model.parameters())
    return [full_tensor(p) if isinstance(p, DTensor) else p.clone() for p in found]


def _manifest(path: str) -> Any:
    from shardwise.checkpoint.disk.manifest import read_manifest

    return read_manifest(Path(path))


def test_of_replicas_that_differ_the_first_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_saves_replicas, 4, str(tmp_path))


_ALIKE = "expected the same on all ranks; keep each rank's with shardwise.checkpoint.per_rank(...)"
_MIXED: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "value": (lambda rank: {"data": {"at": rank // 2}}, "data.at: found 0 on rank 0 and 1 on rank"),
    "tensor": (
        lambda rank: {"random": torch.full((3,), rank)},
        "random: found a tensor that differs between rank 0 and rank 1",
    ),
    "shape": (
        lambda rank: {"random": torch.zeros(3 + rank)},
        "random: found a tensor that differs between rank 0 and rank 1",
    ),
    "dtype": (
        lambda rank: {"random": torch.zeros(2, dtype=[torch.int32, torch.float32][rank % 2])},
        "random: found a tensor that differs between rank 0 and rank 1",
    ),
    "kind": (
        lambda rank: {"at": torch.zeros(2) if rank else 1},
        "at: found a value on rank 0 and a tensor on rank 1",
    ),
    "depth": (
        lambda rank: {"at": {"step": 1} if rank else 1},
        "at: found a value on rank 0 and a dict on rank 1",
    ),
    "length": (
        lambda rank: {"many": [torch.zeros(2)] * (2 + rank)},
        "many: found a list of 2 on rank 0 and a list of 3 on rank 1",
    ),
    "own and common": (
        lambda rank: {"at": per_rank(1) if rank else 1},
        "at: found a value on rank 0 and a dict on rank 1",
    ),
}


def _saves_extra(rank: int, world_size: int, folder: str) -> None:
    model = fully_shard(nn.Linear(4, 4))
    for name, (make, reason) in _MIXED.items():
        path = Path(folder, name)
        for write in (checkpoint.save, lambda *given: checkpoint.async_save(*given).result()):
            with pytest.raises(CheckpointError) as raised:
                write(path, model, None, make(rank))
            assert f"extra.{reason}" in str(raised.value), (name, raised.value)
            assert _ALIKE in str(raised.value)
            dist.barrier()
            assert not path.exists()
        with pytest.raises(CheckpointError, match=r"transfer: .* expected the same on all ranks"):
            checkpoint.transfer((model, None), (model, None), make(rank))
    with pytest.raises(CheckpointError, match=r"extra.at: found no value on rank 2, expected one"):
        checkpoint.save(f"{folder}/x", model, None, {"at": per_rank(1)} if rank < 2 else {})
    with pytest.raises(CheckpointError, match=r"extra.a.\$ranks.0: expected no key '\$ranks'"):
        checkpoint.save(f"{folder}/x", model, None, {"a": {"$ranks": {"0": 1}}})
    for items in ([per_rank(rank)], [per_rank(rank), torch.ones(1)]):
        reason = r"extra.a(.0)?: found per_rank\(...\) inside a list, expec"
        with pytest.raises(CheckpointError, match=reason):
            checkpoint.save(f"{folder}/x", model, None, {"a": items})
    with pytest.raises(
        CheckpointError, match=r"extra.t: found a tensor that differs between rank 0"
    ):
        checkpoint.save(f"{folder}/x", model, None, {"t": torch.ones(0 if rank else 2)})
    # Not a number equals itself here, and keys that only one rank has are its own.
    extra = {"same": float("nan"), "also": {1: "a"}, f"rank{rank}": rank}
    checkpoint.save(f"{folder}/x", model, None, extra)
    found = checkpoint.load(f"{folder}/x", model)
    assert [found[f"rank{each}"] for each in range(world_size)] == [0, 1, 2]


def test_extra_that_differs_is_an_error_that_names_the_key_and_two_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(_saves_extra, 3, str(tmp_path))


def _keeps_each_ranks(rank: int, world_size: int, folder: str) -> None:
    model = fully_shard(nn.Linear(4, 4))
    torch.manual_seed(100 + rank)
    mine = {"torch": torch.get_rng_state(), "at": (rank, [rank])}
    checkpoint.save(f"{folder}/a", model, None, {"step": 3, "of": {"random": per_rank(mine)}})
    expected = torch.rand(4)
    found = checkpoint.load(f"{folder}/a", model)
    assert found["step"] == 3
    own = found["of"]["random"]
    assert isinstance(own, PerRank)
    assert [each["at"] for each in own.values] == [(each, [each]) for each in range(world_size)]
    assert own.local()["at"] == (rank, [rank])
    torch.set_rng_state(own.local()["torch"])
    assert torch.equal(torch.rand(4), expected), "the stream of another rank"
    checkpoint.save(f"{folder}/again", model, None, found)  # as it was loaded
    assert checkpoint.load(f"{folder}/again", model)["of"]["random"].local()["at"][0] == rank
    moved = checkpoint.transfer((model, None), (model, None), {"at": per_rank(rank)})
    assert moved["at"].local() == rank


def _loads_on_others(rank: int, world_size: int, folder: str) -> None:
    model = fully_shard(nn.Linear(4, 4))
    found = checkpoint.load(f"{folder}/again", model)["of"]["random"]
    assert [each["at"][0] for each in found.values] == [0, 1, 2]
    reason = r"extra.of.random: found the values of 3 ranks, expected 2, one for each rank that lo"
    with pytest.raises(CheckpointError, match=reason):
        found.local()


def test_each_rank_gets_its_own_values_back_and_other_ranks_get_all(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(_keeps_each_ranks, 3, str(tmp_path))
    ranks(_loads_on_others, 2, str(tmp_path))


def test_one_process_has_a_value_of_its_own_too(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2), None, {"at": per_rank(7)})
    found = checkpoint.load(tmp_path / "a", nn.Linear(2, 2))
    assert found["at"] == PerRank("at", (7,))
    assert found["at"].local() == 7
