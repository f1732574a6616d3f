"""Sharded training on a device computes what unsharded training on that device computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
)
from tests.gpu.devices import (
    TYPE,
    Devices,
    assert_same,
    device,
    long_on_cpus,
    mesh,
    needs_gpu,
    sharded,
    whole,
)
from tests.sharding.nets import batches, loss_of

DTYPES = (torch.float32, torch.bfloat16)


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
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Copies):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _recomputed(net: nn.Module) -> None:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = checkpoint_wrapper(block)


def _prefetched(net: nn.Module) -> None:
    for this, after in zip(net.blocks[:-1], net.blocks[1:], strict=True):
        this.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([this])


def _customized(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_AllGather())
            module.set_custom_reduce_scatter(_ReduceScatter())


@dataclass(frozen=True)
class Way:
    """A way to shard.

    Attributes:
        kwargs: of ``fully_shard``.
        shape: of the mesh, from the world size.
        before: what is done to the model before it is sharded.
        after: and what afterwards.
        microbatches: in each step, of which the last reduces gradients.
        norm: to clip gradients to.
    """

    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: Callable[[int], tuple[int, ...]] = lambda world_size: (world_size,)
    before: Callable[[nn.Module], None] = lambda net: None
    after: Callable[[nn.Module], None] = lambda net: None
    microbatches: int = 1
    norm: float | None = None

    @property
    def offloads(self) -> bool:
        """Whether shards are on the host."""
        return "offload_policy" in self.kwargs


WAYS = {
    "zero-3": Way({"reshard_after_forward": True}),
    "zero-2": Way({"reshard_after_forward": False}),
    "no-shard": Way({"reshard_after_forward": False}, lambda ranks: (ranks, 1)),
    "hybrid": Way({}, lambda ranks: (1, ranks)),
    "recomputed": Way(before=_recomputed),
    "prefetched": Way(after=_prefetched),
    "accumulated": Way(microbatches=3, norm=0.5),
    "custom": Way(after=_customized),
    "offloaded": Way({"offload_policy": CPUOffloadPolicy(pin_memory=True)}),
    "offloaded-pageable": Way({"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


def _reference_step(net: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> None:
    """The mean gradient over all ranks' microbatches, in fp32, computed in ``dtype``."""
    narrow = copy.deepcopy(net).to(dtype)
    total = [torch.zeros_like(param, dtype=torch.float32) for param in net.parameters()]
    for of_rank in x:
        mine = [torch.zeros_like(each) for each in total]
        for batch in of_rank:
            loss_of(narrow, batch.to(dtype)).backward()
            for one, param in zip(mine, narrow.parameters(), strict=True):
                one += param.grad
                param.grad = None
        for both, one in zip(total, mine, strict=True):
            both += one / len(x)
    for param, grad in zip(net.parameters(), total, strict=True):
        param.grad = grad


def _trains(rank: int, world_size: int, name: str) -> None:
    way = WAYS[name]
    for dtype in DTYPES:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        net, alone = whole(), whole()
        way.before(net)
        over = mesh(*way.shape(world_size))
        net = sharded(net, mesh=over, mp_policy=policy, **way.kwargs)
        way.after(net)
        mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (net, alone))
        home = "cpu" if way.offloads else TYPE
        for step in range(3):
            all_x = [batches(world_size, 10 * step + i) for i in range(way.microbatches)]
            x = torch.stack(all_x, dim=1).to(device())  # (ranks, microbatches, ...)
            for micro in range(way.microbatches):
                net.set_requires_gradient_sync(micro == way.microbatches - 1)
                loss_of(net, x[rank, micro]).backward()
            _reference_step(alone, x, dtype)
            for (where, param), other in zip(
                net.named_parameters(), alone.parameters(), strict=True
            ):
                assert param.to_local().device.type == home, where
                assert param.grad.dtype == torch.float32, where
                assert_same(param.grad, other.grad, f"{name}, {dtype}, step {step}, {where}")
            if way.norm is not None:
                found = clip_grad_norm_(net.parameters(), way.norm)
                expected = nn.utils.clip_grad_norm_(alone.parameters(), way.norm)
                torch.testing.assert_close(found, expected)
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for (where, param), other in zip(net.named_parameters(), alone.parameters(), strict=True):
            assert_same(param, other, f"{name}, {dtype}, {where}")


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
    if TYPE == "cpu" and (WAYS[name].offloads or world_size == 1):
        pytest.skip("nothing that the tests on CPUs do not look at")
    devices.run(_trains, world_size, name)


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
        _reference_step(alone, x[:, None], torch.bfloat16)
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
            _reference_step(alone, x[:, None], torch.float32)
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
