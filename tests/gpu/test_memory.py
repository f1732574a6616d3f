"""What the layouts say is what a GPU's allocator counts; and streams are never waited for."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, materialize
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.state import groups_of
from tests.gpu.devices import TYPE, Devices, device, needs_gpu, needs_gpus, sharded

WIDTH, BLOCKS, ROWS = 1024, 6, 8
#: Blocks of CUDA's caching allocator begin at multiples of this many bytes.
ROUNDING = 512
#: Of small temporaries: losses, norms, and the inputs and outputs of eight rows.
SLACK = 2 * (BLOCKS + 4) * ROWS * WIDTH * 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Wide(nn.Module):
    """Blocks whose parameters are most of the memory."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def rounded(sizes: Iterable[int]) -> int:
    """Sum some sizes in bytes as the allocator counts them."""
    return sum(-(-size // ROUNDING) * ROUNDING for size in sizes)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    net(torch.randn(ROWS, WIDTH, device=device())).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def _warm_up() -> None:
    """Allocate what the first use of a GPU's libraries keeps, in both dtypes."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(WIDTH, WIDTH, device=device(), dtype=dtype)
        layer(torch.randn(ROWS, WIDTH, device=device(), dtype=dtype)).sum().backward()
    del layer
    gc.collect()


def _memory(rank: int, world_size: int, reshard: bool) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("record_stream makes memory depend on timing")

    torch.Tensor.record_stream = refuse
    _warm_up()
    before = torch.cuda.memory_allocated()
    net = sharded(Wide(), mp_policy=BF16, reshard_after_forward=reshard)
    params = [param for group in groups_of(net) for param in group.params]
    shards = [param.layout.chunk_numel for param in params]
    at_rest = rounded(4 * numel for numel in shards)
    assert torch.cuda.memory_allocated() - before == at_rest, "the shards, and nothing else"

    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    for _ in range(2):  # the first makes the optimizer's state, the second the order of groups
        _step(net, optimizer)
    gc.collect()
    steps = ROUNDING * len(params)  # fused AdamW counts steps on the device
    at_rest *= 3
    found = torch.cuda.memory_allocated() - before
    assert at_rest <= found <= at_rest + steps, (found, at_rest)

    peaks = set()
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        _step(net)
        peaks.add(torch.cuda.max_memory_allocated() - before)
        optimizer.step()
        optimizer.zero_grad()
    assert len(peaks) == 1, f"every step takes the same: {peaks}"
    [peak] = peaks
    promised = at_rest + _promised(params[:2], world_size, reshard)
    assert promised <= peak <= promised + steps + SLACK, f"{peak:,} bytes, promised {promised:,}"


def _promised(params: Sequence[GroupParam], world_size: int, reshard: bool) -> int:
    """The peak of a backward beside what is there between steps, from the layouts of one block.

    Full parameters and gradients are bf16. Gradients are reduced in fp32.
    """
    full = rounded(2 * param.layout.padded_numel for param in params)
    shard = rounded(4 * param.layout.chunk_numel for param in params)
    sent = 2 * full if world_size > 1 else 0  # the full gradient in fp32
    # While a reduction runs, it holds the gradient that it was given, too.
    moving = shard + (full + sent if world_size > 1 else 0)

    def at(block: int) -> int:
        """The more of two moments, for a block counted from 1; backward begins with the last."""
        unsharded = min(block, 2) if reshard else block  # this one and the one before it
        later = BLOCKS - block  # whose gradients are reduced; the last reduction is under way
        computing = (unsharded + 1) * full + (moving + (later - 1) * shard if later else 0)
        reducing = unsharded * full + sent + shard + later * shard  # its gradient in its place
        return max(computing, reducing)

    return max(at(block) for block in range(1, BLOCKS + 1))


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reshard", [True, False], ids=["zero-3", "zero-2"])
def test_memory_is_what_the_layouts_promise(
    devices: Devices, reshard: bool, world_size: int
) -> None:
    devices.run(_memory, world_size, reshard)


def _steady(rank: int, world_size: int, kwargs: dict[str, Any]) -> None:
    net = sharded(Wide(), mp_policy=BF16, **kwargs)
    optimizer = torch.optim.AdamW(net.parameters())
    peaks, rests, reserved = set(), set(), set()
    for step in range(8):
        torch.cuda.reset_peak_memory_stats()
        _step(net, optimizer)
        if step >= 2:
            peaks.add(torch.cuda.max_memory_allocated())
            rests.add(torch.cuda.memory_allocated())
            reserved.add(torch.cuda.memory_reserved())
    assert len(peaks) == 1, f"peak bytes by step: {peaks}"
    assert len(rests) == 1, f"bytes between steps: {rests}"
    assert len(reserved) == 1, f"reserved bytes: {reserved}"


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "kwargs",
    [{"reshard_after_forward": True}, {"offload_policy": CPUOffloadPolicy()}],
    ids=["zero-3", "offload"],
)
def test_every_step_takes_and_reserves_the_same_memory(
    devices: Devices, kwargs: dict[str, Any], world_size: int
) -> None:
    devices.run(_steady, world_size, kwargs)


def _unsynchronized(rank: int, world_size: int) -> None:
    for kwargs in ({}, {"reshard_after_forward": False}, {"mp_policy": BF16}):
        net = sharded(Wide(), **kwargs)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        for _ in range(2):
            _step(net, optimizer)
        x = torch.randn(ROWS, WIDTH, device=device())
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                net(x).square().mean().backward()
                clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_step_synchronizes_host_and_device(devices: Devices, world_size: int) -> None:
    devices.run(_unsynchronized, world_size)


def _streams(rank: int, world_size: int) -> None:
    net = sharded(Wide())
    x = torch.randn(512, WIDTH, device=device())
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


@needs_gpus(2)
def test_collectives_run_beside_computing(devices: Devices) -> None:
    devices.run(_streams, 2)


def _from_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        net, other = Wide(16, 2), Wide(16, 2)
    for each in (net, other):
        sharded(each)
    torch.manual_seed(0)
    materialize(net)
    assert all(param.to_local().device.type == TYPE for param in net.parameters())
    net(torch.randn(4, 16, device=device())).sum().backward()
    other.to_empty(device=device())
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.blocks[0].weight.full_tensor(), net.blocks[0].weight.full_tensor())


def test_a_model_from_the_meta_device_is_materialized_on_the_device(devices: Devices) -> None:
    devices.run(_from_meta, 2)


def _offloaded_from_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        net = Wide(16, 2)
    sharded(net, offload_policy=CPUOffloadPolicy(pin_memory=True))
    net.to_empty(device=device())
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(0.5)
    net(torch.randn(4, 16, device=device())).sum().backward()
    assert all(param.to_local().is_pinned() for param in net.parameters())


@needs_gpu
def test_shards_that_arrive_on_the_device_are_offloaded(devices: Devices) -> None:
    devices.run(_offloaded_from_meta, 1)
