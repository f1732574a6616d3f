"""A plan says what ranks hold once the model is sharded for real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardwise
from shardwise import fully_shard
from shardwise.frontends.strategies import WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.inspect.read import plan, with_counted_values
from shardwise.sharding.part import take
from tests.inspect.plans import Wide, planned_report, styles_of
from tests.sharding.nets import Net

Threads = Callable[..., list[Any]]


def _sharded(rank: int, world_size: int, mesh: str, make: Callable[[], nn.Module]) -> Any:
    wanted = WantedMesh.parse(mesh)
    real = init_device_mesh("cpu", wanted.shape, mesh_dim_names=wanted.names)
    model = make()
    if wanted.tensor_parallel > 1:
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(model, real["tp"], styles_of(model))
    for block in (*getattr(model, "blocks", ()), model):
        fully_shard(block, mesh=real[wanted.data_parallel])
    return shardwise.inspect(model, name=make.__name__, mesh=real).to_json()


@pytest.mark.parametrize(
    ("mesh", "make"),
    [
        ("dp=4", Net),
        ("dp=3", Wide),
        ("dp_replicate=2,dp_shard=2", Net),
        ("dp=2,tp=2", Net),
        ("dp=2,tp=2", Wide),
    ],
)
def test_a_plan_is_what_ranks_report(
    threads: Threads, mesh: str, make: Callable[[], nn.Module]
) -> None:
    planned = planned_report(mesh, make).to_json()
    size = WantedMesh.parse(mesh).size
    assert threads(_sharded, size, mesh, make) == [planned] * size


def test_a_plan_leaves_the_model_as_it_is() -> None:
    with torch.device("meta"):
        model = Net()
    blueprint = Blueprint("net", model, list(model.blocks), styles_of(model))
    before = {name: id(param) for name, param in model.named_parameters()}
    first = plan(blueprint, WantedMesh.parse("dp=2,tp=2"))
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert type(model) is Net
    assert plan(blueprint, WantedMesh.parse("dp=2,tp=2")) == first
    assert {each.name for each in first.groups} == {"blocks.0", "blocks.1", "blocks.2", ""}


def test_a_plan_leaves_no_process_group() -> None:
    planned_report("dp=4")
    assert not dist.is_initialized()


def test_a_plan_allocates_no_parameters() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)
    report = plan(Blueprint("large", model, ()), WantedMesh.parse("dp=1024"))
    assert report.nbytes == 4 * ((1 << 40) + (1 << 20))
    assert report.totals[1023].parameters == report.nbytes // 1024


def test_tied_parameters_stay_tied_under_tensor_parallelism() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8, bias=False)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.up.weight

    (weight,) = planned_report("dp=2,tp=2", Tied).parameters
    assert weight.aliases == ("head.weight",)
    assert weight.placements == (("dp", "StridedShard(0, 2)"), ("tp", "Shard(0)"))


def test_a_placement_function_decides_what_is_sharded() -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 4)
    blueprint = Blueprint(
        "columns", model, (), placement=lambda p: Shard(1) if p.ndim == 2 else None
    )
    report = plan(blueprint, WantedMesh.parse("dp=3"))
    assert [each.cut_dim for each in report.parameters] == [1, 0]


def test_tensor_parallelism_without_data_parallelism() -> None:
    report = planned_report("tp=4")
    assert {each.kind.value for each in report.parameters} == {"tensor parallel only", "plain"}
    assert report.find("blocks.0.up.weight").block(0).shape == (2, 6)  # type: ignore[union-attr]


def test_counted_values_follow_the_rows() -> None:
    report = with_counted_values(planned_report("dp=2,tp=2"))
    assert report.values is not None
    assert set(report.values) == {each.name for each in report.parameters}
    for each in report.parameters:
        counted = torch.arange(each.tiling.numel).view(each.shape)
        for rank, elements in report.values[each.name].items():
            block = each.block(rank)
            assert block is not None
            assert elements == take(counted, block.part).tolist()


def test_large_parameters_have_no_values() -> None:
    report = planned_report("dp=2", lambda: nn.Linear(16, 17))
    assert list(with_counted_values(report).values or ()) == ["bias"]
