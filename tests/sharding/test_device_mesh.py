"""Making meshes, and what is said of one that does not fit, on every rank that it does not fit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardwise import (
    DataParallelMeshDims,
    FullyShardedDataParallel,
    fully_shard,
    init_mesh,
    inspect,
)
from shardwise.diloco import DiLoCo
from tests.worlds import Ranks, on_threads


def _shard(mesh: DeviceMesh, net: nn.Module | None = None, **options: Any) -> nn.Module:
    return fully_shard(nn.Linear(4, 4) if net is None else net, mesh=mesh, **options)


def _tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})


def _same_dimension() -> None:
    mesh = init_mesh(dp=2, tp=2)
    _shard(mesh["tp"], _tensor_parallel(mesh["tp"]))


def _tensor_parallel_after_sharding() -> None:
    mesh = init_mesh(dp=2, tp=2)
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mesh=mesh["dp"])
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})


def _shared_module() -> None:
    norm = nn.LayerNorm(4)
    for _ in range(2):
        fully_shard(nn.Sequential(norm, nn.Linear(4, 4)))


def _absent(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` as one of accelerators, which the ranks of a test do not have."""
    mesh._device_type = "cuda"
    return mesh


#: What is wrong, and what the message says beside the rank.
CASES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "larger than the world": (
        lambda: init_mesh(dp=2, tp=4),
        ["init_mesh(dp=2, tp=4)", "found a mesh of 8 ranks", "expected the 4 ranks", "Start as"],
    ),
    "no multiple of the world": (
        lambda: init_mesh(dp=-1, tp=3),
        ["found a mesh of 3 ranks", "expected a factor of the 4 ranks"],
    ),
    # Those in it are not told anything: others may have nothing to do with this model.
    "smaller than the world": (
        lambda: _shard(DeviceMesh("cpu", [0], mesh_dim_names=("dp",))),
        ["fully_shard(Linear)", "is not part of DeviceMesh((dp=1)", "world of 4 ranks"],
    ),
    "three dimensions": (
        lambda: _shard(init_mesh(pp=1, dp=2, tp=2)),
        ["fully_shard(Linear)", "1-D (shard) or 2-D", "('pp', 'dp', 'tp')", 'mesh["dp"]'],
    ),
    "a dimension of tensor parallelism": (
        lambda: _shard(init_mesh(dp=2, tp=2)),
        ["fully_shard(Linear)", "('dp', 'tp')", "'tp' is tensor parallel", 'Pass mesh["dp"]'],
    ),
    "swapped": (
        lambda: _shard(init_mesh(dp_shard=2, dp_replicate=2)),
        ["fully_shard(Linear)", "'dp_replicate' before 'dp_shard'"],
    ),
    "an unknown name": (
        lambda: _shard(init_mesh(dp=2, tp=2), dp_mesh_dims=DataParallelMeshDims(shard="data")),
        ["among ('dp', 'tp')", "found 'data'"],
    ),
    "no names": (
        lambda: _shard(
            init_device_mesh("cpu", (2, 2)), dp_mesh_dims=DataParallelMeshDims(shard="dp")
        ),
        ["dp_mesh_dims", "whose dimensions have names", "mesh_dim_names=..."],
    ),
    "no names beside tensor parallelism": (
        lambda: _shard(
            init_device_mesh("cpu", (4,)), _tensor_parallel(init_mesh(dp=2, tp=2)["tp"])
        ),
        ["0.weight", "found ranks", "also in the mesh to shard over", "only this rank"],
    ),
    "of another mesh": (
        lambda: _shard(
            DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("tp", "dp"))["dp"],
            _tensor_parallel(init_mesh(dp=2, tp=2)["tp"]),
        ),
        ["0.weight", "two slices of one mesh", "init_mesh"],
    ),
    "the same dimension": (
        _same_dimension,
        ["0.weight", "(Shard(dim=0),)", "found ranks"],
    ),
    "tensor parallelism after sharding": (
        _tensor_parallel_after_sharding,
        ["0.weight of Linear", "after sharding", "Call parallelize_module"],
    ),
    "outside in": (
        lambda: fully_shard(fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))[1]),
        ["weight of Linear", "in the group of Sequential already", "from the inside out"],
    ),
    "a module of two blocks": (
        _shared_module,
        ["0.weight of LayerNorm", "in the group of Sequential already", "If the module is shared"],
    ),
    "the wrong device": (
        lambda: _shard(_absent(init_mesh(dp=4))),
        ["fully_shard(Linear)", "on 'cuda' devices", "no accelerator", "expected cpu"],
    ),
    "the wrong device, in the wrapper": (
        lambda: FullyShardedDataParallel(nn.Linear(4, 4), device_mesh=_absent(init_mesh(dp=4))),
        ["FullyShardedDataParallel", "on 'cuda' devices"],
    ),
}


def _provoke(rank: int, world_size: int) -> dict[str, str]:
    messages = {}
    for name, (case, _) in CASES.items():
        try:
            case()
        except (ValueError, RuntimeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
        dist.barrier()  # nobody is left waiting
    return messages


def test_meshes_that_do_not_fit(threads: Ranks) -> None:
    for rank, told in enumerate(threads(_provoke, 4)):
        outside = [] if rank else ["smaller than the world"]
        assert list(told) == [name for name in CASES if name not in outside], f"rank {rank}"
        for name, text in told.items():
            missing = [part for part in [f"rank {rank}", *CASES[name][1]] if part not in text]
            assert not missing, text


@on_threads(4)
def test_sizes_fill_the_world(rank: int, world_size: int) -> None:
    mesh = init_mesh(pp=1, dp=-1, tp=2)
    assert tuple(mesh.shape) == (1, 2, 2)
    assert mesh.mesh_dim_names == ("pp", "dp", "tp")
    assert mesh["tp"].mesh.tolist() == ([0, 1] if rank < 2 else [2, 3])
    # What refuses tensor parallelism after sharding is copied with the module.
    model = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    for copied in (copy.deepcopy(model), copy.deepcopy(nn.Sequential(model))[0]):
        assert torch.equal(copied.weight.full_tensor(), model.weight.full_tensor())
        with pytest.raises(ValueError, match="tensor parallelism applied after sharding"):
            parallelize_module(copied, mesh["tp"], ColwiseParallel())


def _sliced(mesh: DeviceMesh, *names: str) -> nn.Module:
    return fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh[names])


def _as_the_article() -> nn.Module:
    return _sliced(init_mesh(DDP=2, FSDP=4), "FSDP")


def _with_both() -> nn.Module:
    return _sliced(init_mesh(DDP=2, FSDP=4), "DDP", "FSDP")


def _flattened_without_one() -> nn.Module:
    mesh = init_mesh(hosts=2, dp=2, cp=2)
    return fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh["dp", "cp"]._flatten("dp_cp"))


def _another_of_a_model() -> nn.Module:
    """Experts lie on another mesh than the rest, whose dimensions are not theirs."""
    mesh = init_mesh(fsdp=2, inner=4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh["fsdp", "inner"]._flatten("all"))


def _with_tensor_parallelism() -> nn.Module:
    mesh = init_mesh(dp=4, wide=2)
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, mesh["wide"], {"0": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def _of_a_pipeline() -> nn.Module:
    return _sliced(init_mesh(pipeline_stage=2, dp=2, tp1=2), "dp")


def _with_diloco() -> nn.Module:
    mesh = init_mesh(outer=2, dp=4)
    return _averaging_over(mesh, mesh["outer"])


def _with_diloco_over_another_group() -> nn.Module:
    mesh = init_mesh(outer=2, dp=4)
    groups = [dist.new_group(ranks) for ranks in mesh.mesh.T.tolist()]
    return _averaging_over(mesh, groups[mesh["dp"].get_local_rank()])


def _averaging_over(mesh: DeviceMesh, group: DeviceMesh | dist.ProcessGroup) -> nn.Module:
    model = _sliced(mesh, "dp")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    model.diloco = [DiLoCo(model, inner, every=2, group=group)]
    return model


def _averaged_by_a_hook() -> nn.Module:
    mesh = init_mesh(outer=2, dp=4)
    model = _sliced(mesh, "dp")
    model.set_all_reduce_hook(lambda grads: dist.all_reduce(grads, group=mesh.get_group("outer")))
    return model


def _apart_on_purpose() -> nn.Module:
    mesh = init_mesh(DDP=2, FSDP=4)
    model = nn.Sequential(nn.Linear(4, 4))
    return fully_shard(model, mesh=mesh["FSDP"], separate_dims=["DDP"])


#: What is not averaged over, by how the model is sharded.
UNAVERAGED: dict[Callable[[], nn.Module], dict[str, int]] = {
    _as_the_article: {"DDP": 2},
    _with_both: {},
    _flattened_without_one: {"hosts": 2},
    _another_of_a_model: {},
    _with_tensor_parallelism: {},
    _of_a_pipeline: {},
    _with_diloco: {},
    _with_diloco_over_another_group: {},
    _averaged_by_a_hook: {},
    _apart_on_purpose: {},
}


def _steps_twice(rank: int, world_size: int, make: Callable[[], nn.Module]) -> str:
    model = make()
    with torch.no_grad():
        model(torch.ones(2, 4))  # an evaluation averages nothing
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    return str(inspect(model))


@pytest.mark.parametrize("make", UNAVERAGED)
def test_dimensions_that_nothing_is_averaged_over_are_named_once(
    threads: Ranks, make: Callable[[], nn.Module]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = threads(_steps_twice, 8, make)
    told = [str(each.message) for each in caught if "averaged" in str(each.message)]
    expected = UNAVERAGED[make]
    assert len(told) == len(expected), "rank 0 alone, once"
    for (name, size), text in zip(expected.items(), told, strict=True):
        assert f"nothing is averaged over the {size} ranks along {name!r}" in text
        remark = f"not averaged: each of the {size} ranks along {name} trains a model of its own"
        assert all(remark in report for report in reports)
    if not expected and make is not _averaged_by_a_hook:
        assert not any("not averaged" in report for report in reports)


def _with_separate_dims(rank: int, world_size: int, dims: list[str]) -> str:
    mesh = init_mesh(DDP=2, FSDP=2)
    with pytest.raises(ValueError, match="separate_dims on rank") as caught:
        fully_shard(nn.Linear(4, 4), mesh=mesh["FSDP"], separate_dims=dims)
    return str(caught.value)


@pytest.mark.parametrize("dims", [["FSDP"], ["DDP", "ddp"]])
def test_separate_dims_are_those_that_the_mesh_was_sliced_without(
    threads: Ranks, dims: list[str]
) -> None:
    for text in threads(_with_separate_dims, 4, dims):
        assert text.endswith(f"found {dims[-1]!r}")
        assert "of ('DDP', 'FSDP')" in text
