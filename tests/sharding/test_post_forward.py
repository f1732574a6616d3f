"""``reshard_after_forward=k``: shards over fewer ranks between forward and backward."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.sharding.states import GroupState
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    check_backward,
    group_of,
    loss_of,
    run_backward,
    seeded,
    shard_blocks,
)
from tests.worlds import Ranks, on_threads


def _shard(net: nn.Module, k: int | bool, **kwargs: Any) -> nn.Module:
    return shard_blocks(net, {"reshard_after_forward": k}, **kwargs)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("world_size", "k"), [(4, 2), (6, 3), (6, 2)])
@on_threads()
def test_training_equals_unsharded_training(rank: int, world_size: int, k: int, dim: int) -> None:
    whole, net = seeded(Net), seeded(Net)
    place = (lambda p: Shard(p.ndim - 1) if p.ndim else None) if dim else None
    _shard(net, k, shard_placement_fn=place)
    for step in range(3):
        x = batches(world_size, step)
        loss = loss_of(net, x[rank])
        up = net.blocks[1].up
        assert group_of(net.blocks[1]).state is GroupState.SHARDED_POST_FORWARD
        assert isinstance(up.weight, DTensor)
        wanted = Shard(1) if dim else Shard(0)
        assert up.weight.placements == (Replicate(), wanted)
        assert up.weight.device_mesh.shape == (world_size // k, k)
        assert torch.equal(up.weight.full_tensor(), whole.blocks[1].up.weight)
        loss.backward()
        assert group_of(net.blocks[1]).state is GroupState.SHARDED
        average_backward(whole, x)
        assert_same_gradients(net, whole)


def _gathers_among(rank: int, world_size: int) -> list[int]:
    net = _shard(seeded(Net), 2, transport="collectives")
    loss_of(net, batches(world_size)[rank]).backward()
    sizes = []
    real = dist.all_gather_single if hasattr(dist, "all_gather_single") else None
    name = "all_gather_single" if real else "all_gather_into_tensor"
    real = getattr(dist, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        sizes.append(kwargs["group"].size())
        return real(*args, **kwargs)

    with patch.object(dist, name, count):
        loss_of(net, batches(world_size)[rank]).backward()
    return sizes


def test_backward_gathers_among_the_smaller_number_of_ranks(ranks: Ranks) -> None:
    # Forward: the root and three blocks over all ranks. Backward: three blocks over pairs.
    assert ranks(_gathers_among, 4) == [[4, 4, 4, 4, 2, 2, 2]] * 4


@on_threads(8)
def test_on_a_part_of_a_larger_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("tensor", "shard"))["shard"]
    whole, net = seeded(Net), seeded(Net)
    _shard(net, 2, mesh=mesh)
    x = batches(4)
    loss_of(net, x[mesh.get_local_rank()]).backward()
    average_backward(whole, x)
    assert_same_gradients(net, whole)


@on_threads(8)
def test_on_a_hybrid_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    whole, net = seeded(Net), seeded(Net)
    _shard(net, 2, mesh=mesh)
    x = batches(world_size)
    check_backward(net, whole, x, rank)


@on_threads(4)
def test_resharding_by_hand(rank: int, world_size: int) -> None:
    net = _shard(seeded(Net), 2, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    group = group_of(net.blocks[0])
    x = batches(world_size)[rank].bfloat16()
    loss = loss_of(net, x)
    assert net.blocks[0].up.weight.to_local().dtype == torch.bfloat16, "as it was gathered"
    net.blocks[0].reshard()
    assert group.state is GroupState.SHARDED
    assert net.blocks[0].up.weight.to_local().dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in net.state_dict().values())
    loss.backward()


class Gain(nn.Module):
    """Has a scalar, which is not cut, beside a parameter that is."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(3.0))
        self.scale = nn.Parameter(torch.full((4,), 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain * self.scale


@on_threads(4)
def test_backward_computes_with_the_scalars_of_its_forward(rank: int, world_size: int) -> None:
    """As it does with what forward kept of other parameters."""
    net, x = Gain(), torch.ones(4, requires_grad=True)
    fully_shard(net, reshard_after_forward=2)
    out = net(x)
    with torch.no_grad():
        net.gain.mul_(2.0)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [15.0] * 4
    assert net.gain.item() == 6.0
    assert net(x).tolist() == [30.0] * 4


@on_threads(4)
def test_what_an_optimizer_has_outdated_is_gathered_anew(rank: int, world_size: int) -> None:
    """An optimizer steps after a forward of which no backward came."""
    whole, net = seeded(Net), seeded(Net)
    _shard(net, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, whole)]
    x = batches(world_size)
    run_backward(net, whole, x, rank)
    for grads in (False, True):
        with torch.set_grad_enabled(grads):
            net(x[rank])
        left = GroupState.SHARDED_POST_FORWARD if grads else GroupState.SHARDED
        assert group_of(net.blocks[1]).state is left
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(net(x[rank]), whole(x[rank]))


@on_threads(4)
def test_numbers_that_do_not_divide_are_refused(rank: int, world_size: int) -> None:
    for wrong in (0, 3, 5, -1):
        with pytest.raises(ValueError, match="expected a factor of the 4 ranks"):
            fully_shard(seeded(Net), reshard_after_forward=wrong)
    with pytest.raises(ValueError, match="expected a bool, an int or None, found str"):
        fully_shard(seeded(Net), reshard_after_forward="2")
    with pytest.warns(UserWarning, match="reshard_after_forward=1 keeps full parameters"):
        fully_shard(seeded(Net), reshard_after_forward=1)
