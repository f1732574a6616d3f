"""What a report says of models that are sharded, against what ranks have in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise import DataParallelMeshDims, FSDPModule, FullyShardedDataParallel, fully_shard
from shardwise.insight.inspect.page import drawing, page
from shardwise.insight.inspect.report import ParamKind, Report
from shardwise.insight.inspect.text import as_text
from shardwise.sharding.part import take
from tests.corpus.gathering import own_part
from tests.sharding.nets import Net
from tests.worlds import on_threads

Threads = Callable[..., list[Any]]


def counted_net() -> Net:
    """A net whose parameters count 0, 1, 2, ... in order of storage."""
    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.arange(float(param.numel())).view(param.shape))
    return net


def shard_blocks(net: Net, mesh: DeviceMesh | None, **arguments: Any) -> Net:
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, **arguments)
    return net


def tensor_parallel(net: Net, mesh: DeviceMesh) -> Net:
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def check(model: nn.Module, report: Report) -> None:
    """The report of this rank says of all ranks what all ranks have."""
    own = {name: own_part(param.detach()).clone() for name, param in model.named_parameters()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    assert [each.name for each in report.parameters] == list(own)
    assert report.grid.ranks == tuple(range(dist.get_world_size()))
    for each in report.parameters:
        counted = torch.arange(float(each.tiling.numel)).view(each.shape)
        for rank, held in enumerate(every):
            expected = take(counted, each.tiling.by_rank[rank].part)
            found = held[each.name]
            assert torch.equal(found, expected), f"{each.name} of {report.grid} on rank {rank}"
    for total, held in zip(report.totals, every, strict=True):
        assert total.parameters == sum(t.numel() * t.element_size() for t in held.values())


def one_dimension() -> None:
    net = shard_blocks(counted_net(), None)
    report = shardwise.inspect(net)
    check(net, report)
    assert str(report.grid) == "shard=4"
    assert report.model == "Net"
    assert report.find("gain").kind is ParamKind.REPLICATED
    assert report.find("head.weight").group == ""
    assert report.find("blocks.1.up.weight").group == "blocks.1"
    up = report.find("blocks.0.up.weight")
    assert [up.tiling.by_rank[rank].padding for rank in range(4)] == [0, 0, 0, 6]
    for block in net.blocks:
        block.unshard()
    assert shardwise.inspect(net) == report, "what is kept does not change while it is unsharded"


def hybrid(mesh: DeviceMesh) -> None:
    net = shard_blocks(counted_net(), mesh)
    report = shardwise.inspect(net)
    check(net, report)
    assert str(report.grid) == "dp_replicate=2 x dp_shard=2"
    assert all(not each.cut_along[0] for each in report.parameters), "copies along the first"
    assert report.find("head.bias").cut_along == ((), (0,))


def sharded_columns(mesh: DeviceMesh) -> None:
    net = shard_blocks(
        counted_net(), mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None
    )
    report = shardwise.inspect(net)
    check(net, report)
    assert report.find("head.weight").cut_dim == 1
    assert {"interleaved"} <= {each.kind for each in report.remarks}


def tensor_then_data_parallel(mesh: DeviceMesh) -> None:
    net = shard_blocks(tensor_parallel(counted_net(), mesh["tp"]), mesh["dp"])
    report = shardwise.inspect(net)
    check(net, report)
    assert str(report.grid) == "dp=2 x tp=2", "the mesh that both were taken from"
    assert report.find("blocks.0.up.weight").cut_along == ((0,), (0,))
    assert report.find("blocks.0.down.weight").cut_along == ((0,), (1,))
    assert report.find("head.weight").cut_along == ((0,), ())


def tensor_parallel_only(mesh: DeviceMesh) -> None:
    net = tensor_parallel(counted_net(), mesh["tp"])
    report = shardwise.inspect(net, mesh=mesh)
    check(net, report)
    assert report.find("blocks.0.up.weight").kind is ParamKind.TENSOR_PARALLEL
    assert report.find("head.weight").kind is ParamKind.PLAIN


def named_dimensions(mesh: DeviceMesh) -> None:
    def on_whole_mesh(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            cut = Shard(0) if name.endswith("up") else Replicate()
            whole = distribute_tensor(param.detach(), mesh, [Replicate(), cut])
            module.register_parameter(key, nn.Parameter(whole))

    net = counted_net()
    distribute_module(net, mesh, on_whole_mesh)
    shard_blocks(net, mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    check(net, shardwise.inspect(net))


def wrapped_with_ignored() -> None:
    net = counted_net()
    net.blocks[2].down.weight.requires_grad_(False)
    wrapped = FullyShardedDataParallel(net, ignored_states=[net.head.weight])
    report = shardwise.inspect(wrapped)
    check(wrapped, report)
    head = report.find("head.weight")
    assert head.kind is ParamKind.PLAIN
    assert head.group is None
    assert head.tiling.by_rank[3].numel == 30
    (remark,) = (each for each in report.remarks if each.kind == "not sharded")
    assert remark.parameters == ("head.weight",)
    assert remark.nbytes == 120
    assert not report.find("blocks.2.down.weight").trainable
    first = report.totals[0]
    frozen = report.find("blocks.2.down.weight").nbytes_on(0)
    assert first.gradients == first.parameters - frozen


def tied() -> None:
    net = counted_net()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    shard_blocks(net, None)
    report = shardwise.inspect(net)
    check(net, report)
    assert report.find("blocks.1.up.weight") is report.find("blocks.0.up.weight")
    assert report.find("blocks.0.up.weight").aliases == ("blocks.1.up.weight",)


def not_sharded() -> None:
    net = counted_net()
    report = shardwise.inspect(net)
    check(net, report)
    assert {each.kind for each in report.parameters} == {ParamKind.PLAIN}


def values_of_ranks(rank: int, mesh: DeviceMesh) -> None:
    net = shard_blocks(tensor_parallel(counted_net(), mesh["tp"]), mesh["dp"])
    report = shardwise.inspect(net, values=True)
    if rank:
        assert report.values is None
        return
    assert report.values is not None
    assert report.values["blocks.0.up.bias"] == {0: [0, 1], 1: [4, 5], 2: [2, 3], 3: [6]}
    assert report.values["gain"] == dict.fromkeys(range(4), 0)
    assert "rank 1: [4.0, 5.0]" in str(report)


@on_threads(4)
def test_reports_are_what_ranks_hold(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one_dimension()
    data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    hybrid(data)
    sharded_columns(data)
    tensor_then_data_parallel(mesh)
    tensor_parallel_only(mesh)
    named_dimensions(mesh)
    wrapped_with_ignored()
    tied()
    not_sharded()
    values_of_ranks(rank, mesh)


def _stage(rank: int, world_size: int) -> tuple[str, tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    net = shard_blocks(counted_net(), mesh["dp"])
    grid = shardwise.inspect(net).grid
    return str(grid), grid.ranks


def test_stages_of_a_pipeline_report_their_own_ranks(threads: Threads) -> None:
    assert threads(_stage, 4) == [("dp=2", (0, 1))] * 2 + [("dp=2", (2, 3))] * 2


def test_a_report_shows_itself(tmp_path: Path) -> None:
    report = shardwise.inspect(Net(), name="net")
    assert str(report) == as_text(report)
    path = report.to_html(tmp_path / "net.html")
    assert path.read_text() == page(report)
    path = report.to_svg("head.weight", str(tmp_path / "head.svg"), rank=0)
    assert path.read_text() == drawing(report, report.find("head.weight"), 0)
    with pytest.raises(KeyError, match="nobody"):
        report.to_svg("nobody", tmp_path / "x.svg")
    assert not (tmp_path / "x.svg").exists()


def test_without_a_world_there_is_one_rank() -> None:
    report = shardwise.inspect(Net(), values=True)
    assert report.grid.ranks == (0,)
    assert report.values is not None
    assert report.values["gain"] == {0: 1.5}


def test_values_of_a_model_that_has_none() -> None:
    with torch.device("meta"):
        net = Net()
    with pytest.raises(ValueError, match="found gain on the meta device"):
        shardwise.inspect(net, values=True)


def test_the_name_is_of_a_function_and_of_a_package() -> None:
    import shardwise.insight.inspect.words

    assert not isinstance(Net(), FSDPModule)
    assert isinstance(shardwise.inspect(Net()), Report)
