"""``XlaFullyShardedDataParallel``: PyTorch/XLA's arguments and defaults, on the same runtime."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import (
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    XlaFullyShardedDataParallel,
)
from shardwise.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from tests.corpus.gathering import in_full
from tests.frontends.training import assert_bits, train, trained_twin
from tests.sharding.nets import Block, Net, average_backward, batches, loss_of, seeded
from tests.worlds import on_threads

by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=50)
by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


@on_threads(2)
def test_it_trains_as_one_process_does(rank: int, world_size: int) -> None:
    expected, _ = trained_twin(world_size)
    nested = seeded(Net)
    for index, block in enumerate(nested.blocks):
        nested.blocks[index] = XlaFullyShardedDataParallel(block)

    for model in (
        XlaFullyShardedDataParallel(nested),
        XlaFullyShardedDataParallel(seeded(Net), auto_wrap_policy=by_size),
        XlaFullyShardedDataParallel(seeded(Net, seed=rank), sync_module_states=True),
        XlaFullyShardedDataParallel(
            seeded(Net), shard_param_on_dim_0=True, disable_reshard_on_root=False
        ),
    ):
        assert isinstance(model, FullyShardedDataParallel)
        train(model, rank, world_size)
        assert_bits(model, expected)
    assert isinstance(nested.blocks[0], XlaFullyShardedDataParallel)
    assert model.settings.reshard_after_forward is True
    assert XlaFullyShardedDataParallel(nn.Linear(2, 2)).settings.reshard_after_forward is None
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD


@on_threads(2)
def test_its_state_dict_is_this_ranks_shards(rank: int, world_size: int) -> None:
    model = XlaFullyShardedDataParallel(seeded(Net), auto_wrap_policy=by_class)
    state = model.state_dict()
    assert list(state) == list(Net().state_dict())
    for name, param in model.named_parameters():
        assert not isinstance(state[name], DTensor)
        assert torch.equal(state[name], param.to_local())
    other = XlaFullyShardedDataParallel(seeded(Net, seed=9), auto_wrap_policy=by_class)
    other.load_state_dict(state)
    assert_bits(other, seeded(Net))
    XlaFullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    assert model.state_dict()["head.weight"].shape == (5, 6)


@on_threads(2)
def test_its_dtypes(rank: int, world_size: int) -> None:
    low = XlaFullyShardedDataParallel(seeded(Net), compute_dtype=torch.bfloat16)
    assert low(batches(world_size)[rank]).dtype == torch.bfloat16
    assert low.mixed_precision.buffer_dtype == torch.bfloat16
    model = XlaFullyShardedDataParallel(
        seeded(Net), compute_dtype=torch.bfloat16, fp32_reduce_scatter=True
    )
    assert model.mixed_precision.reduce_dtype == torch.float32
    loss_of(model, batches(world_size)[rank]).backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


@on_threads(4)
def test_it_shards_over_groups_of_ranks(rank: int, world_size: int) -> None:
    groups = [[0, 2], [1, 3]]
    model = XlaFullyShardedDataParallel(
        seeded(Net), sharding_groups=groups, sharding_rank=rank // 2, sharding_world_size=2
    )
    assert model.world_size == 2
    loss_of(model, batches(world_size)[rank]).backward()
    expected = seeded(Net)
    average_backward(expected, batches(world_size)[groups[rank % 2]])
    for param, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(in_full(param.grad), wanted.grad), "over its own group alone"
    with pytest.raises(
        ValueError, match=f"sharding_rank: found .* on rank {rank}, expected {rank // 2}"
    ):
        XlaFullyShardedDataParallel(Net(), sharding_groups=groups, sharding_rank=7)
    with pytest.raises(ValueError, match=f"sharding_groups: found rank {rank} in . of the lists"):
        XlaFullyShardedDataParallel(Net(), sharding_groups=[[rank], [rank]])
    with pytest.raises(ValueError, match="found process_group and sharding_groups"):
        XlaFullyShardedDataParallel(
            Net(), sharding_groups=groups, process_group=torch.distributed.group.WORLD
        )
    with pytest.raises(ValueError, match="sharding_world_size: found 2 on rank"):
        XlaFullyShardedDataParallel(Net(), sharding_world_size=2)


@on_threads(1)
def test_what_has_no_meaning_here_says_so_once(rank: int, world_size: int) -> None:
    for argument, value in (
        ("flatten_parameters", True),
        ("execute_sharding_on_init", False),
        ("optimization_barrier_in_forward", False),
        ("optimization_barrier_in_backward", False),
        ("mark_step_on_finalization", True),
        ("pin_layout_in_collective_ops", False),
        ("coalesce_all_gather_ops", True),
        ("reduce_scatter_bucket_size_mb", 8),
        ("all_gather_bucket_size_mb", 8),
    ):
        with pytest.warns(UserWarning, match=f"^{argument}: ") as caught:
            XlaFullyShardedDataParallel(seeded(Net), auto_wrap_policy=by_class, **{argument: value})
        assert len(caught) == 1
        assert caught[0].filename == __file__, "it points at the caller"


@on_threads(2)
def test_it_tells_how_its_shards_are_cut(rank: int, world_size: int) -> None:
    model = XlaFullyShardedDataParallel(seeded(Net), auto_wrap_policy=by_class)
    parts = model.get_shard_metadata()["shard_info"]
    assert list(parts) == list(Net().state_dict())
    for name, rows in model.state_dict().items():
        assert parts[name]["shape"] == list(model.get_parameter(name).shape), name
        assert parts[name]["sizes"] == list(rows.shape), name
    assert parts["head.weight"]["offsets"] == [3 * rank, 0]
