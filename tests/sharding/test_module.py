"""What a module becomes: other methods that run it, its classes, its root."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import fully_shard, register_fsdp_forward_method, share_comm_ctx
from shardwise.frontends.module import disable_fsdp_module_new_init, get_cls_to_fsdp_cls
from shardwise.sharding.states import GroupState
from tests.sharding.nets import (
    WIDTH,
    Block,
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    group_of,
    loss_of,
    seeded,
    sharded_net,
)
from tests.worlds import on_threads

SHARDED = GroupState.SHARDED


class Speaker(nn.Module):
    """Has a second way to be used."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))

    def speak(self, x: torch.Tensor, *, loud: bool = False) -> torch.Tensor:
        """As forward."""
        assert not isinstance(self.head.weight, DTensor)
        if x.numel() == 0:
            raise ArithmeticError
        return self(x) * 2 if loud else self.head(self.block(x))


@on_threads(2)
def test_other_methods_gather_as_forward_does(rank: int, world_size: int) -> None:
    net, whole = seeded(Speaker), seeded(Speaker)
    fully_shard(net.block)
    fully_shard(net)
    net.set_reshard_after_forward(True)
    register_fsdp_forward_method(net, "speak")
    assert net.speak.__doc__ == "As forward."
    x = batches(world_size)
    for loud in (False, True):
        net.speak(x[rank], loud=loud).square().mean().backward()
        for batch in x:
            (whole.speak(batch, loud=loud).square().mean() / world_size).backward()
        assert_same_gradients(net, whole)
    with pytest.raises(ArithmeticError):
        net.speak(torch.empty(0, WIDTH))
    assert group_of(net).state is SHARDED
    net.zero_grad()
    whole.zero_grad()
    net.speak(x[rank]).square().mean().backward()
    average_backward(whole, x)
    assert_same_gradients(net, whole)

    twin = copy.deepcopy(net)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    assert torch.equal(twin.speak(x[rank]), whole(x[rank])), "the copy speaks for itself"

    register_fsdp_forward_method(whole, "speak")
    assert "speak" not in whole.__dict__, "any other module is left as it is"
    with pytest.raises(ValueError, match="has no method 'sing'"):
        register_fsdp_forward_method(net, "sing")


@on_threads(2)
def test_roots_over_the_same_ranks_share_a_transport(rank: int, world_size: int) -> None:
    chunks = [fully_shard(nn.Linear(2, 2)) for _ in range(2)]
    share_comm_ctx(chunks)
    chunks[1](chunks[0](torch.ones(1, 2))).sum().backward()
    assert all(chunk.weight.grad is not None for chunk in chunks)
    shared = {id(group_of(chunk).mesh.shard) for chunk in chunks}
    assert len(shared) == 1
    with pytest.raises(TypeError, match=r"of FSDPLinear, Linear, expected .* an FSDPModule"):
        share_comm_ctx([chunks[0], nn.Linear(2, 2)])


@on_threads(1)
def test_the_classes_that_sharding_makes(rank: int, world_size: int) -> None:
    net = sharded_net()
    assert get_cls_to_fsdp_cls()[Net] is type(net)
    assert get_cls_to_fsdp_cls()[Block] is type(net.blocks[0])
    assert type(type(net)()) is Net, "constructing the class makes a plain module"
    with disable_fsdp_module_new_init():
        bare = type(net)()
        assert type(bare) is Net
        assert not bare.__dict__, "nothing was initialized"
    assert len(type(net)(blocks=1).blocks) == 1
    with pytest.raises(ArithmeticError), disable_fsdp_module_new_init():
        raise ArithmeticError
    assert type(net)().__dict__


@on_threads(1)
def test_only_the_root_can_be_reset(rank: int, world_size: int) -> None:
    net = sharded_net()
    loss_of(net, batches(world_size)[rank]).backward()
    with pytest.raises(RuntimeError, match=r"expected the root.*found a nested FSDPBlock"):
        net.blocks[0].reset_iter_state()
    net.reset_iter_state()
