"""Every switch of ``FSDPModule`` does what torch says of it, and every branch of it shows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.group_state import GroupState
from shardwise.sharding.hooks import state_of
from shardwise.sharding.module import disable_fsdp_module_new_init, get_cls_to_fsdp_cls
from shardwise.sharding.root import Root
from shardwise.transport.select import select_transport
from tests.sharding.nets import (
    WIDTH,
    Block,
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    loss_of,
    seeded,
    sharded_net,
)

Ranks = Callable[..., list[Any]]

SHARDED, UNSHARDING, UNSHARDED = GroupState.SHARDED, GroupState.UNSHARDING, GroupState.UNSHARDED


def _group(module: nn.Module) -> ParamGroup:
    return state_of(module).groups[0]


def _states(net: Net) -> list[GroupState]:
    return [_group(block).state for block in net.blocks]


def _hybrid(world_size: int) -> DeviceMesh:
    shape = (2, world_size // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _sharded_modules(net: nn.Module) -> list[FSDPModule]:
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


# -- when gradients are reduced ----------------------------------------------------------------


def _accumulates(rank: int, world_size: int) -> None:
    net, whole = sharded_net(), seeded(Net)
    net.set_requires_gradient_sync(False)
    for step in range(2):
        loss_of(net, batches(world_size, step)[rank]).backward()
        assert all(param.grad is None for param in net.parameters())
        average_backward(whole, batches(world_size, step))
    net.set_requires_gradient_sync(True)
    loss_of(net, batches(world_size, 2)[rank]).backward()
    average_backward(whole, batches(world_size, 2))
    assert_same_gradients(net, whole)


def test_without_gradient_sync_gradients_wait_for_the_next_backward_with_it(ranks: Ranks) -> None:
    ranks(_accumulates, 2)


def _own_group_only(rank: int, world_size: int) -> None:
    x = batches(world_size)[rank]
    net = sharded_net()
    net.set_requires_gradient_sync(False, recurse=False)
    loss_of(net, x).backward()
    assert net.head.weight.grad is None
    assert net.blocks[0].up.weight.grad is not None

    net = sharded_net(mesh=_hybrid(world_size))
    net.set_requires_all_reduce(False, recurse=False)
    loss_of(net, x).backward()
    assert net.head.weight.grad is None
    assert net.blocks[0].up.weight.grad is not None


def test_either_can_be_switched_off_for_one_group(ranks: Ranks) -> None:
    ranks(_own_group_only, 2)


class Choosy(nn.Module):
    """Two layers of one group, of which a forward may use the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def _without_all_reduce(rank: int, world_size: int, last_uses_both: bool) -> None:
    net, whole = seeded(Choosy), seeded(Choosy)
    fully_shard(net, mesh=_hybrid(world_size))
    net.set_requires_all_reduce(False)
    for step in range(2):
        loss_of(net, batches(world_size, step)[rank]).backward()
        average_backward(whole, batches(world_size, step))
        assert all(param.grad is None for param in net.parameters()), "held until the all-reduce"
    net.set_requires_all_reduce(True)
    x = batches(world_size, 2)
    net(x[rank], last_uses_both).square().mean().backward()
    for batch in x:
        (whole(batch, last_uses_both).square().mean() / world_size).backward()
    assert_same_gradients(net, whole)


@pytest.mark.parametrize("last_uses_both", [True, False], ids=["all used", "one unused at last"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_reduce_scatter_now_and_all_reduce_later(
    ranks: Ranks, world_size: int, last_uses_both: bool
) -> None:
    ranks(_without_all_reduce, world_size, last_uses_both)


def _sync_includes_all_reduce(rank: int, world_size: int) -> None:
    net, whole = sharded_net(mesh=_hybrid(world_size)), seeded(Net)
    x = batches(world_size)
    net.set_requires_all_reduce(False)
    loss_of(net, x[rank]).backward()
    net.set_requires_gradient_sync(True)
    loss_of(net, x[rank]).backward()
    for _ in range(2):
        average_backward(whole, x)
    assert_same_gradients(net, whole)


def test_gradient_sync_switches_both_collectives(ranks: Ranks) -> None:
    ranks(_sync_includes_all_reduce, 2)


def _not_last(rank: int, world_size: int) -> None:
    net, whole = sharded_net(), seeded(Net)
    net.set_is_last_backward(False)
    for step in range(3):
        net.set_is_last_backward(step == 2)
        x = batches(world_size, step)
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        if step == 0:
            assert net.blocks[0].up.weight.grad is None, "the last reduction is still under way"
    assert_same_gradients(net, whole)


def test_reductions_outlive_a_backward_that_is_not_the_last(ranks: Ranks) -> None:
    ranks(_not_last, 2)


# -- when parameters are freed -----------------------------------------------------------------


def _after_forward(rank: int, world_size: int) -> None:
    x = batches(world_size)[rank]
    net, whole = sharded_net(), seeded(Net)
    average_backward(whole, batches(world_size))

    net.set_reshard_after_forward(False)
    loss = loss_of(net, x)
    assert _states(net) == [UNSHARDED] * 3
    loss.backward()
    assert_same_gradients(net, whole)
    net.zero_grad()

    net.set_reshard_after_forward(True)
    loss = loss_of(net, x)
    assert _states(net) == [SHARDED] * 3
    assert _group(net).state is SHARDED, "the root too, once it is said"
    loss.backward()
    assert_same_gradients(net, whole)

    net.set_reshard_after_forward(False, recurse=False)
    net(x)
    assert _group(net).state is UNSHARDED
    assert _states(net) == [SHARDED] * 3
    for wrong in (1, None):
        with pytest.raises(ValueError, match="expected a bool"):
            net.set_reshard_after_forward(wrong)


def test_reshard_after_forward(ranks: Ranks) -> None:
    ranks(_after_forward, 2)


def _no_longer_kept(rank: int, world_size: int, between: bool) -> None:
    x = batches(world_size)
    net, whole = sharded_net(reshard_after_forward=2), seeded(Net)
    loss = loss_of(net, x[rank])
    assert _states(net) == [GroupState.KEPT] * 3
    if not between:
        loss.backward()
        loss = torch.zeros(())
    net.set_reshard_after_forward(True)
    if between:
        assert _states(net) == [SHARDED] * 3
        loss.backward()
    loss = loss_of(net, x[rank])
    assert _states(net) == [SHARDED] * 3
    loss.backward()
    for _ in range(2):
        average_backward(whole, x)
    assert_same_gradients(net, whole)


@pytest.mark.parametrize("between", [True, False], ids=["before backward", "after backward"])
def test_a_bool_takes_the_place_of_an_int(ranks: Ranks, between: bool) -> None:
    ranks(_no_longer_kept, 4, between)


def _after_backward(rank: int, world_size: int) -> None:
    x = batches(world_size)
    net, whole = sharded_net(), seeded(Net)
    net.set_reshard_after_backward(False)
    for sync in (False, True):
        net.set_requires_gradient_sync(sync)
        loss_of(net, x[rank]).backward()
        assert _states(net) == [UNSHARDED] * 3
        assert _group(net).state is UNSHARDED
        average_backward(whole, x)
    net.set_reshard_after_backward(True, recurse=False)
    loss_of(net, x[rank]).backward()
    average_backward(whole, x)
    assert _states(net) == [UNSHARDED] * 3
    assert _group(net).state is SHARDED
    for module in _sharded_modules(net):
        module.reshard()
    assert_same_gradients(net, whole)


def test_reshard_after_backward(ranks: Ranks) -> None:
    ranks(_after_backward, 2)


# -- what is gathered, when --------------------------------------------------------------------


def _prefetches(rank: int, world_size: int) -> None:
    net = sharded_net(transport="collectives")  # which gathers literally whenever it could
    first, second, third = net.blocks
    seen: list[list[GroupState]] = []
    for module in (first.up, second.up):
        module.register_forward_hook(lambda *_: seen.append(_states(net)))
    third.up.register_full_backward_hook(lambda *_: seen.append(_states(net)))
    x = batches(world_size)[rank]

    def step() -> list[list[GroupState]]:
        seen.clear()
        loss_of(net, x).backward()
        return list(seen)

    assert step() == [
        [UNSHARDED, SHARDED, SHARDED],
        [SHARDED, UNSHARDED, SHARDED],
        [SHARDED, UNSHARDING, UNSHARDED],
    ], "the first forward knows no order; backward knows it from forward"
    assert step()[:2] == [[UNSHARDED, UNSHARDING, SHARDED], [SHARDED, UNSHARDED, UNSHARDING]]

    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([first])
    assert step() == [
        [UNSHARDED, UNSHARDING, UNSHARDING],
        [SHARDED, UNSHARDED, UNSHARDING],
        [UNSHARDING, SHARDED, UNSHARDED],
    ]
    first.set_modules_to_forward_prefetch([third])
    assert step()[0] == [UNSHARDED, SHARDED, UNSHARDING], "instead of the expected one"
    first.set_modules_to_forward_prefetch([])
    third.set_modules_to_backward_prefetch([])
    assert step()[0] == [UNSHARDED, UNSHARDING, SHARDED], "an empty list means the expected one"
    for setter in (first.set_modules_to_forward_prefetch, first.set_modules_to_backward_prefetch):
        with pytest.raises(ValueError, match="found Linear"):
            setter([net.head])


def test_prefetch(ranks: Ranks) -> None:
    ranks(_prefetches, 2)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def _not_in_backward(rank: int, world_size: int) -> None:
    net, whole = seeded(Words), seeded(Words)
    fully_shard(net.embedding)
    fully_shard(net)
    net.embedding.set_unshard_in_backward(False)
    net.set_modules_to_backward_prefetch([net.embedding])
    seen: list[GroupState] = []

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: seen.append(_group(net.embedding).state))

    net.embedding.register_forward_hook(note)
    ids = torch.tensor([[1, 2, 3], [8, 8, 0]])
    for _ in range(2):
        loss_of(net, ids[rank]).backward()
        average_backward(whole, ids)
        assert_same_gradients(net, whole)
    assert seen == [SHARDED] * 2
    net.embedding.set_unshard_in_backward(True)
    loss_of(net, ids[rank]).backward()
    assert seen[-1] is UNSHARDED


def test_an_embedding_need_not_be_gathered_for_backward(ranks: Ranks) -> None:
    ranks(_not_in_backward, 2)


# -- what a sum of gradients is divided by -----------------------------------------------------


def _divides(rank: int, world_size: int, reduce_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    net, whole = sharded_net(mp_policy=policy), seeded(Net)
    x = batches(world_size)
    net.set_gradient_divide_factor(4.0)
    for block in net.blocks:
        block.set_gradient_divide_factor(1.0)
    loss_of(net, x[rank]).backward()
    average_backward(whole, x)
    for name, param in whole.named_parameters():
        own_group = not name.startswith("blocks")  # the setter is not recursive
        param.grad *= world_size / 4.0 if own_group else world_size
    tolerance = {} if reduce_dtype != torch.float16 else {"rtol": 4e-3, "atol": 1e-3}
    for name, param in net.named_parameters():
        wanted = whole.get_parameter(name).grad
        torch.testing.assert_close(param.grad.full_tensor(), wanted, msg=name, **tolerance)
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="expected a positive number"):
            net.set_gradient_divide_factor(wrong)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64, torch.float16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_factor_of_the_users_takes_the_place_of_the_world_size(
    ranks: Ranks, world_size: int, reduce_dtype: torch.dtype | None
) -> None:
    ranks(_divides, world_size, reduce_dtype)


def _divides_in_two_dimensions(rank: int, world_size: int) -> None:
    net, whole = sharded_net(mesh=_hybrid(world_size)), seeded(Net)
    x = batches(world_size)
    for module in _sharded_modules(net):
        with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
            module.set_reduce_scatter_divide_factor(world_size)
        module.set_requires_all_reduce(False)
    loss_of(net, x[rank]).backward()
    net.set_requires_all_reduce(True)
    loss_of(net, x[rank]).backward()
    for _ in range(2):
        average_backward(whole, x)
    assert_same_gradients(net, whole)


def test_the_older_name_of_the_factor_still_works_but_warns(ranks: Ranks) -> None:
    ranks(_divides_in_two_dimensions, 4)


def _hooked(rank: int, world_size: int, replicates: bool, force_sum: bool) -> None:
    mesh = _hybrid(world_size) if replicates else None
    net, whole = sharded_net(mesh=mesh), seeded(Net)
    x = batches(world_size)
    seen: list[torch.Tensor] = []
    net.set_force_sum_reduction_for_comms(force_sum)
    net.set_all_reduce_hook(lambda flat: seen.append(flat.clone()))
    if replicates:
        net.set_requires_all_reduce(False)
        loss_of(net, x[rank]).backward()
        assert not seen, "there is nothing to see before the all-reduce"
        average_backward(whole, x)
        net.set_requires_all_reduce(True)
    loss_of(net, x[rank]).backward()
    average_backward(whole, x)
    assert_same_gradients(net, whole)

    (flat,) = seen
    params = _group(net).params  # of its own group only
    assert flat.shape == (sum(param.layout.chunk_numel for param in params),)
    assert not flat.requires_grad
    scale = world_size if force_sum else 1
    offset = 0
    for param in params:
        grad = param.sharded.grad.to_local().flatten() * scale
        torch.testing.assert_close(flat[offset : offset + grad.numel()], grad, msg=param.fqn)
        offset += param.layout.chunk_numel


@pytest.mark.parametrize("force_sum", [False, True], ids=["average", "sum"])
@pytest.mark.parametrize(
    ("world_size", "replicates"), [(1, False), (2, False), (2, True), (4, True)]
)
def test_a_hook_sees_the_reduced_gradients_before_they_are_divided(
    ranks: Ranks, world_size: int, replicates: bool, force_sum: bool
) -> None:
    ranks(_hooked, world_size, replicates, force_sum)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(5, WIDTH))
        self.widest = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.none = nn.Parameter(torch.ones(0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widest = self.narrow.sum() * self.widest.sum() + self.none.sum()
        return x @ self.wide.T * widest


def _changed_by_hook(rank: int, world_size: int) -> None:
    net, whole = seeded(TwoDtypes), seeded(TwoDtypes)
    fully_shard(net)
    dtypes: list[torch.dtype] = []

    def double(flat: torch.Tensor) -> None:
        dtypes.append(flat.dtype)
        flat *= 2

    net.set_all_reduce_hook(double)
    x = batches(world_size)
    loss_of(net, x[rank]).backward()
    average_backward(whole, x)
    average_backward(whole, x)
    assert set(dtypes) == {torch.bfloat16, torch.float32, torch.float64}, "one call per dtype"
    assert len(dtypes) == 3
    assert_same_gradients(net, whole)


def test_a_hook_may_change_the_gradients(ranks: Ranks) -> None:
    ranks(_changed_by_hook, 2)


def _stream(rank: int, world_size: int) -> None:
    stream = object()
    net = fully_shard(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="let the hook itself enter another stream"):
        net.set_all_reduce_hook(print, stream=stream)
    net = fully_shard(nn.Linear(2, 2), mesh=_hybrid(world_size))
    with pytest.raises(ValueError, match="a 2-D mesh takes no stream"):
        net.set_all_reduce_hook(print, stream=stream)
    assert _group(net).options.all_reduce_hook is None, "what was refused does not stay"


def test_a_stream_for_the_hook_is_refused(ranks: Ranks) -> None:
    ranks(_stream, 2)


# -- collectives of the user's -----------------------------------------------------------------


class _Comm:
    """Counts what it is asked for."""

    def __init__(self, returns_work: bool) -> None:
        self.returns_work = returns_work
        self.allocated: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.calls: list[dist.ProcessGroup] = []

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.allocated.append((tuple(size), dtype))
        return torch.full(tuple(size), 7, dtype=dtype, device=device)


class Gather(_Comm):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls.append(group)
        chunks = list(output_tensor.chunk(group.size()))
        work = dist.all_gather(chunks, input_tensor.clone(), group, async_op=self.returns_work)
        return work if self.returns_work else None


class Scatter(_Comm):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls.append(group)
        summed = input_tensor.clone()
        dist.all_reduce(summed, op, group)
        output_tensor.copy_(summed.chunk(group.size())[group.rank()])
        return _Done() if self.returns_work else None


class _Done:
    def wait(self) -> None:
        pass


def _train_custom(rank: int, world_size: int, make: Any, returns_work: bool, **kwargs: Any) -> None:
    net, whole = seeded(make), seeded(make)
    fully_shard(net, **kwargs)
    gather, scatter = Gather(returns_work), Scatter(returns_work)
    loss_of(net, batches(world_size)[rank]).backward()  # also where it has run before
    net.zero_grad()
    net.set_custom_all_gather(gather)
    net.set_custom_reduce_scatter(scatter)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (net, whole)]
    for step in range(2):
        x = batches(world_size, step)
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        assert_same_gradients(net, whole)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    mesh = _group(net).mesh
    dtypes = {param.dtype for param in net.parameters()}
    assert gather.calls == [mesh.shard_group] * 2, "once a forward: the root is not freed"
    assert scatter.calls == [mesh.shard_group] * (2 * len(dtypes)), "once for every dtype"
    wire = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    assert {dtype for _, dtype in gather.allocated} == {wire}


@pytest.mark.parametrize("returns_work", [True, False], ids=["work", "none"])
@pytest.mark.parametrize("make", [Net, TwoDtypes])
def test_custom_collectives_carry_every_byte_of_their_group(
    ranks: Ranks, make: Any, returns_work: bool
) -> None:
    ranks(_train_custom, 2, make, returns_work)


def _custom_combinations(rank: int, world_size: int) -> None:
    mesh = _hybrid(world_size)
    _train_custom(rank, world_size, Net, True, mesh=mesh)

    # Kept over two of four ranks between forward and backward.
    net, whole = fully_shard(seeded(Net), reshard_after_forward=2), seeded(Net)
    gather = Gather(returns_work=True)
    net.set_custom_all_gather(gather)
    x = batches(world_size)
    for _ in range(2):
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
    assert_same_gradients(net, whole)
    assert [group.size() for group in gather.calls] == [4, 2, 4, 2]

    # Without a dimension that shards there is nothing to gather.
    net = fully_shard(seeded(Net), mesh=init_device_mesh("cpu", (world_size, 1)))
    gather, scatter = Gather(returns_work=False), Scatter(returns_work=False)
    net.set_custom_all_gather(gather)
    net.set_custom_reduce_scatter(scatter)
    net.zero_grad()
    loss_of(net, x[rank]).backward()
    assert not gather.calls
    assert not scatter.calls


def test_custom_collectives_of_any_mesh(ranks: Ranks) -> None:
    ranks(_custom_combinations, 4)


def _separate_group(rank: int, world_size: int, custom: bool) -> None:
    net, whole = sharded_net(), seeded(Net)
    gather, scatter = Gather(returns_work=True), Scatter(returns_work=True)
    if custom:
        for module in _sharded_modules(net):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    own = _group(net).mesh.shard_group
    x = batches(world_size)

    def step() -> None:
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        assert_same_gradients(net, whole)

    def scatter_groups() -> set[dist.ProcessGroup]:
        if custom:
            scatter.calls.clear()
            step()
            return set(scatter.calls)
        step()
        meshes = [_group(module).mesh for module in _sharded_modules(net)]
        groups = {mesh.scatter_group or mesh.shard_group for mesh in meshes}
        carriers = {select_transport(group, meshes[0].device) for group in groups}
        assert {mesh.scatter for mesh in meshes} == carriers
        return groups

    assert scatter_groups() == {own}
    net.set_separate_reduce_scatter_group()
    (separate,) = scatter_groups()
    assert separate is not own, "one more group, the same for all"
    assert dist.get_process_group_ranks(separate) == dist.get_process_group_ranks(own)
    net.set_separate_reduce_scatter_group(True)
    assert scatter_groups() == {separate}, "a second time changes nothing"
    net.set_separate_reduce_scatter_group(False)
    assert scatter_groups() == {own}
    if custom:
        assert set(gather.calls) == {own}
    net.set_separate_reduce_scatter_group(True, recurse=False)
    assert _group(net.blocks[0]).mesh.scatter is not _group(net).mesh.scatter
    step()

    replicated = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (world_size, 1)))
    replicated.set_separate_reduce_scatter_group()
    replicated(torch.ones(1, 2)).sum().backward()
    assert replicated.weight.grad is not None


@pytest.mark.parametrize("custom", [False, True], ids=["own transport", "custom collectives"])
def test_a_separate_group_to_reduce_in_can_be_switched_on_and_off(
    ranks: Ranks, custom: bool
) -> None:
    ranks(_separate_group, 2, custom)


def _switched_while_accumulating(rank: int, world_size: int) -> None:
    net, whole = sharded_net(), seeded(Net)
    x = batches(world_size)
    net.set_requires_gradient_sync(False)
    loss_of(net, x[rank]).backward()
    net.set_separate_reduce_scatter_group()
    net.set_requires_gradient_sync(True)
    loss_of(net, x[rank]).backward()
    for _ in range(2):
        average_backward(whole, x)
    assert_same_gradients(net, whole)


def test_gradients_not_yet_reduced_survive_a_change_of_transport(ranks: Ranks) -> None:
    ranks(_switched_while_accumulating, 2)


def _refuses_memory(rank: int, world_size: int) -> None:
    net = fully_shard(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="no staging buffers"):
        net.set_allocate_memory_from_process_group_for_comm(True)
    net.set_allocate_memory_from_process_group_for_comm(False)
    with pytest.raises(NotImplementedError, match="no staging buffers"):
        net.set_symm_mem_for_comm()


def test_memory_for_staging_buffers_is_refused_as_there_are_none(ranks: Ranks) -> None:
    ranks(_refuses_memory, 1)


# -- unused parameters -------------------------------------------------------------------------


def _unused(rank: int, world_size: int) -> None:
    net, whole = seeded(Choosy), seeded(Choosy)
    fully_shard(net)
    net.second.bias.requires_grad_(False)
    whole.second.bias.requires_grad_(False)
    x = batches(world_size)
    net(x[rank], both=False).square().mean().backward()
    assert net.second.weight.grad is None, "unused on all ranks: no gradient"
    net.zero_grad()

    net.set_reduce_scatter_unused_params(True)
    net(x[rank], both=rank == 0).square().mean().backward()
    for i, batch in enumerate(x):
        (whole(batch, i == 0).square().mean() / world_size).backward()
    assert_same_gradients(net, whole)
    net.zero_grad()

    net(x[rank], both=False).square().mean().backward()
    assert not net.second.weight.grad.full_tensor().any()
    net.set_reduce_scatter_unused_params(False)
    net.zero_grad()
    net(x[rank], both=False).square().mean().backward()
    assert net.second.weight.grad is None

    outer = fully_shard(nn.Sequential(net))
    outer.set_reduce_scatter_unused_params(True, recurse=False)
    assert not _group(net).options.reduce_scatter_unused_params


def test_parameters_unused_on_one_rank_count_as_zeros(ranks: Ranks) -> None:
    ranks(_unused, 2)


# -- how many reductions are under way ---------------------------------------------------------


def _buffers(rank: int, world_size: int) -> None:
    net, whole = seeded(lambda: Net(blocks=5)), seeded(lambda: Net(blocks=5))
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    x = batches(world_size)
    most: list[int] = []
    original = Root.post_backward

    def counting(root: Root[Any], group: ParamGroup) -> None:
        original(root, group)
        most.append(len(root._pending))

    Root.post_backward = counting  # type: ignore[method-assign]
    for count in (1, 3):
        net.set_reduce_scatter_max_input_buffers(count)
        most.clear()
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        assert max(most) == count, f"groups on their way: {most}"
    assert_same_gradients(net, whole)
    net.set_reduce_scatter_max_input_buffers(1, recurse=False)
    assert _group(net.blocks[0]).options.reduce_scatter_max_input_buffers == 3
    for wrong in (2.0, True, "2"):
        with pytest.raises(TypeError, match="expected an int, found"):
            net.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(ValueError, match="at least 1, found 0"):
        net.set_reduce_scatter_max_input_buffers(0)


def test_more_gradients_may_be_on_their_way_at_once(ranks: Ranks) -> None:
    ranks(_buffers, 2)


def _left(rank: int, world_size: int, transport: str) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    net = sharded_net(lambda: Net(blocks=5), mesh=mesh, transport=transport)
    whole = seeded(lambda: Net(blocks=5))
    root = state_of(net).root
    x = batches(world_size)
    left: list[int] = []
    original = Root.post_backward

    def counting(root: Root[Any], group: ParamGroup) -> None:
        original(root, group)
        left.append(len(root._left_alone))

    Root.post_backward = counting  # type: ignore[method-assign]
    loss_of(net, x[rank]).backward()
    average_backward(whole, x)
    # Gradients over a network are left to it until backward is over; what is in memory is not.
    assert left == ([0, 1, 2, 3, 4, 5] if transport == "c10d" else [0] * 6), left
    assert not root._left_alone
    assert_same_gradients(net, whole)
    net.set_is_last_backward(False)
    for _ in range(3):
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
    assert max(left) <= 6, f"more than a gradient of each of 6 groups waits: {left}"
    net.set_is_last_backward(True)
    loss_of(net, x[rank]).backward()
    average_backward(whole, x)
    assert_same_gradients(net, whole)


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_backward_does_not_wait_for_gradients_that_cross_a_network(
    ranks: Ranks, transport: str
) -> None:
    ranks(_left, 2, transport)


# -- the rest ----------------------------------------------------------------------------------


def _event(rank: int, world_size: int) -> None:
    net = sharded_net()
    event = object()
    net.set_post_optim_event(event)
    root = state_of(net).root
    assert root.post_optim_event is event
    loss_of(net, batches(world_size)[rank]).backward()
    assert root.post_optim_event is None, "waited for by one forward"


def test_an_event_behind_the_optimizer_is_for_one_forward(ranks: Ranks) -> None:
    ranks(_event, 1)


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


def _methods(rank: int, world_size: int) -> None:
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
    assert _group(net).state is SHARDED
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


def test_other_methods_gather_as_forward_does(ranks: Ranks) -> None:
    ranks(_methods, 2)


def _several_roots(rank: int, world_size: int) -> None:
    chunks = [fully_shard(nn.Linear(2, 2)) for _ in range(2)]
    share_comm_ctx(chunks)
    chunks[1](chunks[0](torch.ones(1, 2))).sum().backward()
    assert all(chunk.weight.grad is not None for chunk in chunks)
    shared = {id(_group(chunk).mesh.shard) for chunk in chunks}
    assert len(shared) == 1
    with pytest.raises(ValueError, match="found Linear"):
        share_comm_ctx([chunks[0], nn.Linear(2, 2)])


def test_roots_over_the_same_ranks_share_a_transport(ranks: Ranks) -> None:
    ranks(_several_roots, 2)


def _classes(rank: int, world_size: int) -> None:
    net = sharded_net()
    assert get_cls_to_fsdp_cls()[Net] is type(net)
    assert get_cls_to_fsdp_cls()[Block] is type(net.blocks[0])
    assert type(type(net)()) is Net, "constructing the class makes a plain module"
    with disable_fsdp_module_new_init():
        bare = type(net)()
        assert type(bare) is Net
        assert not bare.__dict__, "nothing was initialised"
    assert len(type(net)(blocks=1).blocks) == 1
    with pytest.raises(ArithmeticError), disable_fsdp_module_new_init():
        raise ArithmeticError
    assert type(net)().__dict__


def test_the_classes_that_sharding_makes(ranks: Ranks) -> None:
    ranks(_classes, 1)


def _reset_nested(rank: int, world_size: int) -> None:
    net = sharded_net()
    loss_of(net, batches(world_size)[rank]).backward()
    with pytest.raises(RuntimeError, match=r"expected the root.*found a nested FSDPBlock"):
        net.blocks[0].reset_iter_state()
    net.reset_iter_state()


def test_only_the_root_can_be_reset(ranks: Ranks) -> None:
    ranks(_reset_nested, 1)
