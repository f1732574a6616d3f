"""Sharding on GPUs: the same training, memory and streams. Needs at least one; some need two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, materialize
from tests.harness import run_ranks
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    assert_same_values,
    average_backward,
    batches,
    loss_of,
    seeded,
    shard_blocks,
)

GPUS = torch.cuda.device_count()
#: With "cpu", most of these tests pass on two ranks: so much for the tests themselves.
DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and GPUS == 0, reason="needs a CUDA device"),
]
several = pytest.mark.skipif(DEVICE == "cuda" and GPUS < 2, reason="needs two CUDA devices")


def _on_devices(check: Callable[..., Any], *args: Any) -> list[Any]:
    world_size = max(GPUS, 1) if DEVICE == "cuda" else 2
    return run_ranks(check, world_size, *args, backend="nccl" if DEVICE == "cuda" else "gloo")


def _device() -> torch.device:
    return torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else _CPU


_CPU = torch.device("cpu")


def _sharded(net: nn.Module, **kwargs: Any) -> nn.Module:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    return shard_blocks(net, mesh=mesh, **kwargs)


def _trains(rank: int, world_size: int, kwargs: dict[str, Any]) -> None:
    net, whole = _sharded(seeded(Net), **kwargs), seeded(Net).to(_device())
    mine = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=True)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.1, foreach=True)
    offloaded = "offload_policy" in kwargs
    for step in range(4):
        x = batches(world_size, step).to(_device())
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        for name, param in net.named_parameters():
            home = "cpu" if offloaded else DEVICE
            assert param.to_local().device.type == home, name
            assert param.grad.to_local().device.type == home, name
        if offloaded:
            # Reductions on the GPUs are over, and copies to the host too: this reads them at once.
            reduced = {name: p.grad.to_local().clone() for name, p in net.named_parameters()}
            torch.cuda.synchronize()
            for name, param in net.named_parameters():
                assert torch.equal(reduced[name], param.grad.to_local()), name
        else:
            assert_same_gradients(net, whole)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    if offloaded:
        for name, param in whole.named_parameters():
            rows = dict(net.named_parameters())[name]
            moved = DTensor.from_local(
                rows.to_local().to(_device()), rows.device_mesh, rows.placements, run_check=False,
                shape=rows.shape, stride=rows.stride(),
            )  # fmt: skip
            torch.testing.assert_close(moved.full_tensor(), param)
    else:
        assert_same_values(net, whole)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=True)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["zero-3", "zero-2", "offload-pinned", "offload"],
)
def test_training_equals_one_device(kwargs: dict[str, Any]) -> None:
    if DEVICE != "cuda" and "offload_policy" in kwargs:
        pytest.skip("there is nothing to offload")
    _on_devices(_trains, kwargs)


class _Wide(nn.Module):
    """Blocks whose parameters are most of the memory."""

    def __init__(self, width: int = 256, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def _peaks(rank: int, world_size: int, kwargs: dict[str, Any]) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("record_stream makes memory depend on timing")

    torch.Tensor.record_stream = refuse
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = _sharded(_Wide().to(_device()), mp_policy=policy, **kwargs)
    optimizer = torch.optim.AdamW(net.parameters())
    peaks, rests, segments = [], [], []
    for step in range(8):
        torch.cuda.reset_peak_memory_stats()
        net(torch.randn(4, 256, device=_device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:  # the first makes the optimizer's state, the second the order of groups
            peaks.append(torch.cuda.max_memory_allocated())
            rests.append(torch.cuda.memory_allocated())
            segments.append(torch.cuda.memory_reserved())
    assert len(set(peaks)) == 1, f"peak bytes by step: {peaks}"
    assert len(set(rests)) == 1, f"bytes between steps: {rests}"
    assert len(set(segments)) == 1, f"reserved bytes: {segments}"


@pytest.mark.skipif(DEVICE != "cuda", reason="measures CUDA's allocator")
@pytest.mark.parametrize(
    "kwargs",
    [{"reshard_after_forward": True}, {"offload_policy": CPUOffloadPolicy()}],
    ids=["zero-3", "offload"],
)
def test_every_step_takes_the_same_memory(kwargs: dict[str, Any]) -> None:
    _on_devices(_peaks, kwargs)


def _from_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        net = _Wide(16, 2)
    _sharded(net)
    torch.manual_seed(0)
    materialize(net)
    assert all(param.to_local().device.type == DEVICE for param in net.parameters())
    net(torch.randn(4, 16, device=_device())).sum().backward()
    with torch.device("meta"):
        other = _Wide(16, 2)
    _sharded(other)
    other.to_empty(device=_device())
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.blocks[0].weight.full_tensor(), net.blocks[0].weight.full_tensor())


def test_a_model_from_the_meta_device_is_materialized_on_the_device() -> None:
    _on_devices(_from_meta)


def _offloaded_from_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        net = _Wide(16, 2)
    _sharded(net, offload_policy=CPUOffloadPolicy(pin_memory=True))
    net.to_empty(device=_device())
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(0.5)
    net(torch.randn(4, 16, device=_device())).sum().backward()
    assert all(param.to_local().is_pinned() for param in net.parameters())


@pytest.mark.skipif(DEVICE != "cuda", reason="there is nothing to offload")
def test_shards_that_arrive_on_the_device_are_offloaded() -> None:
    _on_devices(_offloaded_from_meta)


def _streams(rank: int, world_size: int) -> None:
    net = _sharded(_Wide(1024, 4))
    x = torch.randn(512, 1024, device=_device())
    for _ in range(2):
        net(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        net(x).sum().backward()
        torch.cuda.synchronize()
    computing, moving = set(), set()
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            (moving if "nccl" in event.name().lower() else computing).add(
                event.device_resource_id()
            )
    assert moving, "collectives ran"
    assert not moving & computing, "collectives have streams of their own, beside computing"


@several
@pytest.mark.skipif(DEVICE != "cuda", reason="looks at CUDA streams")
def test_collectives_run_beside_computing() -> None:
    _on_devices(_streams)


def _prefetched(rank: int, world_size: int) -> None:
    net, whole = _sharded(seeded(Net)), seeded(Net).to(_device())
    for this, after in zip(net.blocks[:-1], net.blocks[1:], strict=True):
        this.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([this])
    for step in range(3):
        x = batches(world_size, step).to(_device())
        handle = net.unshard(async_op=True)
        handle.wait()
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        assert_same_gradients(net, whole)
        net.zero_grad()
        whole.zero_grad()


def test_explicit_prefetch_gives_the_same_gradients() -> None:
    _on_devices(_prefetched)


class _Copies:
    """Custom collectives, by way of torch's own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Copies):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Copies):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


def _custom(rank: int, world_size: int) -> None:
    net, whole = _sharded(seeded(Net)), seeded(Net).to(_device())
    for module in (*net.blocks, net):
        module.set_custom_all_gather(_AllGather())
        module.set_custom_reduce_scatter(_ReduceScatter())
    for step in range(4):
        x = batches(world_size, step).to(_device())
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        assert_same_gradients(net, whole)
        net.zero_grad()
        whole.zero_grad()


def test_custom_collectives_beside_computing_give_the_same_gradients() -> None:
    _on_devices(_custom)
