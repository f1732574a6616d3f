"""What ``fully_shard`` does to a module, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise import FSDPModule, fully_shard
from shardwise._torch.fsdp import ShardPlacementResult
from shardwise.sharding.state import gather_in_order, state_of
from tests.sharding.nets import Block, Net, group_of, sharded_net
from tests.worlds import on_processes, on_threads


def _raises(kind: type[BaseException], fn: Callable[[], object]) -> str:
    try:
        fn()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}")


# -- what it makes -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_threads()
def test_parameters_become_dtensors_under_their_names(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    original = Net()
    net = sharded_net()

    assert [name for name, _ in net.named_parameters()] == [
        name for name, _ in original.named_parameters()
    ]
    for (name, param), whole in zip(net.named_parameters(), original.parameters(), strict=True):
        assert isinstance(param, DTensor), name
        assert isinstance(param, nn.Parameter), name
        expected = Replicate() if whole.ndim == 0 else Shard(0)
        assert param.placements == (expected,), name
        assert param.shape == whole.shape, name
        assert torch.equal(param.full_tensor(), whole), name
        rows = param.to_local().shape[0] if whole.ndim else 1
        assert rows <= -(-max(whole.shape[:1], default=1) // world_size), name

    assert isinstance(net, FSDPModule)
    assert isinstance(net, TorchFSDPModule)
    assert isinstance(net, Net)
    assert type(net).__name__ == "FSDPNet"
    assert isinstance(net.blocks[0], Block)
    assert not isinstance(net.head, FSDPModule)
    assert fully_shard.state(net) is state_of(net)  # type: ignore[attr-defined]


@on_processes(2, env={"SHARDWISE_TRANSPORT": "c10d"})
def test_no_full_parameter_or_gradient_is_left_after_a_step(rank: int, world_size: int) -> None:
    net = sharded_net()
    net(torch.ones(2, 6)).sum().backward()
    for state in (state_of(module) for module in net.modules()):
        if state is None:
            continue
        for group in state.groups:
            for param in group.params:
                assert param.full is not None
                shared = param.layout.dim is None
                assert shared or param.full.untyped_storage().size() == 0, param.fqn
                assert param.full.grad is None, param.fqn


@on_threads(2)
def test_unshard_and_reshard_by_hand(rank: int, world_size: int) -> None:
    net = sharded_net()
    block = net.blocks[1]
    whole = block.up.weight.full_tensor()

    handle = block.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    handle.wait()
    assert not isinstance(block.up.weight, DTensor)
    assert torch.equal(block.up.weight, whole)
    assert isinstance(net.blocks[0].up.weight, DTensor), "unshard is not recursive"
    assert block.unshard() is None
    block.reshard()
    block.reshard()
    assert isinstance(block.up.weight, DTensor)

    keys = net.state_dict()
    block.unshard()
    assert all(isinstance(value, DTensor) for value in net.state_dict().values())
    assert list(keys) == list(net.state_dict())


@on_threads(2)
def test_several_modules_are_one_group(rank: int, world_size: int) -> None:
    net = Net()
    pair = [net.blocks[0], net.blocks[1]]
    assert fully_shard(pair) is pair
    group = group_of(net.blocks[0])
    assert group_of(net.blocks[1]) is group
    assert len(group.params) == 6


@on_threads(2)
def test_a_state_dict_that_is_not_sharded_is_not_assigned(rank: int, world_size: int) -> None:
    net = sharded_net()
    net(torch.ones(2, 6))
    values = {name: value.full_tensor() for name, value in net.state_dict().items()}
    message = _raises(ValueError, lambda: net.load_state_dict(values, assign=True))
    assert "blocks.0.up.weight on rank" in message
    assert "expected a DTensor" in message
    assert isinstance(net.blocks[0].up.weight, DTensor), "what was refused does not stay"


@on_threads(1)
def test_slicing_a_sharded_sequential_gives_a_plain_one(rank: int, world_size: int) -> None:
    layers = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    part = layers[:2]
    assert type(part) is nn.Sequential
    assert len(part) == 2


@on_threads(2)
def test_groups_are_gathered_ahead_in_order_if_asked_for(rank: int, world_size: int) -> None:
    net = sharded_net()
    states: list[str] = []

    def note(*_: object) -> None:
        states.append(" ".join(group_of(b).state.value for b in net.blocks))

    net.blocks[0].up.register_forward_hook(note)
    gather_in_order(net)
    net(torch.ones(2, 6))
    assert states == ["unsharded unsharding sharded"]


# -- what it refuses ---------------------------------------------------------------------------


@on_threads(2)
def test_wrong_use_says_what_to_do(rank: int, world_size: int) -> None:
    """More of it is in ``test_refusals.py`` and ``test_device_mesh.py``."""
    assert "empty list" in _raises(ValueError, lambda: fully_shard([]))
    for wrong, found in (
        (None, "found None"),
        (nn.Linear, "found <class"),
        (torch.ones(2), "found tensor(1.)"),
        (nn.Linear(2, 2).parameters(), "found Parameter"),
        (["linear"], "found 'linear'"),
    ):
        assert found in _raises(TypeError, functools.partial(fully_shard, wrong))  # type: ignore[arg-type]
    with torch.device("meta"):
        unborn = fully_shard(nn.Linear(3, 3))
    message = _raises(RuntimeError, lambda: unborn(torch.ones(1, 3)))
    assert "weight, bias are on the meta device" in message
    assert f"rank {rank}" in message

    nested = sharded_net()
    nested.blocks[0](torch.ones(1, 6))
    message = _raises(RuntimeError, lambda: nested(torch.ones(1, 6)))
    assert "blocks.0 has already run" in message


@pytest.mark.parametrize("kept", [True, False])
@on_threads(4)
def test_parameters_of_one_call_on_two_meshes(rank: int, world_size: int, kept: bool | int) -> None:
    world = init_device_mesh("cpu", (world_size,))
    parts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "part"))
    part = FSDPMeshInfo(parts["part"], shard_mesh_dim=0)
    net, whole = Net(), Net()
    whole.load_state_dict(net.state_dict())

    def place(param: nn.Parameter) -> Shard | ShardPlacementResult | None:
        if param.shape == (7,):  # the biases of the blocks
            return ShardPlacementResult(placement=None, mesh_info=part)
        return Shard(param.ndim - 1) if param.ndim else None

    fully_shard(net, mesh=world, shard_placement_fn=place, reshard_after_forward=kept)
    bias, weight = net.blocks[0].up.bias, net.blocks[0].up.weight
    assert isinstance(bias, DTensor)
    assert bias.device_mesh == parts["part"]
    assert bias.to_local().shape[0] in (3, 4), "half of the rows"
    assert weight.device_mesh == world
    assert sorted(len(group.params) for group in state_of(net).groups) == [3, 9]  # type: ignore[union-attr]

    # Ranks of one part see different data, and each part the same: both means are over two.
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        net(x[parts["part"].get_local_rank()]).square().mean().backward()
        for each in x:
            (whole(each).square().mean() / 2).backward()
    for (name, param), other in zip(net.named_parameters(), whole.parameters(), strict=True):
        assert param.grad is not None, name
        torch.testing.assert_close(param.grad.full_tensor(), other.grad, msg=name)
