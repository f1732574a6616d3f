"""``FullyShardedDataParallel`` trains as one process does, whatever its arguments."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise
from shardwise import (
    BackwardPrefetch,
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from tests.corpus.gathering import in_full
from tests.frontends.training import STRATEGIES, assert_bits, train, trained_twin, wrapped
from tests.sharding.nets import Block, Net, average_backward, batches, loss_of, seeded
from tests.worlds import Ranks, on_threads

# -- names -----------------------------------------------------------------------------------------


def test_arguments_are_torchs_in_torchs_order() -> None:
    theirs = list(inspect.signature(torch_fsdp.FullyShardedDataParallel.__init__).parameters)
    ours = list(inspect.signature(FullyShardedDataParallel.__init__).parameters)

    assert ours[: len(theirs)] == theirs
    own = ["reshard_after_forward", "auto_wrapper_callable", "transport", "wire"]
    assert ours[len(theirs) :] == own


def test_every_public_method_of_torchs_is_our_own() -> None:
    theirs = {name for name in vars(torch_fsdp.FullyShardedDataParallel) if name[0] != "_"}
    ours = {name for each in FullyShardedDataParallel.__mro__ for name in vars(each)}

    assert theirs <= ours


def test_policies_and_enums_are_torchs() -> None:
    names = [name for name in shardwise.__all__ if hasattr(torch_fsdp, name)]
    shared = {name for name in names if getattr(shardwise, name) is getattr(torch_fsdp, name)}

    assert {"ShardingStrategy", "StateDictType", "MixedPrecision", "CPUOffload"} <= shared
    assert {*names, "GradientReductionHandle"} - shared == {
        "FSDPModule",
        "FullyShardedDataParallel",
        "GradientReductionHandle",  # which torch has from 2.15 on
        "UnshardHandle",
        "fully_shard",
        "register_fsdp_forward_method",
        "share_comm_ctx",
        "wrap",
    }


# -- strategies and meshes -------------------------------------------------------------------------


@on_threads(2)
def test_the_ranks_of_a_group_train_as_one_process_does_bit_for_bit(
    rank: int, world_size: int
) -> None:
    """Other arguments are doors of ``tests/corpus``, which ``tests/parity`` trains through."""
    expected, _ = trained_twin(world_size)
    for arguments in (
        {"process_group": dist.group.WORLD},
        {"process_group": dist.group.WORLD, "sharding_strategy": ShardingStrategy.NO_SHARD},
        {
            "device_mesh": init_device_mesh("cpu", (1, 2)),
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        },
        {"auto_wrap_policy": None},
        {"auto_wrap_policy": "auto"},
    ):
        model = wrapped(**arguments)
        train(model, rank, world_size)
        assert_bits(model, expected, str(arguments))


def _hybrid(rank: int, world_size: int) -> list[tuple[int, ...]]:
    column = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    row = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    meshes = []
    grads = []
    for arguments in (
        {},  # two ranks a host, as LOCAL_WORLD_SIZE says
        {"process_group": (row, column)},
        {"device_mesh": init_device_mesh("cpu", (2, 2))},
        {"device_mesh": init_device_mesh("cpu", (4, 1))},
    ):
        model = wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD, **arguments)
        loss_of(model, batches(world_size)[rank]).backward()
        meshes.append(tuple(model.settings.mesh.shape))
        grads.append([in_full(param.grad) for param in model.parameters()])
        assert model.settings.mesh.mesh.tolist()[rank // 2 if len(meshes) < 4 else rank] == (
            [[0, 1], [2, 3]][rank // 2] if len(meshes) < 4 else [rank]
        )
    expected = seeded(Net)
    average_backward(expected, batches(world_size))
    for found in grads:
        for grad, param in zip(found, expected.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad)
    one, other = (wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD) for _ in range(2))
    assert one.settings.mesh is other.settings.mesh, "modules wrapped one by one share groups"
    return meshes


@pytest.mark.usefixtures("one_host")
def test_hybrid_sharding_over_hosts_groups_and_meshes(threads: Ranks) -> None:
    assert threads(_hybrid, 4) == [[(2, 2), (2, 2), (2, 2), (4, 1)]] * 4


@on_threads(2)
def test_what_does_not_fit_is_said_in_full(
    rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = init_device_mesh("cpu", (1, 2))
    one = init_device_mesh("cpu", (2,))
    world = dist.group.WORLD
    hybrid, full, none = (
        ShardingStrategy.HYBRID_SHARD,
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.NO_SHARD,
    )
    for message, arguments in (
        ("expected one of them", {"process_group": world, "device_mesh": one}),
        (
            "expects two process groups, found one",
            {"process_group": world, "sharding_strategy": hybrid},
        ),
        ("expects one group, found 2", {"process_group": (world, world)}),
        ("expects a 2-D mesh", {"device_mesh": one, "sharding_strategy": hybrid}),
        ("HYBRID_SHARD takes a 2-D mesh", {"device_mesh": two, "sharding_strategy": full}),
        (r"expects a shape of \(N, 1\)", {"device_mesh": two, "sharding_strategy": none}),
    ):
        with pytest.raises(ValueError, match=message):
            FullyShardedDataParallel(nn.Linear(2, 2), **arguments)
    with pytest.raises(TypeError, match="sharding_strategy: found 'FULL_SHARD', expected"):
        FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy="FULL_SHARD")
    with pytest.raises(ValueError, match="already been applied"):
        FullyShardedDataParallel(FullyShardedDataParallel(nn.Linear(2, 2)).module)
    with pytest.raises(ValueError, match="has no forward of its own"):
        FullyShardedDataParallel(nn.ModuleList([nn.Linear(2, 2)]))
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="found the Linear that is to be wrapped"):
        FullyShardedDataParallel(layer, ignored_modules=[layer])
    with pytest.raises(TypeError, match="expected modules or parameters, found str"):
        FullyShardedDataParallel(layer, ignored_states=iter(["weight"]))
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE: found no such environment variable"):
        wrapped(sharding_strategy=hybrid)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE: found '3', expected a divisor"):
        wrapped(sharding_strategy=hybrid)


@on_threads(1)
def test_what_has_no_meaning_here_says_so_once(rank: int, world_size: int) -> None:
    for message, arguments in (
        ("use_orig_params: parameters are never flattened", {"use_orig_params": False}),
        ("limit_all_gathers: at most two units", {"limit_all_gathers": False}),
        (
            "backward_prefetch: BACKWARD_POST gathers one unit ahead",
            {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        ),
        ("device_id: 0 has no effect where ranks compute on the CPU", {"device_id": 0}),
    ):
        with pytest.warns(UserWarning, match=message) as caught:
            wrapped(**arguments)
        assert len(caught) == 1, "once, and not for every unit"
    wrapped(device_id=torch.device("cpu"), limit_all_gathers=True, use_orig_params=True)


# -- the wrapper -----------------------------------------------------------------------------------


@on_threads(2)
def test_the_wrapper_has_the_names_and_attributes_of_what_it_wraps(
    rank: int, world_size: int
) -> None:
    plain = seeded(Net)
    model = wrapped()
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in nn.Sequential(model).named_parameters()] == [
        f"0.{name}" for name in names
    ]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert isinstance(model.module, Net)
    assert isinstance(model.module, FSDPModule)
    assert model.blocks is model.module.blocks
    assert isinstance(model.blocks[0], FullyShardedDataParallel)
    assert isinstance(model.blocks[0].module, Block)
    assert model.get_parameter("blocks.1.up.weight") is model.blocks[1].up.weight
    with pytest.raises(AttributeError, match="'FSDPNet' object has no attribute 'nothing'"):
        _ = model.nothing
    listed = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert isinstance(listed[1], nn.ReLU)

    assert FullyShardedDataParallel.fsdp_modules(model) == [model, *model.blocks]
    assert FullyShardedDataParallel.fsdp_modules(nn.Sequential(model, listed), root_only=True) == [
        model,
        listed,
    ]
    assert model.check_is_root()
    assert not model.blocks[0].check_is_root()
    assert (model.rank, model.world_size) == (rank, world_size)
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert model.compute_device == torch.device("cpu")


@pytest.mark.usefixtures("one_host")
@on_threads(2)
def test_gradients_wait_in_no_sync_of_the_outermost_wrapper(rank: int, world_size: int) -> None:
    for strategy in STRATEGIES:
        model = wrapped(sharding_strategy=strategy)
        with model.no_sync():
            loss_of(model, batches(world_size)[rank]).backward()
            assert all(param.grad is None for param in model.parameters())
    inner = model.blocks[0]
    with pytest.raises(RuntimeError, match="no_sync: found a wrapper"), inner.no_sync():
        pass
    with pytest.raises(RuntimeError, match="clip_grad_norm_: found a wrapper"):
        inner.clip_grad_norm_(1.0)


@on_threads(2)
def test_the_wrapper_clips_by_every_norm(rank: int, world_size: int) -> None:
    for norm_type in (2.0, 0.0, float("inf"), float("-inf")):
        model, whole = wrapped(), seeded(Net)
        x = batches(world_size)
        loss_of(model, x[rank]).backward()
        average_backward(whole, x)
        norm = model.clip_grad_norm_(0.1, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type)
        torch.testing.assert_close(norm, expected)


@on_threads(2)
def test_a_comm_hook_reduces_in_place_of_the_reduce_scatter(rank: int, world_size: int) -> None:
    calls = []

    def hook(state: list[int], grads: torch.Tensor, output: torch.Tensor) -> None:
        state.append(grads.numel())
        dist.all_reduce(grads)
        output.copy_(3 * grads.chunk(world_size)[rank] / world_size)

    model = wrapped()
    model.register_comm_hook(calls, hook)
    loss_of(model, batches(world_size)[rank]).backward()
    expected = seeded(Net)
    average_backward(expected, batches(world_size))
    for name, param in model.named_parameters():
        factor = 1 if name == "gain" else 3  # a scalar is not cut: no hook sees it
        wanted = expected.get_parameter(name).grad * factor
        torch.testing.assert_close(in_full(param.grad), wanted)
    assert len(calls) == 4, "one for every unit"
    replicated = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(NotImplementedError, match="NO_SHARD replicates parameters"):
        replicated.register_comm_hook(None, hook)


@on_threads(2)
def test_what_is_ignored_stays_as_it_is(rank: int, world_size: int) -> None:
    for arguments in (
        lambda net: {"ignored_modules": [net.head]},
        lambda net: {"ignored_states": [net.head]},
        lambda net: {"ignored_states": list(net.head.parameters())},
    ):
        net = seeded(Net)
        model = wrapped(net, **arguments(net))
        assert not isinstance(model.head.weight, DTensor)
        assert isinstance(model.gain, DTensor)
        loss_of(model, batches(world_size)[rank]).backward()
        alone = seeded(Net)
        loss_of(alone, batches(world_size)[rank]).backward()
        assert torch.equal(model.head.weight.grad, alone.head.weight.grad), "not reduced"
    net = seeded(Net)
    model = wrapped(net, ignored_modules=[net.blocks[0]])
    wrapping = [isinstance(block, FullyShardedDataParallel) for block in net.blocks]
    assert wrapping == [False, True, True]
    assert not isinstance(net.blocks[0].up.weight, DTensor), "nor is what is inside of it"
    with pytest.raises(ValueError, match="expected modules that are not wrapped yet"):
        FullyShardedDataParallel(nn.Sequential(model), ignored_modules=[model])
