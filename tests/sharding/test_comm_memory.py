"""Where the buffers of collectives lie changes no value: symmetric memory, or the group's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from shardwise import fully_shard
from shardwise.errors import MisuseError
from shardwise.transport import select
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    group_of,
    hybrid_mesh,
    loss_of,
    seeded,
    sharded_modules,
    sharded_net,
)
from tests.sharding.test_communication import Gather, Scatter
from tests.transport.symmetric import HostMemory, host_memory

Ranks = Callable[..., list[Any]]


def _columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


#: How the model is sharded, by a name; ``None`` where that needs a world to be made.
WAYS: dict[str, dict[str, Any]] = {
    "zero-3": {},
    "zero-2": {"reshard_after_forward": False},
    "columns": {"shard_placement_fn": _columns},
    "fewer ranks": {"reshard_after_forward": 2},
    "hybrid": {"mesh": None},
}


def _train(rank: int, world_size: int, way: str) -> list[int]:
    kwargs = dict(WAYS[way])
    if "mesh" in kwargs:
        kwargs["mesh"] = hybrid_mesh(world_size)
    with host_memory() as seen:
        net, whole = sharded_net(**kwargs), seeded(Net)
        x = batches(world_size)
        loss_of(net, x[rank]).backward()  # also where it has run before
        net.zero_grad()
        assert not seen
        for module in sharded_modules(net):
            module.set_symm_mem_for_comm()
            module.set_symm_mem_for_comm()  # a second time changes nothing
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (net, whole)]
        for step in range(4):
            for module in sharded_modules(net):
                module.set_force_sum_reduction_for_comms(step >= 2)
            x = batches(world_size, step)
            for _ in range(2):  # gradients are added, too
                loss_of(net, x[rank]).backward()
                average_backward(whole, x)
            assert_same_gradients(net, whole)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert ("reduce-scatter" in seen) == (step >= 2), "averages are made elsewhere"
            for module in sharded_modules(net):
                module.reshard()
            assert all(memory.comes_to(0) for memory in HostMemory.made)
        with torch.no_grad():
            torch.testing.assert_close(net(x[rank]), whole(x[rank]))
        return [size for memory in HostMemory.made for size in memory.registered]


@pytest.mark.parametrize(
    ("way", "world_size"),
    [
        ("zero-3", 2),
        ("zero-3", 3),
        ("zero-2", 2),
        ("columns", 2),
        ("fewer ranks", 4),
        ("hybrid", 4),
    ],
)
def test_training_in_symmetric_memory(ranks: Ranks, way: str, world_size: int) -> None:
    registered = ranks(_train, world_size, way)
    assert registered[0]
    assert all(each == registered[0] for each in registered), "ranks register in one order"


def _mixed_and_separate(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    x = batches(world_size)
    with host_memory() as seen:
        nets = [sharded_net(mp_policy=policy) for _ in range(2)]
        for module in sharded_modules(nets[0]):
            module.set_symm_mem_for_comm()
            module.set_gradient_divide_factor(world_size)
        nets[0].set_separate_reduce_scatter_group()
        for net in nets:
            loss_of(net, x[rank]).backward()
        assert "reduce-scatter" in seen
        for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(one.grad.to_local(), other.grad.to_local())
        gathers, scatters = HostMemory.made
        assert gathers.group is group_of(nets[0]).mesh.shard_group
        assert scatters.group is group_of(nets[0]).mesh.scatter_group
        assert scatters.registered, "reductions have memory of their own group"
        nets[0].set_separate_reduce_scatter_group(False)
        assert group_of(nets[0]).mesh.scatter is group_of(nets[0]).mesh.shard


def test_symmetric_memory_with_mixed_precision_and_a_group_for_reductions(ranks: Ranks) -> None:
    ranks(_mixed_and_separate, 2)


def _raises_in_forward(rank: int, world_size: int) -> None:
    with host_memory():
        net, whole = sharded_net(), seeded(Net)
        for module in sharded_modules(net):
            module.set_symm_mem_for_comm()
        x = batches(world_size)
        with pytest.raises(RuntimeError, match="shapes"):
            net(x[rank][:, :-1])
        (memory,) = HostMemory.made
        net.reshard()
        assert memory.comes_to(0)
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        assert_same_gradients(net, whole)
        del net
        assert memory.comes_to(0), "a model that is gone holds none"


def test_symmetric_memory_after_a_forward_that_raised_and_after_the_model(ranks: Ranks) -> None:
    ranks(_raises_in_forward, 2)


def _refusals(rank: int, world_size: int) -> None:
    net = fully_shard(nn.Linear(4, 4))
    before = group_of(net).mesh
    with pytest.raises(RuntimeError, match="expected a process group whose backend is 'nccl'"):
        net.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="backend: expected 'NCCL', found 'NVSHMEM'"):
        net.set_symm_mem_for_comm("NVSHMEM")
    net.set_allocate_memory_from_process_group_for_comm(True)
    assert group_of(net).mesh.shard is before.shard, "gloo allocates no memory"
    net.set_allocate_memory_from_process_group_for_comm(False)
    assert group_of(net).mesh == before

    with host_memory():
        net.set_symm_mem_for_comm()
        for enable in (True, False):
            with pytest.raises(MisuseError, match=r"has buffers in symmetric memory"):
                net.set_allocate_memory_from_process_group_for_comm(enable)
    for custom in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        net = fully_shard(nn.Linear(4, 4))
        getattr(net, custom)(Gather(False) if "gather" in custom else Scatter(False))
        for call in ("set_symm_mem_for_comm", "set_allocate_memory_from_process_group_for_comm"):
            with pytest.raises(MisuseError, match=f"{call}: .* has custom collectives"):
                getattr(net, call)(*([True] if "allocate" in call else []))

    replicated = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (world_size, 1)))
    replicated.set_allocate_memory_from_process_group_for_comm(True)
    replicated(torch.ones(1, 2)).sum().backward()
    assert replicated.weight.grad is not None


def test_memory_that_is_not_there_or_not_alone_is_refused(ranks: Ranks) -> None:
    ranks(_refusals, 2)


def _memory_of_the_group(rank: int, world_size: int) -> None:
    net, whole = sharded_net(), seeded(Net)
    allocated: list[int] = []

    def allocator(group: dist.ProcessGroup, device: torch.device) -> Callable[..., torch.Tensor]:
        def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
            allocated.append(group.size())
            return torch.empty(numel, dtype=dtype, device=device)

        return allocate

    x = batches(world_size)

    def step() -> int:
        allocated.clear()
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        assert_same_gradients(net, whole)
        return len(allocated)

    with patch("shardwise._torch.symmetric.allocator_of", allocator):
        assert step() == 0
        for module in sharded_modules(net):
            module.set_allocate_memory_from_process_group_for_comm(True)
        groups = len(sharded_modules(net))
        gathers = 2 * groups - 1  # the root is not freed after forward
        assert step() == gathers + 2 * groups, "a buffer per gather, two per reduction"
        net.set_separate_reduce_scatter_group()
        assert step() == gathers + 2 * groups
        separate = group_of(net).mesh.scatter_group
        assert separate is not None
        for module in sharded_modules(net):
            module.set_allocate_memory_from_process_group_for_comm(False)
        assert step() == 0
        assert group_of(net).mesh.scatter is select.select_transport(
            separate, group_of(net).mesh.device
        )


def test_buffers_from_the_process_group_can_be_switched_on_and_off(ranks: Ranks) -> None:
    ranks(_memory_of_the_group, 2)
