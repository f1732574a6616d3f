"""Torch's element-wise optimizers step on local shards: same bits, and the same for programs.

The peer is a subclass of the same optimizer, which keeps to the way through ``DTensor``.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import optim
from tests.corpus.models import Net, Stack
from tests.sharding.nets import (
    batches,
    hybrid_mesh,
    loss_of,
    seeded,
    sharded_net,
    step_all,
    train_alike,
    twins,
)
from tests.worlds import on_processes, on_threads

Optimizer = torch.optim.Optimizer
MODES: list[dict[str, Any]] = [{}, {"foreach": True}]
FUSED: list[dict[str, Any]] = [{"fused": True}]
#: Each optimizer with what changes which states it has or how it computes.
OPTIONS: dict[type[Optimizer], list[dict[str, Any]]] = {
    torch.optim.Adadelta: [{}, {"weight_decay": 0.1, "maximize": True}],
    torch.optim.Adagrad: [{"lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    torch.optim.Adam: [{"weight_decay": 0.1}, {"amsgrad": True}, {"lr": torch.tensor(0.01)}],
    torch.optim.AdamW: [{}, {"amsgrad": True, "maximize": True}],
    torch.optim.Adamax: [{"weight_decay": 0.1}],
    torch.optim.ASGD: [{"t0": 1.0, "lambd": 0.1}],
    torch.optim.NAdam: [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    torch.optim.RAdam: [{"lr": 0.1}],
    torch.optim.RMSprop: [{}, {"centered": True, "momentum": 0.9}],
    torch.optim.SGD: [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}],
}
CAN_FUSE = (torch.optim.Adam, torch.optim.AdamW)
CASES = [
    pytest.param(kind, {**mode, **options}, id=f"{kind.__name__}-{[*mode, *options]}")
    for kind, every in OPTIONS.items()
    for options in every
    for mode in MODES + (FUSED if kind in CAN_FUSE else [])
    # Torch refuses a tensor for a rate in loops over many tensors.
    if not (isinstance(options.get("lr"), torch.Tensor) and "foreach" in mode)
]


class _SeesDTensors(TorchDispatchMode):
    """Counts operations of ``DTensor``s."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def peers(kind: type[Optimizer], *options: Any, **settings: Any) -> tuple[list[Any], list[Any]]:
    """Two models that are sharded alike, with an optimizer each: the second is the peer."""
    models = [sharded_net(**settings) for _ in range(2)]
    peer = type(kind.__name__, (kind,), {})
    kinds = (kind, peer)
    made = [
        each(model.parameters(), **copy.deepcopy(dict(*options)))
        for each, model in zip(kinds, models, strict=True)
    ]
    return models, made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor has in memory, in which NaN equals itself."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_alike(optimizer: Optimizer, peer: Optimizer) -> None:
    """Parameters and states have the same bits, classes and placements."""
    for group, other in zip(optimizer.param_groups, peer.param_groups, strict=True):
        for param, theirs in zip(group["params"], other["params"], strict=True):
            assert torch.equal(bits(param), bits(theirs))
            state, expected = optimizer.state[param], peer.state[theirs]
            assert list(state) == list(expected)
            for (key, value), like in zip(state.items(), expected.values(), strict=True):
                assert type(value) is type(like), key
                assert value.shape == like.shape and value.dtype == like.dtype, key
                assert torch.equal(bits(value), bits(like)), key
                if isinstance(value, DTensor):
                    assert value.placements == like.placements
                    assert value.device_mesh == like.device_mesh


def _train(models: list[Any], optimizers: list[Any], rank: int, step: int) -> None:
    x = batches(2, step)[rank]
    for model in models:
        loss_of(model, x).backward()
    step_all(optimizers)


@pytest.mark.parametrize(("kind", "options"), CASES)
@on_threads(2)
def test_a_step_has_the_bits_of_one_through_dtensor(
    rank: int, world_size: int, kind: type[Optimizer], options: dict[str, Any]
) -> None:
    models, optimizers = peers(kind, options)
    for step in range(3):
        _train(models, optimizers, rank, step)
        assert_alike(*optimizers)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Rprop, {}),
        (torch.optim.Adagrad, {"fused": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    ],
)
@on_threads(2)
def test_steps_that_torch_refuses_for_dtensors(
    rank: int, world_size: int, kind: Any, options: dict[str, Any]
) -> None:
    net, whole = twins(Net)
    train_alike(net, whole, rank, world_size, make=kind, **options)


@pytest.mark.parametrize("options", MODES + FUSED, ids=str)
@on_threads(2)
def test_a_step_dispatches_nothing_through_dtensor(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    net = sharded_net()
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    for step in range(2):
        loss_of(net, batches(world_size, step)[rank]).backward()
        with _SeesDTensors() as seen:
            optimizer.step()
        assert seen.found == []
        optimizer.zero_grad()


# -- what stays as it is -----------------------------------------------------------------------


@on_threads(2)
def test_a_subclass_sees_its_parameters(rank: int, world_size: int) -> None:
    seen = []

    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.extend(type(p) for group in self.param_groups for p in group["params"])
            super().step(closure)

    net = sharded_net()
    loss_of(net, batches(2)[rank]).backward()
    Mine(net.parameters()).step()
    assert set(seen) == {DTensor}


@on_threads(2)
def test_differentiable_steps_are_refused_as_in_one_process(rank: int, world_size: int) -> None:
    for is_loaded in (False, True):
        net = sharded_net()
        optimizer = torch.optim.SGD(net.parameters(), differentiable=True)
        if is_loaded:  # the options of groups change, and not what steps
            optimizer.load_state_dict(torch.optim.SGD(net.parameters()).state_dict())
        loss_of(net, batches(2)[rank]).backward()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            optimizer.step()


# -- what a program does around a step ---------------------------------------------------------


def _halve_grads(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = param.grad / 2


def _change_rate(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def _forget(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.state.clear()


def _freeze(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.param_groups[0]["params"][0].grad = None


@pytest.mark.parametrize("hook", [_halve_grads, _change_rate, _forget, _freeze])
@on_threads(2)
def test_what_hooks_before_a_step_change_counts(
    rank: int, world_size: int, hook: Callable[..., None]
) -> None:
    models, optimizers = peers(torch.optim.Adam, {"lr": 0.01})
    for step in range(3):
        if step == 1:
            for optimizer in optimizers:
                optimizer.register_step_pre_hook(hook)
        _train(models, optimizers, rank, step)
    assert_alike(*optimizers)


@on_threads(2)
def test_hooks_after_the_first_step_see_dtensors(rank: int, world_size: int) -> None:
    net = sharded_net()
    optimizer = torch.optim.Adam(net.parameters())
    seen: list[Any] = []

    def look(it: Optimizer, args: Any, kwargs: Any) -> None:
        assert it is optimizer
        seen.extend(type(it.state[param]["exp_avg"]) for param in net.parameters())
        seen.append(type(it.state_dict()["state"][0]["exp_avg_sq"]))

    optimizer.register_step_post_hook(look)
    loss_of(net, batches(2)[rank]).backward()
    optimizer.step()
    assert set(seen) == {DTensor}


@on_threads(2)
def test_a_closure_is_called_before_gradients_are_read(rank: int, world_size: int) -> None:
    models, optimizers = peers(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):

            def closure(
                model: Any = model, optimizer: Any = optimizer, step: int = step
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batches(2, step)[rank])
                loss.backward()
                return loss

            assert optimizer.step(closure) is not None
    assert_alike(*optimizers)


def _look_at_groups(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    assert args[0].param_groups


@on_threads(2)
def test_a_closure_counts_after_the_step_has_looked_at_groups(rank: int, world_size: int) -> None:
    """As the steps of torch do on accelerators, to see whether they may be captured."""
    models, optimizers = peers(torch.optim.SGD, {"lr": 0.1})
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.register_step_pre_hook(_look_at_groups)

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = loss_of(model, batches(2)[rank])
            loss.backward()
            optimizer.param_groups[0]["lr"] *= 2
            return loss

        optimizer.step(closure)
    assert_alike(*optimizers)


@on_threads(2)
def test_a_closure_that_raises_leaves_all_as_it_was(rank: int, world_size: int) -> None:
    net = sharded_net()
    optimizer = torch.optim.Adam(net.parameters())
    loss_of(net, batches(2)[rank]).backward()
    before = [param.to_local().clone() for param in net.parameters()]

    def closure() -> float:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        optimizer.step(closure)
    assert not optimizer.state
    for param, value in zip(net.parameters(), before, strict=True):
        assert torch.equal(param.to_local(), value)
    optimizer.step()
    assert len(optimizer.state) == len(before)


def _by_arguments(model: Any, optimizer: Optimizer) -> None:
    def before(_: Optimizer, args: Any, kwargs: Any) -> None:
        for group in args[0].param_groups:
            group["lr"] *= 0.5
            for param in group["params"]:
                param.grad = param.grad / 2

    def after(_: Optimizer, args: Any, kwargs: Any) -> None:
        for state in args[0].state.values():
            state["exp_avg"] = state["exp_avg"] / 2
        args[0].load_state_dict(copy.deepcopy(args[0]).state_dict())
        args[0].param_groups = [dict(group) for group in args[0].param_groups]
        args[0].zero_grad()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _add_closure(model: Any, optimizer: Optimizer) -> None:
    def closure() -> None:
        optimizer.zero_grad()
        loss_of(model, batches(2, 7)[0]).backward()
        first, *others = optimizer.param_groups[0]["params"]
        optimizer.param_groups = [{**optimizer.param_groups[0], "params": [first]}]
        optimizer.add_param_group({"params": others, "lr": 0.1})

    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((args[0], closure), kwargs))


def _step_in_closure(model: Any, optimizer: Optimizer) -> None:
    step = optimizer.step

    def closure() -> None:
        step()
        loss_of(model, batches(2, 7)[0]).backward()

    optimizer.step = functools.partial(step, closure)  # type: ignore[method-assign]


def _compute_rate(model: Any, optimizer: Optimizer) -> None:
    class Group(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return 0.5 if key == "lr" else super().__getitem__(key)

    optimizer.param_groups[0] = Group(optimizer.param_groups[0])


def _compute_states(model: Any, optimizer: Optimizer) -> None:
    class State(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return super().__getitem__(key) * (0.5 if key == "exp_avg" else 1)

    for param, state in optimizer.state.items():
        optimizer.state[param] = State(state)


def _have_states_begin(model: Any, optimizer: Optimizer) -> None:
    def begin() -> dict[str, Any]:
        return {key: copy.deepcopy(value) for key, value in first.items()}

    (first, *_) = optimizer.state.values()
    param = next(model.parameters())
    optimizer.state = defaultdict(begin)
    optimizer.param_groups[0]["params"] = [param]


def _shard_betas(model: Any, optimizer: Optimizer) -> None:
    mesh = next(model.parameters()).device_mesh
    betas = (distribute_tensor(torch.tensor(b), mesh, [Replicate()]) for b in (0.8, 0.9))
    optimizer.param_groups[0]["betas"] = tuple(betas)


def _list_twice(model: Any, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].append(next(model.parameters()))
    optimizer.state.clear()


def _have_own_code(model: Any, optimizer: Any) -> None:
    init_group = optimizer._init_group

    def init(group: dict[str, Any], *args: Any) -> Any:
        found = init_group(group, *args)
        for param in group["params"]:
            optimizer.state[param]["seen"] = torch.ones(())
        return found

    optimizer._init_group = init


@pytest.mark.parametrize(
    "change",
    [
        _by_arguments,
        _add_closure,
        _step_in_closure,
        _compute_rate,
        _compute_states,
        _have_states_begin,
        _shard_betas,
        _list_twice,
        _have_own_code,
    ],
)
@on_threads(2)
def test_what_a_program_does_with_an_optimizer_counts(
    rank: int, world_size: int, change: Callable[[Any, Optimizer], None]
) -> None:
    models, optimizers = peers(torch.optim.Adam, {"lr": 0.01})
    for step in range(3):
        _train(models, optimizers, rank, step)
        for each in zip(models, optimizers, strict=True):
            change(*each) if step == 0 else None
    assert_alike(*optimizers)
    rates = [[group["lr"] for group in each.param_groups] for each in optimizers]
    assert rates[0] == rates[1]


def _load(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _replace(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 2


def _replace_dicts(optimizer: Optimizer) -> None:
    for param in list(optimizer.state):
        optimizer.state[param] = dict(optimizer.state[param])


def _count_as_number(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()


def _move_group(optimizer: Optimizer) -> None:
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = params[:1]
    optimizer.add_param_group({"params": params[1:], "lr": 0.5})


def _reorder(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()


@pytest.mark.parametrize(
    "between", [_load, _replace, _replace_dicts, _count_as_number, _move_group, _reorder]
)
@on_threads(2)
def test_what_happens_to_an_optimizer_between_steps_counts(
    rank: int, world_size: int, between: Callable[[Optimizer], None]
) -> None:
    models, optimizers = peers(torch.optim.Adam, {"lr": 0.01})
    for step in range(4):
        _train(models, optimizers, rank, step)
        for optimizer in optimizers:
            between(optimizer) if step == 1 else None
    assert_alike(*optimizers)


@on_threads(2)
def test_schedulers_and_scaling_of_gradients(rank: int, world_size: int) -> None:
    for options in ({}, {"fused": True}):
        models, optimizers = peers(torch.optim.AdamW, {"lr": 0.1, **options})
        schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in models]
        for step in range(4):
            x = batches(2, step)[rank] * (float("inf") if step == 1 else 1.0)
            every = zip(models, optimizers, scalers, schedules, strict=True)
            for model, optimizer, scaler, schedule in every:
                scaler.scale(loss_of(model, x)).backward()
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                optimizer.zero_grad()
        assert_alike(*optimizers)
        assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0


@on_threads(2)
def test_copies_and_pickles_of_an_optimizer_are_optimizers(rank: int, world_size: int) -> None:
    net = sharded_net()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    loss_of(net, batches(2)[rank]).backward()
    optimizer.step()
    net_copy, made = copy.deepcopy((net, optimizer))
    assert type(made) is torch.optim.SGD
    assert {type(p) for p in made.state} == {DTensor}
    assert pickle.loads(pickle.dumps(optimizer.param_groups[0]["lr"])) == 0.001
    loss_of(net_copy, batches(2)[rank]).backward()
    made.step()


# -- parameters of every kind ------------------------------------------------------------------


@on_threads(2)
def test_plain_parameters_beside_sharded_ones(rank: int, world_size: int) -> None:
    net = sharded_net()
    plain = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([*net.parameters(), plain], foreach=True)
    expected = nn.Parameter(torch.ones(3))
    alone = torch.optim.AdamW([expected], foreach=True)
    for step in range(2):
        loss_of(net, batches(2, step)[rank]).backward()
        for param in (plain, expected):
            param.grad = torch.full((3,), 0.5)
        optimizer.step()
        alone.step()
    assert torch.equal(plain, expected)
    assert type(optimizer.state[plain]["exp_avg"]) is torch.Tensor


@on_threads(4)
def test_replicas_and_more_ranks_than_rows(rank: int, world_size: int) -> None:
    models, optimizers = peers(torch.optim.AdamW, {}, mesh=hybrid_mesh(world_size))
    for step in range(2):
        x = batches(world_size, step)[rank]
        for model in models:
            loss_of(model, x).backward()
        step_all(optimizers)
    assert_alike(*optimizers)


@on_threads(2)
def test_gradients_with_other_placements(rank: int, world_size: int) -> None:
    net = sharded_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    loss_of(net, batches(2)[rank]).backward()
    param = next(net.parameters())
    before = param.full_tensor().clone()
    grad = torch.ones(param.shape)
    param.grad = distribute_tensor(grad, param.device_mesh, [Replicate()])
    optimizer.step()
    torch.testing.assert_close(param.full_tensor().detach(), before.detach() - grad)


@on_threads(2)
def test_states_that_are_no_shards_are_refused_as_by_torch(rank: int, world_size: int) -> None:
    models, optimizers = peers(torch.optim.SGD, {"momentum": 0.9})
    _train(models, optimizers, rank, 0)
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, batches(2)[rank]).backward()
        param = next(model.parameters())
        before = param.to_local().clone()
        optimizer.state[param]["momentum_buffer"] = torch.ones(param.shape)
        with pytest.raises((RuntimeError, AssertionError)):
            optimizer.step()
        assert torch.equal(param.to_local(), before)


@pytest.mark.parametrize("options", MODES + FUSED, ids=str)
@pytest.mark.parametrize("is_state", [False, True])
@on_threads(2)
def test_a_penalty_of_old_values_is_refused_as_in_one_process(
    rank: int, world_size: int, options: dict[str, Any], is_state: bool
) -> None:
    net = sharded_net()
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    for _ in range(2):
        loss_of(net, batches(2)[rank]).backward()
        old = [
            param * optimizer.state[param]["exp_avg"] if is_state and optimizer.state else param**2
            for param in net.parameters()
        ]
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(each.sum() for each in old).backward()  # type: ignore[union-attr]


# -- memory ------------------------------------------------------------------------------------


@contextmanager
def _no_collector() -> Iterator[None]:
    """Only what nobody refers to any more is freed, and no cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("options", MODES + FUSED, ids=str)
@on_threads(2)
def test_a_step_keeps_neither_gradients_nor_states_alive(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    net = sharded_net()
    optimizer = torch.optim.Adam(net.parameters(), **options)
    param = next(net.parameters())
    for is_in_hook in (False, True):
        loss_of(net, batches(2)[rank]).backward()
        grad = weakref.ref(param.grad.to_local())
        freed: list[bool] = []

        def drop(*_: Any, grad: Any = grad, freed: list[bool] = freed) -> None:
            optimizer.zero_grad()
            freed.append(grad() is None)

        with _no_collector():
            if is_in_hook:
                optimizer.register_step_post_hook(drop)
            optimizer.step()
            drop()
            state = weakref.ref(optimizer.state[param]["exp_avg"]._local_tensor)
            optimizer.state.clear()
            assert all(freed) and state() is None


@contextmanager
def _failing_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_adam_", lambda *_, **__: 1 / 0)
        yield


def test_a_step_that_fails_leaves_gradients_to_the_program(
    monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    with _failing_kernel(monkeypatch):
        threads(_fail_in_the_kernel, 2)


def _fail_in_the_kernel(rank: int, world_size: int) -> None:
    net = sharded_net()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    loss_of(net, batches(2)[rank]).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    param = next(net.parameters())
    grad = weakref.ref(param.grad.to_local())
    gc.collect()  # the error has seen the frames of the step
    optimizer.zero_grad()
    assert grad() is None


# -- parameters that others have sharded -------------------------------------------------------


def _sharded_by_torch() -> nn.Module:
    net = seeded(Stack)
    for block in net.children():
        torch_fully_shard(block)
    torch_fully_shard(net)
    return net


@pytest.mark.parametrize("options", MODES + FUSED, ids=str)
@on_processes(2)
def test_torchs_fsdp2_steps_on_shards_if_asked(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    models = [_sharded_by_torch() for _ in range(2)]
    optimizers = [torch.optim.AdamW(each.parameters(), **options) for each in models]
    handle = optim.step_on_shards(optimizers[0])
    for step in range(4):
        if step == 3:
            handle.remove()
        for model in models:
            loss_of(model, batches(2, step)[rank]).backward()
        for optimizer in optimizers:
            with _SeesDTensors() as seen:
                optimizer.step()
            assert bool(seen.found) == (optimizer is optimizers[1] or step == 3)
            optimizer.zero_grad()
        assert_alike(*optimizers)


def test_an_optimizer_of_another_kind_is_refused() -> None:
    class Mine(torch.optim.SGD):
        """Its step may do anything."""

    with pytest.raises(TypeError, match=r"found Mine, expected one of Adadelta, .*optim\.local"):
        optim.step_on_shards(Mine([nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=str)
@on_threads(2)
def test_gradients_with_other_placements_stay_as_they_are_if_others_have_sharded(
    rank: int, world_size: int, placement: Placement
) -> None:
    mesh, optimizers = init_device_mesh("cpu", (2,)), []
    for kind in (torch.optim.SGD, type("SGD", (torch.optim.SGD,), {})):
        param = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        param.grad = grad = distribute_tensor(torch.ones(4, 2), mesh, [placement])
        optimizer = kind([param], momentum=0.9)
        if kind is torch.optim.SGD:
            optim.step_on_shards(optimizer)
        optimizer.step()
        assert param.grad is grad
        optimizers.append(optimizer)
    assert_alike(*optimizers)


@on_threads(2)
def test_dtensors_that_nobody_of_ours_made_are_left_as_they_are(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with _SeesDTensors() as seen:
        torch.optim.SGD([param]).step()
    assert seen.found


# -- what makes the way through DTensor as short as it can be ----------------------------------


@on_threads(2)
def test_models_share_the_default_mesh_and_equal_specs(rank: int, world_size: int) -> None:
    models = [sharded_net() for _ in range(2)]
    for param, other in zip(*(each.parameters() for each in models), strict=True):
        assert param._spec is other._spec and param.device_mesh is other.device_mesh
        before = copy.copy(param._spec)
        loss_of(models[0], batches(2)[rank]).backward()
        assert param.grad._spec is param._spec
        param.detach().unsqueeze(0).squeeze_(0)  # changes the spec of the view in place
        assert other._spec == before and hash(other._spec) == hash(before)
