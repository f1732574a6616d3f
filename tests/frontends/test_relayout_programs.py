"""``relayout`` and ``transfer`` in programs: strategies, wrappers, tensor parallelism, mistakes."""

from __future__ import annotations

import copy
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from shardwise import (
    DiskOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    checkpoint,
    fully_shard,
    materialize,
    optim,
    relayout,
)
from shardwise._torch import dtensor
from shardwise.base.errors import CheckpointError, MisuseError
from shardwise.checkpoint.ranks import moving
from shardwise.checkpoint.ranks.rows import RowExchange
from shardwise.checkpoint.ranks.state import state_of, strategy_of
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.state import groups_of, states_of
from shardwise.transport.peers import new_group
from tests.worlds import Ranks, on_processes, on_threads

WIDTH = 8


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of the first ranks."""
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def plain_model(hidden: int = 7) -> nn.Sequential:
    """Two blocks whose rows no even number of ranks divides."""
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False))
        for _ in range(2)
    )
    return nn.Sequential(*blocks)


def sharded(mesh: DeviceMesh, hidden: int = 7, shard: Any = fully_shard, **options: Any) -> Any:
    """The model over a mesh."""
    model = plain_model(hidden)
    for block in model:
        shard(block, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def joining(before: DeviceMesh, **options: Any) -> Any:
    """The model on the first mesh, and on ranks that are not in it on the meta device."""
    if before.get_coordinate() is not None:
        return sharded(before, **options)
    with torch.device("meta"):
        return sharded(alone(), **options)


def alone() -> DeviceMesh:
    """A mesh of this rank."""
    group = new_group([dist.get_rank()])
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    """Train, alike on all ranks."""
    for step in range(count):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """All tensors of a training in full, by name."""
    found: dict[str, Tensor] = {**model.state_dict()}
    for name, param in model.named_parameters():
        for key, value in (optimizer.state.get(param, {}) if optimizer else {}).items():
            if isinstance(value, Tensor):
                found[f"{name} {key}"] = value
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in found.items()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor has the same bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# -- what a model does afterwards --------------------------------------------------------------


@on_threads(4)
def test_forward_frees_parameters_as_the_strategy_says(
    rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first forward of a model, and after others."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = sharded(mesh_of(4))
    optimizer = torch.optim.AdamW(model.parameters())
    for strategy, left in (
        ("grad-op", "unsharded"),
        ("no-shard", "unsharded"),
        ("hybrid", "sharded"),
        ("hybrid-zero2", "unsharded"),
        ("full", "sharded"),
        ("grad-op", "unsharded"),
    ):
        before = whole(model, optimizer)
        relayout(model, optimizer, strategy=strategy)
        assert_same(whole(model, optimizer), before)
        assert strategy_of(model) == strategy
        loss = model(torch.ones(2, WIDTH)).sum()
        assert {group.state.value for group in groups_of(model)} == {left}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@on_threads(4)
def test_a_model_without_shards_over_some_of_the_ranks(rank: int, world_size: int) -> None:
    model = sharded(mesh_of(4))
    relayout(model, mesh=mesh_of(2), strategy="no-shard")
    if rank < 2:
        assert strategy_of(model) == "no-shard"
        model(torch.ones(2, WIDTH))


@on_threads(4)
def test_the_default_mesh_has_the_ranks_of_the_group(rank: int, world_size: int) -> None:
    pair = dist.new_group([0, 1])
    both = mesh_of(2, 1)
    if rank < 2:
        model = sharded(both)
        relayout(model, strategy="full", group=pair)
        assert next(iter(groups_of(model))).mesh.mesh.mesh.tolist() == [0, 1]


@on_threads(4)
def test_parameters_kept_over_fewer_ranks_between_forward_and_backward(
    rank: int, world_size: int
) -> None:
    model, meshes = sharded(mesh_of(4), reshard_after_forward=2), [mesh_of(2), mesh_of(4)]
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer)
    for mesh in meshes:
        relayout(model, optimizer, mesh=mesh)
        if mesh.get_coordinate() is not None:
            steps(model, optimizer)
    three = mesh_of(3)
    with pytest.raises(CheckpointError, match=r"rank 0: .*reshard_after_forward=2.*the 3 ranks"):
        relayout(model, optimizer, mesh=three)
    steps(model, optimizer)
    relayout(model, optimizer, strategy="full")
    assert all(group.post_forward is None for group in groups_of(model))
    steps(model, optimizer)


@on_threads(4)
def test_a_wrapped_model(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    wrap = FullyShardedDataParallel
    model = wrap(nn.Sequential(*map(wrap, plain_model())))
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer)
    weights, states = model.state_dict(), wrap.optim_state_dict(model, optimizer)["state"]
    for strategy in ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        relayout(model, optimizer, strategy=ShardingStrategy[strategy])
        assert model.sharding_strategy.name == strategy
        assert_same(model.state_dict(), weights)
        for name, state in wrap.optim_state_dict(model, optimizer)["state"].items():
            assert_same(state, states[name])
        with wrap.summon_full_params(model):
            for name, param in model.named_parameters():
                assert torch.equal(param, weights[name.replace("_fsdp_wrapped_module.", "")])
    assert model.world_size == 2
    mesh = mesh_of(2)
    relayout(model, optimizer, mesh=mesh)
    if rank < 2:
        assert model.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
        steps(model, optimizer)


@on_threads(4)
def test_tensor_parallelism_stays(rank: int, world_size: int) -> None:
    def pairs(*shape: int) -> DeviceMesh:
        return init_device_mesh("cpu", (*shape, 2), mesh_dim_names=(*"rs"[-len(shape) :], "tp"))

    full, one = pairs(2), DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("s", "tp"))
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH))
    parallelize_module(model, full["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=full["s"])
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer)
    before = whole(model, optimizer)
    # Torch slices a mesh only on its ranks; others pass all of it.
    relayout(model, optimizer, mesh=one["s"] if rank < 2 else one)
    if rank < 2:
        assert_same(whole(model, optimizer), before)
        steps(model, optimizer)
    replicated = pairs(2, 1)
    relayout(model, optimizer, mesh=replicated["r", "s"])
    steps(model, optimizer)
    without_partner = DeviceMesh("cpu", [0, 2], mesh_dim_names=("s",))
    with pytest.raises(CheckpointError, match="same tensor parallel ranks"):
        relayout(model, optimizer, mesh=without_partner)
    steps(model, optimizer)


@pytest.mark.parametrize("name", ["bf16", "dim 1", "on a disk"])
@on_threads(4)
def test_options_of_fully_shard_stay(rank: int, world_size: int, name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "dim 1": {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
        "on a disk": {"offload_policy": DiskOffloadPolicy(tmp_path), "hidden": 8192},
    }[name]
    meshes = [mesh_of(*shape) for shape in ((1,), (3,), (2, 2), (4, 1), (4,))]
    model = joining(meshes[0], **options)
    optimizer = torch.optim.AdamW(model.parameters())
    before = [whole(model)] if rank == 0 else [{}]
    dist.broadcast_object_list(before)
    for mesh in meshes[1:]:
        relayout(model, optimizer, mesh=mesh)
        if mesh.get_coordinate() is not None:
            assert_same(whole(model), before[0])
    form = next(iter(groups_of(model))).params[0].form
    if name == "dim 1":
        assert form.layout.dim == 1
    elif name == "on a disk":
        assert form.offload.is_on_disk(form.local)
    steps(model, optimizer)


# -- parameters and optimizers -----------------------------------------------------------------


@on_threads(2)
def test_parameters_keep_what_users_set_on_them(rank: int, world_size: int) -> None:
    model, meshes = sharded(mesh_of(2)), [mesh_of(1), mesh_of(2)]
    param = model[0][0].weight
    param.decays = False
    param.requires_grad_(False)
    for mesh in meshes:
        relayout(model, mesh=mesh)
    assert model[0][0].weight is param
    assert not (param.decays or param.requires_grad)


def _torchs() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    kinds = torch.optim
    return {
        "fused": lambda params: kinds.AdamW(params, fused=True, amsgrad=True),
        "no state": lambda params: kinds.SGD(params, lr=0.1, foreach=True),
        "floats": lambda params: kinds.NAdam(params),
        "a tensor": lambda params: kinds.Adam(params, lr=torch.tensor(0.1)),
    }


@pytest.mark.parametrize("name", _torchs())
@on_threads(4)
def test_an_optimizer_and_its_scheduler_go_on(rank: int, world_size: int, name: str) -> None:
    """Training goes on as on one rank: all have the same data."""
    meshes = [mesh_of(2), mesh_of(2, 2), mesh_of(4)]
    trainings = []
    for model in (plain_model(), joining(meshes[0])):
        optimizer = _torchs()[name](model.parameters())
        trainings.append((model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)))
    (alone, its, its_schedule), (model, optimizer, schedule) = trainings
    for mesh in meshes:
        relayout(model, optimizer, mesh=mesh)
        for each in (alone, its, its_schedule), (model, optimizer, schedule):
            if each[0] is alone or mesh.get_coordinate() is not None:
                steps(each[0], each[1])
                each[2].step()
        if mesh is meshes[0]:
            schedule.last_epoch = its_schedule.last_epoch
    for found, expected in zip(whole(model).values(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected.detach())


@on_threads(2)
def test_states_of_some_parameters(rank: int, world_size: int) -> None:
    model, meshes = sharded(mesh_of(2)), [mesh_of(1), mesh_of(2)]
    for param in model[0].parameters():
        param.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for count in (0, 3):  # before the first step, and after it
        steps(model, optimizer, count)
        for mesh in meshes:
            relayout(model, optimizer, mesh=mesh)
        assert len(optimizer.state) == count
    steps(model, optimizer)


@pytest.mark.parametrize("place", ["memory", "a disk"])
@on_threads(2)
def test_steps_in_backward_go_on(rank: int, world_size: int, place: str, tmp_path: Path) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(params)
        return made if place == "memory" else optim.offload(made, f"disk:{tmp_path}")

    model = sharded(mesh_of(2), hidden=8192)
    optimizer = optim.in_backward(model, make)
    for mesh in (mesh_of(1), mesh_of(2), mesh_of(2, 1)):
        steps(model, optimizer)
        before = whole(model, optimizer)
        relayout(model, optimizer, mesh=mesh)
        if mesh.get_coordinate() is None:
            assert not optimizer.state
            relayout(model, optimizer, mesh=mesh_of(2))
        elif mesh.size() == 1:
            relayout(model, optimizer, mesh=mesh_of(2))
        assert_same(whole(model, optimizer), before)


@pytest.mark.parametrize("is_loaded", [False, True])
@on_threads(4)
def test_an_optimizer_that_was_left_behind_is_refused(
    rank: int, world_size: int, is_loaded: bool
) -> None:
    """Its states have the shape of the new shards, and other rows."""
    model = sharded(mesh_of(2, 2), hidden=8)
    optimizer = optim.Lion(model.parameters())
    steps(model, optimizer)
    if is_loaded:
        state = optimizer.state_dict()
        optimizer = optim.Lion(model.parameters())
        optimizer.load_state_dict(state)
    other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    relayout(model, mesh=other)
    model(torch.ones(2, WIDTH)).sum().backward()
    if rank in (1, 2):
        with pytest.raises(ValueError, match=r"optimizer state 'exp_avg' of .*where relayout has"):
            optimizer.step()


@on_threads(2)
def test_without_grad_and_in_inference_mode(rank: int, world_size: int) -> None:
    model, meshes = sharded(mesh_of(2)), [mesh_of(1), mesh_of(2)]
    optimizer = torch.optim.AdamW(model.parameters())
    for mode in (torch.no_grad, torch.inference_mode):
        steps(model, optimizer)
        with mode():
            for mesh in meshes:
                relayout(model, optimizer, mesh=mesh)
    steps(model, optimizer)


# Dynamo hides this warning of torch 2.14, which does not help where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@on_threads(2)
def test_compiled_blocks(rank: int, world_size: int) -> None:
    model, meshes = sharded(mesh_of(2)), [mesh_of(1), mesh_of(2)]
    for block in model:
        block.compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    for mesh in meshes:
        steps(model, optimizer)
        relayout(model, optimizer, mesh=mesh)
        if mesh.get_coordinate() is None:
            relayout(model, optimizer, mesh=meshes[1])
        elif mesh is meshes[0]:
            steps(model, optimizer)
            relayout(model, optimizer, mesh=meshes[1])
    steps(model, optimizer)


class _WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.ones(2))
        self.register_buffer("saved", torch.ones(3))
        self.register_buffer("computed", torch.ones(3), persistent=False)


@on_threads(2)
def test_buffers_and_ignored_parameters(rank: int, world_size: int) -> None:
    """What a checkpoint would bring arrives; what nothing brings has to be there."""
    first, both = mesh_of(1), mesh_of(2)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = _WithBuffers()
        fully_shard(model, mesh=first if rank == 0 else alone(), ignored_params={model.own})
    with pytest.raises(CheckpointError, match="found own, computed on the meta device"):
        relayout(model, mesh=both)
    if rank == 0:
        with torch.no_grad():
            model.saved.fill_(2)
            model.own.fill_(3)
    else:
        model.own = nn.Parameter(torch.zeros(2))
        model.computed = torch.ones(3)
    relayout(model, mesh=both)
    assert [model.saved[0].item(), model.own[0].item()] == [2, 3]


# -- what is refused before anything moves -----------------------------------------------------


def _has_gradients(model: Any, mesh: DeviceMesh) -> None:
    model[0][0].weight.grad = torch.zeros_like(model[0][0].weight)
    relayout(model, mesh=mesh)


def _has_hooks(model: Any, mesh: DeviceMesh) -> None:
    model[0][0].weight.register_hook(lambda grad: grad)
    relayout(model, mesh=mesh)


def _is_referred_to(model: Any, mesh: DeviceMesh) -> None:
    reference = weakref.ref(model[0][0].weight)
    relayout(model, mesh=mesh)
    assert reference


def _is_in_a_graph(model: Any, mesh: DeviceMesh) -> None:
    of_this_rank = model[0][0].weight.to_local()
    relayout(model, mesh=mesh)
    assert of_this_rank.requires_grad


def _has_an_optimizer(model: Any, mesh: DeviceMesh) -> None:
    relayout(model, torch.optim.AdamW(model.parameters()), mesh=mesh)


MISTAKES: dict[str, Callable[[Any, DeviceMesh], object]] = {
    "rank 1 has the gradient of 0.weight": _has_gradients,
    "weight on rank 1 has hooks": _has_hooks,
    "or weak references": _is_referred_to,
    "or a graph of autograd": _is_in_a_graph,
    "found ranks, strategy, and whether there is an optimizer": _has_an_optimizer,
    "found strategy 'nonsense'": lambda model, mesh: relayout(model, strategy="nonsense"),
    "found a Linear without groups": lambda model, mesh: relayout(nn.Linear(2, 2), mesh=mesh),
    r"\(None, None, False\) on rank 1": lambda model, mesh: relayout(model),
}


@pytest.mark.parametrize("message", MISTAKES)
@on_threads(2)
def test_a_mistake_on_one_rank_raises_on_all(rank: int, world_size: int, message: str) -> None:
    model, mesh = sharded(mesh_of(2)), mesh_of(1)
    before = whole(model)
    with pytest.raises(CheckpointError, match=message):
        MISTAKES[message](model, mesh) if rank == 1 else relayout(model, mesh=mesh)
    assert_same(whole(model), before)


@on_threads(2)
def test_between_two_steps_only(rank: int, world_size: int) -> None:
    model, other = sharded(mesh_of(2)), mesh_of(2, 1)

    def try_it(*_: object) -> None:
        with pytest.raises(CheckpointError, match="between two steps"):
            relayout(model, mesh=other)

    handle = model[0].register_forward_hook(try_it)
    loss = model(torch.ones(2, WIDTH)).sum()
    handle.remove()
    model.set_requires_gradient_sync(False)
    loss.backward()
    try_it()
    model.set_requires_gradient_sync(True)
    for group in groups_of(model):
        group.zero_grad(set_to_none=True)
    late = model(torch.ones(2, WIDTH)).sum()
    relayout(model, mesh=other)
    with pytest.raises(MisuseError, match="were replaced"):
        late.backward()


@on_threads(2)
def test_groups_of_parameters_have_to_be_the_same(rank: int, world_size: int) -> None:
    model, both = joining(mesh_of(1)), mesh_of(2)
    first, *others = model.parameters()
    groups = [{"params": [first, *others]}] if rank == 0 else [{"params": [first]}]
    optimizer = torch.optim.AdamW(groups)
    if rank == 1:
        optimizer.add_param_group({"params": others, "lr": 0.5})
    with pytest.raises(CheckpointError, match="rank 1: optimizer: found no group"):
        relayout(model, optimizer, mesh=both)
    assert model[0][0].weight.is_meta == (rank == 1)


@on_threads(2)
def test_two_trainings_are_not_mixed_up(rank: int, world_size: int) -> None:
    model = sharded(alone())
    with pytest.raises(CheckpointError, match=r"held by ranks \[\[0\], \[1\]\]"):
        relayout(model)


@on_threads(2)
def test_ranks_along_a_mesh_have_to_ascend(rank: int, world_size: int) -> None:
    """Else a ``DTensor`` would say that a rank has other rows than it has."""
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("shard",))
    with pytest.raises(ValueError, match=r"found ranks \[1, 0\] along the last dimension"):
        fully_shard(nn.Linear(8, 8), mesh=mesh)


# -- transfer ----------------------------------------------------------------------------------


@on_threads(4)
def test_into_another_model_on_fewer_ranks(rank: int, world_size: int) -> None:
    source = sharded(mesh_of(4))
    optimizer = torch.optim.AdamW(source.parameters())
    steps(source, optimizer)
    before, mesh = whole(source, optimizer), mesh_of(2)
    target = None
    if rank < 2:
        with torch.device("meta"):
            model = sharded(mesh)
        target = (model, torch.optim.AdamW(model.parameters()))
    extra = checkpoint.transfer((source, optimizer), target, {"step": 3})
    assert not optimizer.state
    assert all(param.is_meta for param in source.parameters())
    if target is not None:
        assert extra == {"step": 3}
        assert_same(whole(*target), before)
        steps(*target)


@pytest.mark.parametrize("torchs", ["source", "target"])
@on_processes(2)
def test_from_and_into_a_model_of_torchs_fsdp(rank: int, world_size: int, torchs: str) -> None:
    shards = [fully_shard, torch_fully_shard][:: 1 if torchs == "target" else -1]
    trainings = []
    for shard in shards:
        model = sharded(mesh_of(2), shard=shard)
        trainings.append((model, torch.optim.AdamW(model.parameters())))
    steps(*trainings[0])
    before = whole(*trainings[0])
    checkpoint.transfer(*trainings)
    assert_same(whole(*trainings[1]), before)
    steps(*trainings[1])


@on_threads(2)
def test_another_model_is_refused_before_anything_moves(rank: int, world_size: int) -> None:
    source, other, same = sharded(mesh_of(2)), sharded(mesh_of(2), hidden=9), sharded(mesh_of(2))
    optimizer = torch.optim.AdamW(source.parameters())
    steps(source, optimizer)
    with pytest.raises(CheckpointError, match=r"found shape \[7, 8\], expected \[9, 8\]"):
        checkpoint.transfer((source, optimizer), (other, None))
    with pytest.raises(CheckpointError, match="found no param_groups"):
        checkpoint.transfer((source, None), (same, torch.optim.AdamW(same.parameters())))
    steps(source, optimizer)


@on_threads(2)
def test_the_copy_of_a_model_stays_where_it_is(rank: int, world_size: int) -> None:
    model = sharded(mesh_of(2))
    copied = copy.deepcopy(model)
    relayout(model, mesh=mesh_of(2, 1))
    assert next(states_of(copied)).groups == []
    assert copied[0][0].weight.device_mesh.shape == (2,)
    assert_same(whole(copied), whole(model))
    steps(copied, torch.optim.AdamW(copied.parameters()))


# -- what fails in the middle ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["_out_of", "_into", "open"])
@on_processes(3)
def test_a_rank_that_fails_is_named_on_all(rank: int, world_size: int, what: str) -> None:
    model, mesh = sharded(mesh_of(3)), mesh_of(2)
    where = moving._Arrivals if what == "open" else RowExchange
    failing = patch.object(where, what, side_effect=RuntimeError("broken memory"))
    error = pytest.raises(CheckpointError, match="relayout: rank 1: RuntimeError: broken memory")
    with failing if rank == 1 else nullcontext(), error:
        relayout(model, mesh=mesh)


def _fails_on_rank_1(real: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise MemoryError("no memory left")
        return real(*args, **options)

    return run


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(optim.whole, torch.optim.AdamW)])
@on_threads(2)
def test_a_relayout_that_fails_on_a_rank_before_anything_moves_changes_nothing(
    rank: int,
    world_size: int,
    make: Callable[..., torch.optim.Optimizer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = sharded(mesh_of(2))
    optimizer = make(model.parameters())
    steps(model, optimizer)
    before = whole(model, optimizer)
    monkeypatch.setattr(moving, "allocate", _fails_on_rank_1(moving.allocate))
    with pytest.raises(CheckpointError, match="rank 1: MemoryError"):
        relayout(model, optimizer, strategy="no-shard")
    assert_same(whole(model, optimizer), before)
    steps(model, optimizer)


PARTS: dict[str, type] = {
    "let_go": moving.Departure,
    "__init__": moving._Arrivals,
    "take_place": ShardedParam,
    "fill_place": ShardedParam,
    "open": moving._Arrivals,
    "_out_of": RowExchange,
    "_into": RowExchange,
    "install": moving._Arrivals,
}
MAKERS: dict[str, Callable[[nn.Module, Path], torch.optim.Optimizer]] = {
    "AdamW": lambda model, _: torch.optim.AdamW(model.parameters()),
    "whole": lambda model, _: optim.whole(torch.optim.AdamW, model.parameters()),
    "8 bits": lambda model, _: optim.AdamW8bit(model.parameters()),
    "Muon": lambda model, _: optim.Muon(optim.muon_groups(model)),
    "on a disk": lambda model, folder: optim.offload(
        torch.optim.AdamW(model.parameters()), f"disk:{folder}"
    ),
}


def _no_memory() -> None:
    raise MemoryError("no memory left")


@contextmanager
def failing_once(
    part: str, call: int = 1, error: Callable[[], object] = _no_memory
) -> Iterator[None]:
    """Have a part of a move fail on rank 1, after one of its calls."""
    owner, left = PARTS[part], [call]
    real = getattr(owner, part)

    def run(*args: Any) -> Any:
        found = real(*args)
        if dist.get_rank() == 1:
            left[0] -= 1
            if left[0] == 0:
                error()
        return found

    with patch.object(owner, part, run):
        yield


@pytest.fixture(autouse=True)
def _many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor travels on its own, however small it is."""
    monkeypatch.setattr(moving, "_some_at_a_time", lambda entries: ([each] for each in entries))


def _layout_of(model: nn.Module) -> list[object]:
    return [
        (group.mesh, group.options.reshard_after_forward, group.post_forward, param.form.spec)
        for group in groups_of(model)
        for param in group.params
    ]


def _fails_and_goes_on(rank: int, world_size: int) -> None:
    """Rank 2 joins, and rank 0 leaves: what returns has only been on one of the ranks."""
    first, other = mesh_of(2), DeviceMesh("cpu", [1, 2], mesh_dim_names=("shard",))
    model = joining(first, reshard_after_forward=2 if rank < 2 else True)
    optimizer = torch.optim.AdamW(model.parameters())
    if rank < 2:
        steps(model, optimizer, 2)
        before, layout = whole(model, optimizer), _layout_of(model)
    with pytest.raises(CheckpointError, match="rank 1: MemoryError"):
        relayout(model, optimizer, mesh=other, strategy="grad-op")
    if rank < 2:
        assert _layout_of(model) == layout
        assert_same(whole(model, optimizer), before)
        steps(model, optimizer)
        expected = whole(model, optimizer)
    else:
        assert all(param.is_meta for param in model.parameters())
        assert not optimizer.state
    relayout(model, optimizer, mesh=other)
    relayout(model, optimizer, mesh=first)
    if rank < 2:
        assert_same(whole(model, optimizer), expected)


@pytest.mark.parametrize(
    ("part", "call"),
    [(part, 1) for part in PARTS]
    + [(part, 4) for part in ("fill_place", "open", "_out_of", "_into")],
)
def test_a_relayout_that_fails_on_a_rank_leaves_the_training_as_it_was(
    threads: Ranks, part: str, call: int
) -> None:
    with failing_once(part, call):
        threads(_fails_and_goes_on, 3)


def _goes_on_alike(rank: int, world_size: int, name: str, folder: Path) -> None:
    trainings = []
    for _ in range(2):
        model = sharded(mesh_of(2))
        optimizer = MAKERS[name](model, folder)
        steps(model, optimizer, 2)
        trainings.append((model, optimizer))
    with pytest.raises(CheckpointError, match="rank 1: MemoryError"):
        relayout(*trainings[0], strategy="no-shard")
    for count in (0, 1, 1):
        for training in trainings:
            steps(*training, count)
        found, expected = (state_of(*each, None) for each in trainings)
        assert found.tensors.keys() == expected.tensors.keys()
        for key, tensor in found.tensors.items():
            assert torch.equal(dtensor.plain(tensor), dtensor.plain(expected.tensors[key])), key
        assert found.values == expected.values


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("part", "call"), [("_into", 9), ("install", 1)])
def test_states_of_every_optimizer_go_back(
    threads: Ranks, name: str, part: str, call: int, tmp_path: Path
) -> None:
    with failing_once(part, call):
        threads(_goes_on_alike, 2, name, tmp_path)


def _keeps_the_source(rank: int, world_size: int, dtype: torch.dtype) -> None:
    source, target = sharded(mesh_of(2)), sharded(mesh_of(2, 1)).to(dtype)
    optimizer, its = (torch.optim.AdamW(each.parameters()) for each in (source, target))
    steps(source, optimizer, 2)
    before = whole(source, optimizer)
    with pytest.raises(CheckpointError, match=r"rank 1: MemoryError|it has been rounded"):
        checkpoint.transfer((source, optimizer), (target, its), {"step": 3})
    with pytest.raises(MisuseError, match="were lost when transfer failed"):
        target(torch.ones(2, WIDTH, dtype=dtype))
    if dtype is torch.float32:
        assert_same(whole(source, optimizer), before)
        steps(source, optimizer)
    else:  # rather than going on with rounded values
        with pytest.raises(MisuseError, match="were lost when transfer failed"):
            source(torch.ones(2, WIDTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transfer_that_fails_leaves_the_source_as_it_was(
    threads: Ranks, dtype: torch.dtype
) -> None:
    with failing_once("_into", 9):
        threads(_keeps_the_source, 2, dtype)


@pytest.mark.parametrize("part", ["_into", "install"])
@on_processes(2)
def test_ctrl_c_on_one_rank(rank: int, world_size: int, part: str) -> None:
    """All ranks turn back, or the rank ends what it does together with them."""
    model = sharded(mesh_of(2))
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, 2)
    before = whole(model, optimizer)
    on_others: Any = nullcontext()
    if part == "_into":
        on_others = pytest.raises(CheckpointError, match="rank 1: RuntimeError: interrupted")
    ends = pytest.raises(KeyboardInterrupt) if rank == 1 else on_others
    with failing_once(part, error=lambda: signal.raise_signal(signal.SIGINT)), ends:
        relayout(model, optimizer, strategy="no-shard")
    assert strategy_of(model) == ("full" if part == "_into" else "no-shard")
    assert_same(whole(model, optimizer), before)
    steps(model, optimizer)


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(optim.whole, torch.optim.AdamW)])
@pytest.mark.parametrize(
    ("owner", "part"),
    [
        (moving._Arrivals, "__init__"),
        (ShardedParam, "fill_place"),
        (moving._Arrivals, "install"),
    ],
)
@on_threads(2)
def test_a_training_that_could_not_go_back_either_says_so_wherever_it_is_used(
    rank: int,
    world_size: int,
    make: Callable[..., torch.optim.Optimizer],
    owner: type,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = sharded(mesh_of(2))
    optimizer = make(model.parameters())
    steps(model, optimizer)
    checkpoint.save(tmp_path / "good", model, optimizer)
    monkeypatch.setattr(owner, part, _fails_on_rank_1(getattr(owner, part)))
    with pytest.raises(CheckpointError, match="rank 1: MemoryError"):
        relayout(model, optimizer, strategy="no-shard")
    lost = r"were lost when relayout failed; build the model and the optimizer again, and load a "
    for use in (
        lambda: model(torch.ones(2, 8)),
        optimizer.step,
        lambda: materialize(model),
        lambda: checkpoint.save(tmp_path / "lost", model, optimizer),
        lambda: checkpoint.load(tmp_path / "good", model, optimizer),
        lambda: relayout(model, optimizer, strategy="full"),
    ):
        with pytest.raises((MisuseError, CheckpointError), match=lost):
            use()
    again = sharded(mesh_of(2))
    checkpoint.load(tmp_path / "good", again, fresh := make(again.parameters()))
    steps(again, fresh)
