"""Building a wrapped model: from the meta device, from rank 0's values, in mixed precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    checkpoint_module,
)
from shardwise.frontends.unit import keep_in_full_precision
from shardwise.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap
from tests.corpus.gathering import in_full
from tests.frontends.training import assert_bits, train, trained_twin, wrapped
from tests.sharding.nets import Block, Net, batches, loss_of, seeded
from tests.worlds import on_processes, on_threads


class Tied(nn.Module):
    """An embedding whose weight is the head's too, in another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.block = Block()
        self.head = nn.Sequential(nn.Linear(6, 5, bias=False))
        self.head[0].weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


class Normed(nn.Module):
    """A convolution, a batch norm, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.seen: list[torch.dtype] = []
        self.register_buffer("scale", torch.full((1,), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        self.seen.append(x.dtype)
        x = self.norm(x)
        self.seen += [x.dtype, self.scale.dtype]
        return x * self.scale


# -- values ----------------------------------------------------------------------------------------


@on_threads(2)
def test_all_ranks_get_rank_0s_parameters_and_buffers(rank: int, world_size: int) -> None:
    expected = seeded(Net)
    replicas = [{}, {"sharding_strategy": ShardingStrategy.NO_SHARD}]
    for strategy in (ShardingStrategy.HYBRID_SHARD,):
        for shape in [(2, 1), (1, 2)]:
            mesh = init_device_mesh("cpu", shape)
            replicas.append({"sharding_strategy": strategy, "device_mesh": mesh})
    for arguments in replicas:
        model = wrapped(seeded(Net, seed=rank), sync_module_states=True, **arguments)
        assert_bits(model, expected, str(arguments))
    normed = seeded(Normed, seed=rank)
    normed.norm.running_mean.fill_(rank + 1)
    FullyShardedDataParallel(normed, sync_module_states=True)
    assert normed.norm.running_mean.tolist() == [1, 1, 1, 1], "buffers too"

    different = wrapped(seeded(Net, seed=rank))
    ignored = seeded(Net, seed=rank)
    wrapped(ignored, sync_module_states=True, ignored_modules=[ignored.head])
    assert torch.equal(ignored.head.weight, seeded(Net, seed=rank).head.weight)
    if rank == 1:
        row = different.head.weight.to_local()
        assert not torch.equal(row, expected.head.weight[3:]), "without it every rank has its own"


class Oddities(nn.Module):
    """Parameters and buffers in memory orders and dtypes that process groups do not send."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        rows = torch.arange(24.0).view(6, 4) + 100 * rank
        by_columns = rows.t().contiguous().t()
        self.by_columns = nn.Parameter(by_columns if rank else rows)
        self.register_buffer("images", rows.view(1, 2, 3, 4).to(memory_format=torch.channels_last))
        self.register_buffer("column", rows.clone()[:, 1])
        self.register_buffer("expanded", rows[:1].clone().expand(3, 4))
        self.register_buffer("conjugate", torch.complex(rows, rows + 1).conj())
        self.register_buffer("short", rows.to(torch.int16))
        self.register_buffer("float8", rows.to(torch.float8_e4m3fn))
        self.register_buffer("flag", torch.tensor(rank == 0))


@on_processes(2)
def test_states_in_any_memory_order_and_dtype_are_rank_0s(rank: int, world_size: int) -> None:
    model = Oddities(rank)
    FullyShardedDataParallel(model, sync_module_states=True)
    for name, expected in Oddities(0).state_dict().items():
        found = model.state_dict()[name]
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.equal(found.to(torch.complex64), expected.to(torch.complex64)), name
    beside = model.column._base
    assert beside is not None
    assert beside[:, 0].tolist() == (torch.arange(0.0, 24, 4) + 100 * rank).tolist()


@on_threads(2)
def test_models_on_the_meta_device_are_materialized_unit_by_unit(
    rank: int, world_size: int
) -> None:
    with torch.device("meta"):
        plain, tied, alone = Net(), Tied(), nn.Sequential(nn.Linear(3, 3), Net())
    plain.gain = nn.Parameter(torch.tensor(1.5))
    torch.manual_seed(rank)
    whole_at_once = []

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        whole_at_once.append(sum(p.numel() for p in plain.parameters() if not _is_shard(p)))

    total = sum(p.numel() for p in plain.parameters())
    model = wrapped(plain, param_init_fn=init, sync_module_states=True)
    assert max(whole_at_once) <= total, "one unit after the other"
    assert not any(param.is_meta for param in model.parameters())
    values = [in_full(param.detach()) for param in model.parameters()]
    assert all(value.isfinite().all() for value in values)
    loss_of(model, batches(world_size)[rank]).backward()

    # Rank 0 has read a checkpoint, the others wait for it.
    source = seeded(Net) if rank == 0 else alone[1]
    fill: Any = None if rank == 0 else lambda m: m.to_empty(device="cpu", recurse=False)
    model = wrapped(source, param_init_fn=fill, sync_module_states=True)
    assert_bits(model, seeded(Net))

    model = FullyShardedDataParallel(tied, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    assert model.module.head.module[0].weight is model.module.embed.weight, "still tied"
    model(torch.arange(4)).sum().backward()

    with torch.device("meta"):
        strange = Net()
    with pytest.raises(ValueError, match=r"\(Net\) has gain on the meta device and no reset_param"):
        FullyShardedDataParallel(strange)
    with pytest.raises(ValueError, match="param_init_fn left gain on the meta device on rank"):
        FullyShardedDataParallel(strange, param_init_fn=lambda module: None)


def _is_shard(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) or param.is_meta


@on_threads(2)
def test_units_wrapped_by_hand_and_with_arguments_of_their_own(rank: int, world_size: int) -> None:
    expected, _ = trained_twin(world_size)
    net = seeded(Net)
    untouched = wrap(net.head)
    assert untouched is net.head
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, reshard_after_forward=False):
        for index, block in enumerate(net.blocks):
            net.blocks[index] = wrap(block)
        net.head = wrap(net.head, sharding_strategy=ShardingStrategy.NO_SHARD)
    assert not net.blocks[0].settings.reshard_after_forward
    model = FullyShardedDataParallel(net)
    train(model, rank, world_size)
    assert_bits(model, expected)

    # A process group takes the place of the outer mesh.
    head = {"reshard_after_forward": False, "process_group": dist.group.WORLD}
    policy = CustomPolicy(lambda m: head if isinstance(m, nn.Linear) else isinstance(m, Block))
    model = wrapped(auto_wrap_policy=policy, device_mesh=init_device_mesh("cpu", (world_size,)))
    assert model.head.settings.reshard_after_forward is False
    assert model.blocks[0].settings.reshard_after_forward is None
    train(model, rank, world_size)
    assert_bits(model, expected)


@on_threads(2)
def test_checkpointed_modules_compute_forward_again(rank: int, world_size: int) -> None:
    expected, _ = trained_twin(world_size)
    runs = []

    class Counted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return super().forward(x)

    def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return FullyShardedDataParallel(checkpoint_module(module), *args, **kwargs)

    net = seeded(Net)
    for block in net.blocks:
        block.__class__ = Counted
    names = list(net.state_dict())
    model = wrapped(net, auto_wrapper_callable=wrapper)
    assert isinstance(model.blocks[0].module, Counted)
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    train(model, rank, world_size)
    assert_bits(model, expected)
    assert len(runs) == 2 * 2 * 3, "two steps, three blocks, each forward twice"
    train(twin, rank, world_size)
    assert_bits(twin, expected, "a copy")

    outside = checkpoint_module(wrapped())
    train(outside, rank, world_size)
    assert_bits(outside, expected, "around the wrapper")


# -- dtypes ----------------------------------------------------------------------------------------


@on_threads(2)
def test_mixed_precision_says_what_is_computed_in_which_dtype(rank: int, world_size: int) -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        Normed(), mixed_precision=low, auto_wrap_policy=ModuleWrapPolicy({nn.Conv1d})
    )
    out = model(torch.randn(2, 3, 5))
    assert out.dtype == torch.bfloat16
    assert model.module.seen == [torch.bfloat16, torch.bfloat16, torch.bfloat16]
    assert isinstance(model.norm, FullyShardedDataParallel), "a unit of its own"
    assert model.norm.module.running_mean.dtype == torch.float32, "and in full precision"
    assert model.norm.weight.dtype == torch.float32
    out.float().sum().backward()
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())
    assert model.scale.dtype == torch.bfloat16
    assert all(value.dtype != torch.bfloat16 for value in model.state_dict().values())

    _inputs_are_cast_where_asked_for()
    _gradients_stay_low_where_asked_for(rank, world_size)


def test_a_module_in_full_precision_casts_inputs_and_outputs() -> None:
    layer = nn.Linear(2, 2)
    keep_in_full_precision(layer)
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    assert layer(torch.ones(1, 2, dtype=torch.float16)).dtype == torch.float16
    assert layer(torch.ones(1, 2)).dtype == torch.float32
    assert seen == [torch.float32, torch.float32]


class Watching(nn.Module):
    def __init__(self, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return (x * self.weight.to(x.dtype)).float()


def _inputs_are_cast_where_asked_for() -> None:
    low, full = torch.bfloat16, torch.float32
    for inner, root, expected in (
        (False, True, [low, full]),
        (True, True, [low, low]),
        (False, False, [full, full]),
        (True, False, [full, low]),
    ):
        seen: list[torch.dtype] = []
        precision = MixedPrecision(
            param_dtype=low, cast_forward_inputs=inner, cast_root_forward_inputs=root
        )
        net = nn.Sequential(Watching(seen), Watching(seen))
        net[1] = FullyShardedDataParallel(net[1], mixed_precision=precision)
        FullyShardedDataParallel(net, mixed_precision=precision)(torch.ones(4))
        assert seen == expected, (inner, root)


def _gradients_stay_low_where_asked_for(rank: int, world_size: int) -> None:
    for keep, reduce, expected in (
        (True, None, torch.bfloat16),
        (True, torch.float32, torch.float32),
        (False, None, torch.float32),
    ):
        precision = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=reduce, keep_low_precision_grads=keep
        )
        model = wrapped(mixed_precision=precision)
        for step in range(2):
            model(batches(world_size, step)[rank]).float().square().mean().backward()
        assert {param.grad.dtype for param in model.parameters()} == {expected}
        assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_batch_norms_in_checkpointed_modules_count_once_what_they_see_twice() -> None:
    def norms(**settings: Any) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **settings), nn.Tanh())

    for settings in ({}, {"momentum": None}, {"track_running_stats": False}):
        plain, again = norms(**settings), checkpoint_module(norms(**settings))
        for scale in (1.0, 3.0):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)) * scale
            for model in (plain, again):
                model(x).square().sum().backward()
        found, expected = again.state_dict(), plain.state_dict()
        assert list(found) == list(expected), settings
        assert all(torch.equal(found[name], expected[name]) for name in expected), settings
        for mine, other in zip(again.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and other.grad is not None
            assert torch.equal(mine.grad, other.grad), settings
