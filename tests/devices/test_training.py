"""Sharded training on a device that torch knows as PrivateUse1, with values."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shardwise import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    init_mesh,
    materialize,
)
from shardwise.base import devices
from shardwise.base.scratch import file as scratch_file
from shardwise.frontends.wrap import ModuleWrapPolicy
from shardwise.optim import in_backward, offload
from shardwise.optim.offloaded import optimizer as optimizer_of_offload
from tests.devices.device import NAME, figures
from tests.devices.world import Block, batch, calls, loss_of, model, run_on_device

STEPS = 2


def _sharded(net: nn.Sequential, **options: Any) -> nn.Module:
    for block in net[:2]:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)


def _train(net: nn.Module, rank: int) -> None:
    optimizer = _optimizer(net)
    for step in range(STEPS):
        loss_of(net, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _reference(world_size: int) -> nn.Module:
    """The same training without sharding, on the device: one model sees what all ranks see."""
    net = model().to(NAME)
    optimizer = _optimizer(net)
    for step in range(STEPS):
        for rank in range(world_size):
            (loss_of(net, batch(step, rank).to(NAME)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def _full(net: nn.Module) -> Iterator[torch.Tensor]:
    for param in net.parameters():
        assert isinstance(param, DTensor)
        yield param.detach().to(param.device_mesh.device_type).full_tensor().cpu()


def _assert_same(net: nn.Module, reference: nn.Module, way: str) -> None:
    for (name, expected), found in zip(reference.named_parameters(), _full(net), strict=True):
        assert torch.equal(found, expected.cpu()), f"{way}: {name}"


def _shard(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        if kind == "1-D":
            return _sharded(model(), **options)
        return _sharded(model(), mesh=init_mesh(replicate=2, shard=1), **options)

    return make


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        net = _sharded(nn.Sequential(Block(), Block(), nn.Linear(5, 3, bias=False)))
    materialize(net)
    values = model()
    for into, value in zip(net.parameters(), values.parameters(), strict=True):
        assert isinstance(into, DTensor)
        with torch.no_grad():
            whole = DTensor.from_local(value.detach().to(NAME), into.device_mesh)
            into.copy_(whole.redistribute(placements=into.placements))
    return net


def _custom() -> nn.Module:
    net = _sharded(model())
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_AllGather())
            module.set_custom_reduce_scatter(_ReduceScatter())
    return net


class _Allocating:
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_Allocating):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)


class _ReduceScatter(_Allocating):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM, "the backend is not known to average"
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


def _wrapped(strategy: ShardingStrategy, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return FullyShardedDataParallel(
                model(),
                sharding_strategy=strategy,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.accelerator.current_device_index(),
                sync_module_states=True,
                **options,
            )

    return make


WAYS: dict[str, Callable[[], nn.Module]] = {
    "zero-3": _shard("1-D"),
    "zero-2": _shard("1-D", reshard_after_forward=False),
    "replicated": _shard("2-D"),
    "collectives": _shard("1-D", transport="collectives"),
    "offloaded": _shard("1-D", offload_policy=CPUOffloadPolicy()),
    "custom collectives": _custom,
    "from meta": _on_meta,
    "wrapper": _wrapped(ShardingStrategy.FULL_SHARD),
    "wrapper, zero-2": _wrapped(ShardingStrategy.SHARD_GRAD_OP),
    "wrapper, replicated": _wrapped(ShardingStrategy.NO_SHARD),
    "wrapper, offloaded": _wrapped(ShardingStrategy.FULL_SHARD, cpu_offload=CPUOffload(True)),
}


def _ways(rank: int, world_size: int) -> None:
    reference = _reference(world_size)
    for name, make in WAYS.items():
        net = make()
        home = "cpu" if "offloaded" in name else NAME
        assert {each.device.type for each in net.parameters()} == {home}, name
        assert {each.device.type for each in net.buffers()} == {NAME}, name
        before = len(calls())
        _train(net, rank)
        assert len(calls()) > before, f"{name}: by collectives on the device"
        _assert_same(net, reference, name)


def test_training_is_that_of_one_model_bit_for_bit() -> None:
    run_on_device(_ways, 2)


def _lower_precision(rank: int, world_size: int) -> None:
    """The same on the device as on CPUs, up to the order of roundings."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    nets = [
        _sharded(model(), mp_policy=policy, mesh=init_mesh(device_type=each, dp=2))
        for each in (NAME, "cpu")
    ]
    losses = []
    for net in nets:
        _train(net, rank)
        losses.append(loss_of(net, batch(9, rank)).item())
        net.reshard()
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    for one, other in zip(_full(nets[0]), _full(nets[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.1)


def test_mixed_precision_on_the_device_and_on_cpus_side_by_side() -> None:
    run_on_device(_lower_precision, 2)


def _memory(rank: int, world_size: int) -> list[int]:
    found = []
    net = _sharded(model())
    for _ in range(3):
        loss_of(net, batch(0, rank)).backward()
        net.zero_grad()
        gc.collect()
        found.append(figures.allocated)
    return found


def test_full_parameters_are_freed_between_steps() -> None:
    for found in run_on_device(_memory, 2):
        assert found[0] == found[1] == found[2]
        parameters = sum(p.numel() * 4 for p in model().parameters())
        assert found[0] < parameters, "this rank's half, and buffers"


def _clipped(rank: int, world_size: int) -> None:
    net, reference = _sharded(model()), model().to(NAME)
    loss_of(net, batch(0, rank)).backward()
    for each in range(world_size):
        (loss_of(reference, batch(0, each).to(NAME)) / world_size).backward()
    norm = clip_grad_norm_(net.parameters(), 0.01)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(ValueError, match=r"mesh is on 'cuda' devices, .*expected pretend or cpu"):
        fully_shard(nn.Linear(2, 2), mesh=_mesh_of("cuda"))
    with pytest.raises(ValueError, match=f"device_type on rank {rank}: found cuda"):
        init_mesh(device_type="cuda", dp=2)
    with pytest.raises(ValueError, match="expected pretend or cpu"):
        FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cuda", 0))
    assert devices.has_streams(torch.device(NAME, 0))
    assert not devices.pins(torch.device(NAME, 0))


def _mesh_of(kind: str) -> Any:
    mesh = init_mesh(device_type="cpu", dp=2)
    mesh._device_type = kind
    return mesh


def test_clipping_and_what_the_device_does_not_have() -> None:
    run_on_device(_clipped, 2)


def _optimizers(net: nn.Module, way: str, folder: Path) -> torch.optim.Optimizer:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.05, foreach=False)

    to = "host" if "host" in way else f"disk:{folder}"
    if "in backward" in way:
        return in_backward(net, lambda params: offload(make(params), to))
    return offload(make(net.parameters()), to)


def _states_elsewhere(rank: int, world_size: int, folder: Path) -> None:
    scratch_file.SMALLEST = 8  # all states but counts of steps
    optimizer_of_offload._TOGETHER = 20
    reference = _sharded(model())
    theirs = _optimizer(reference)
    ways = ("host", "disk", "host in backward", "disk in backward")
    nets = {way: _sharded(model()) for way in ways}
    optimizers = {way: _optimizers(net, way, folder) for way, net in nets.items()}
    for step in range(3):
        for net, optimizer in [
            (reference, theirs),
            *zip(nets.values(), optimizers.values(), strict=True),
        ]:
            loss_of(net, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:  # between steps, states are tensors as ever
                for param in net.parameters():
                    optimizer.state[param]["exp_avg"].mul_(0.5)
            if step == 1:
                optimizer.load_state_dict(
                    tree_map_only(torch.Tensor, torch.clone, optimizer.state_dict())
                )
    for way, net in nets.items():
        optimizer = optimizers[way]
        for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
            assert torch.equal(_host(mine), _host(other)), way
            for key, value in theirs.state[other].items():
                found = optimizer.state[mine][key]
                assert torch.equal(_host(found), _host(value)), f"{way}: {key}"
                if key != "step" and _host(found).numel() > 1:
                    assert _plain(found).device.type == "cpu", f"{way}: {key}"


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _host(value: torch.Tensor) -> torch.Tensor:
    return _plain(value.detach()).cpu()


def test_offloaded_states_are_those_on_the_device(tmp_path: Path) -> None:
    run_on_device(_states_elsewhere, 2, tmp_path)
