"""Sharded training on a device computes what unsharded training on that device computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.corpus.oracle import Case, check_trainings, make_sharded
from tests.gpu.devices import TYPE, Devices, device, long_on_cpus, mesh, needs_gpu, sharded, whole
from tests.sharding.nets import batches, loss_of


def _recomputed(net: nn.Module) -> None:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = checkpoint_wrapper(block)


#: Trainings, in float32 and in bfloat16, as far as they differ from the usual one.
WAYS: dict[str, dict[str, Any]] = {
    "zero-3": {"strategy": "full-shard"},
    "zero-2": {"strategy": "shard-grad-op"},
    "no-shard": {"strategy": "no-shard"},
    "hybrid": {"strategy": "one-replica"},
    "recomputed": {"door": "fully_shard, recomputing"},
    "prefetched": {"door": "fully_shard, ahead"},
    "accumulated": {"microbatches": 3, "sync_every": False, "max_norm": 0.5},
    "custom": {"door": "fully_shard, custom collectives"},
    "offloaded": {"door": "fully_shard, offloaded"},
    "offloaded-pageable": {"door": "fully_shard, pageable"},
}


def _trains(rank: int, world_size: int, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case("net", **{"param_dtype": dtype, "reduce_dtype": torch.float32, **WAYS[name]})
        check_trainings(rank, world_size, [case], TYPE, rtol=1e-4, atol=1e-5)
        home = "cpu" if "offloaded" in name else TYPE
        net = make_sharded(case, world_size, device_type=TYPE)
        assert {param.to_local().device.type for param in net.parameters()} == {home}


#: On CPUs, where ``tests/sharding`` and ``tests/parity`` look at the others.
ALWAYS = ("zero-3", "accumulated", "custom")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if TYPE == "cpu" and name not in ALWAYS else ())
        for name in WAYS
    ],
)
def test_training_equals_unsharded_training(devices: Devices, world_size: int, name: str) -> None:
    if TYPE == "cpu" and ("offloaded" in name or world_size == 1):
        pytest.skip("nothing that the tests on CPUs do not look at")
    devices.run(_trains, world_size, name)


def _reference_step(net: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> None:
    """The mean gradient over all ranks' batches, in fp32, computed in ``dtype``."""
    narrow = copy.deepcopy(net).to(dtype)
    net.zero_grad()
    for batch in x:
        loss_of(narrow, batch.to(dtype)).backward()
        for param, computed in zip(net.parameters(), narrow.parameters(), strict=True):
            grad = computed.grad.float() / len(x)
            param.grad = grad if param.grad is None else param.grad + grad
            computed.grad = None


def _offloaded(rank: int, world_size: int, pin_memory: bool) -> None:
    """Read gradients on the host as soon as backward returns, and once more when all is over."""
    net = sharded(offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
    for step in range(4):
        loss_of(net, batches(world_size, step)[rank].to(device())).backward()
        at_once = {name: p.grad.to_local().clone() for name, p in net.named_parameters()}
        torch.cuda.synchronize()
        for name, param in net.named_parameters():
            assert torch.equal(at_once[name], param.grad.to_local()), name
        net.zero_grad()


@needs_gpu
@pytest.mark.parametrize("pin_memory", [True, False], ids=["pinned", "pageable"])
def test_offloaded_gradients_have_arrived_when_backward_returns(
    devices: Devices, pin_memory: bool
) -> None:
    devices.run(_offloaded, 1, pin_memory)


def _stepped_beside(rank: int, world_size: int) -> None:
    """Run the optimizer on a stream of its own, for so long that the next forward overtakes it."""
    net, alone = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), whole()
    side = torch.cuda.Stream()
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (net, alone))
    for step in range(4):
        x = batches(world_size, step).to(device())
        loss_of(net, x[rank]).backward()
        _reference_step(alone, x, torch.bfloat16)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # cycles
            mine.step()
            net.zero_grad(set_to_none=False)
        net.set_post_optim_event(side.record_event())
        theirs.step()
        theirs.zero_grad()
    torch.cuda.synchronize()
    for (where, param), other in zip(net.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), other, rtol=1e-2, atol=1e-2, msg=where)


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_forward_waits_for_an_optimizer_on_another_stream(
    devices: Devices, world_size: int
) -> None:
    devices.run(_stepped_beside, world_size)


def _compiled(rank: int, world_size: int) -> None:
    # Inductor is what users take. On CPUs it starts a C++ compiler for each graph.
    backend = "inductor" if TYPE == "cuda" else "aot_eager"
    for recompute in (False, True):
        net, alone = whole(), whole()
        if recompute:
            _recomputed(net)
        for block in net.blocks:
            block.compile(backend=backend)
            fully_shard(block, mesh=mesh())
        fully_shard(net, mesh=mesh())
        for step in range(3):
            x = batches(world_size, step).to(device())
            loss_of(net, x[rank]).backward()
            _reference_step(alone, x, torch.float32)
            for (where, param), other in zip(
                net.named_parameters(), alone.parameters(), strict=True
            ):
                found = param.grad.full_tensor()
                torch.testing.assert_close(found, other.grad, rtol=1e-4, atol=1e-5, msg=where)
            net.zero_grad()


@long_on_cpus
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_blocks_train_alike(devices: Devices, world_size: int) -> None:
    if TYPE == "cpu" and world_size == 1:
        pytest.skip("nothing that the test on two ranks does not look at")
    devices.run(_compiled, world_size)
