"""State dicts of a wrapped model and of its optimizer, in all kinds, saved and loaded."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from shardwise.checkpoint.ranks.state import sharded_state_dict
from shardwise.transport.peers import new_group
from tests.corpus.gathering import in_full
from tests.frontends.training import (
    STRATEGIES,
    assert_bits,
    optimizer_of,
    train,
    trained_twin,
    wrapped,
)
from tests.sharding.nets import Net, batches, loss_of, seeded
from tests.worlds import on_threads

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
kind = FullyShardedDataParallel.state_dict_type


class Batched(nn.Module):
    """A net with buffers, inside a model that is not wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.norm = nn.BatchNorm1d(5)


# -- the model -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_host")
@on_threads(2)
def test_every_kind_of_state_dict_is_saved_and_loaded(rank: int, world_size: int) -> None:
    expected = seeded(Net)
    for strategy in STRATEGIES:
        model = wrapped(sharding_strategy=strategy)
        state = model.state_dict()
        assert list(state) == list(expected.state_dict())
        for name, value in state.items():
            assert type(value) is torch.Tensor, name
            assert torch.equal(value, expected.get_parameter(name)), name
        whole_before = {name: value.clone() for name, value in state.items()}
        with kind(model, SHARDED):
            sharded = model.state_dict()
        with kind(model, LOCAL):
            local = copy.deepcopy(model.state_dict())
        for name, param in model.named_parameters():
            assert isinstance(sharded[name], DTensor), name
            assert sharded[name].placements == param.placements, name
            assert torch.equal(local[name], param.to_local()), name
        sharded = copy.deepcopy(sharded)
        for saved, type_ in ((state, FULL), (sharded, SHARDED), (local, LOCAL)):
            _perturb(model)
            with kind(model, type_):
                model.load_state_dict(saved)
            assert_bits(model, expected, f"{strategy.name}, {type_.name}")
        _perturb(model)
        for name, value in state.items():
            assert torch.equal(value, whole_before[name]), "training on leaves it as it is"
        model.load_state_dict(state, assign=True)
        train(model, rank, world_size)
        assert_bits(model, trained_twin(world_size)[0], "trained after assign=True")


def _perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)


@on_threads(2)
def test_what_is_whole_can_be_had_on_the_first_rank_alone(rank: int, world_size: int) -> None:
    first = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    model = seeded(Batched)
    names = list(model.state_dict())
    model.net = wrapped(model.net)
    model.norm = FullyShardedDataParallel(model.norm)
    model.register_buffer("plain", torch.ones(1))
    with kind(model, FULL, first):
        state = model.state_dict()
    assert list(state) == (["plain", *names] if rank == 0 else ["plain"])
    if rank == 0:
        saved = state["norm.running_mean"].clone()
        model.norm.module.running_mean.add_(1)
        assert torch.equal(state["norm.running_mean"], saved)
    with kind(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        state = model.state_dict()
    saved = state["net.head.weight"].to_local().clone()
    _perturb(model)
    assert torch.equal(state["net.head.weight"].to_local(), saved), "on the host is a copy"
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    state = FullyShardedDataParallel(tied).state_dict()
    assert state["0.weight"] is state["1.weight"], "gathered once"


@on_threads(2)
def test_what_is_wrong_with_a_state_dict_is_said_by_name(rank: int, world_size: int) -> None:
    model = wrapped()
    state = model.state_dict()
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict({**state, "head.weight": torch.zeros(5, 3)})
    assert (
        f"head.weight on rank {rank}: found shape (5, 3), expected the full tensor, of shape "
        "(5, 6); the state dict type is FULL_STATE_DICT, see set_state_dict_type"
    ) in str(error.value)
    with kind(model, LOCAL), pytest.raises(RuntimeError, match="expected this rank's rows"):
        model.load_state_dict(state)
    missing = {name: value for name, value in state.items() if name != "blocks.0.up.weight"}
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict({**missing, "other": torch.zeros(1)})
    assert 'Missing key(s) in state_dict: "blocks.0.up.weight"' in str(error.value)
    assert 'Unexpected key(s) in state_dict: "other"' in str(error.value)
    told = model.load_state_dict(missing, strict=False)
    assert told.missing_keys == ["blocks.0.up.weight"]

    with pytest.raises(TypeError, match="FULL_STATE_DICT expects a FullStateDictConfig, found a L"):
        FullyShardedDataParallel.set_state_dict_type(model, FULL, LocalStateDictConfig())
    with pytest.raises(ValueError, match="found none in Net"):
        FullyShardedDataParallel.get_state_dict_type(Net())
    FullyShardedDataParallel.set_state_dict_type(model.blocks[0], SHARDED)
    with pytest.raises(ValueError, match="different state dict settings"):
        FullyShardedDataParallel.get_state_dict_type(model)
    inner = model.state_dict()
    assert isinstance(inner["blocks.0.up.weight"], DTensor), "each unit makes its own kind"
    assert not isinstance(inner["blocks.1.up.weight"], DTensor)
    sharded = sharded_state_dict(nn.Sequential(model))
    assert all(isinstance(value, DTensor) for value in sharded.values())
    assert not isinstance(model.state_dict()["blocks.1.up.weight"], DTensor), "set as before"
    with contextlib.suppress(KeyError), kind(model, LOCAL):
        assert FullyShardedDataParallel.get_state_dict_type(model).state_dict_type is LOCAL
        raise KeyError
    assert isinstance(model.state_dict()["blocks.0.up.weight"], DTensor), "each as before"
    FullyShardedDataParallel.set_state_dict_type(model, FULL)
    assert FullyShardedDataParallel.get_state_dict_type(model).state_dict_type is FULL


# -- the optimizer ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_host")
@on_threads(2)
def test_optimizer_state_is_the_one_processes_and_goes_on_from_there(
    rank: int, world_size: int
) -> None:
    _, expected = trained_twin(world_size)
    twin_names = [name for name, _ in Net().named_parameters()]
    for strategy in STRATEGIES:
        model = wrapped(sharding_strategy=strategy)
        optimizer = train(model, rank, world_size)
        for type_ in (FULL, SHARDED, LOCAL):
            with kind(model, type_):
                state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                assert sorted(state["state"]) == sorted(twin_names)
                assert state["param_groups"][0]["params"] == twin_names
                if type_ is FULL:
                    _assert_state_of_twin(state, expected, twin_names)
                saved = copy.deepcopy(state)
                _goes_on(model, saved, rank, world_size)
                assert_same(state, saved)


def _goes_on(model: nn.Module, state: dict[str, Any], rank: int, world_size: int) -> None:
    """A new optimizer that loads the state has the same next step."""
    optimizer = optimizer_of(model)
    load = FullyShardedDataParallel.optim_state_dict_to_load
    load(model, optimizer, state, load_directly=True)
    before = copy.deepcopy(model)
    loss_of(model, batches(world_size, 2)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    expected, reference = trained_twin(world_size, steps=2)
    for step in (2,):
        for batch in batches(world_size, step):
            (loss_of(expected, batch) / world_size).backward()
        reference.step()
    assert_bits(model, expected, "the step after loading")
    with torch.no_grad():
        for param, old in zip(model.parameters(), before.parameters(), strict=True):
            param.copy_(old)


def _assert_state_of_twin(
    state: dict[str, Any], twin: torch.optim.Optimizer, names: list[str]
) -> None:
    for index, name in enumerate(names):
        for key, value in twin.state_dict()["state"][index].items():
            assert torch.equal(state["state"][name][key], value), f"{key} of {name}"


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in expected["state"].items():
        for key, value in values.items():
            value, other = in_full(value), in_full(found["state"][name][key])
            assert torch.equal(value, other), f"{key} of {name} changed after it was saved"


@on_threads(2)
def test_whole_optimizer_state_on_the_first_rank_alone(rank: int, world_size: int) -> None:
    first = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    names = [name for name, _ in Net().named_parameters()]
    _, expected = trained_twin(world_size)
    for arguments in (
        {},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
            "device_mesh": init_device_mesh("cpu", (world_size, 1)),
        },
    ):
        model = wrapped(**arguments)
        optimizer = train(model, rank, world_size)
        with kind(model, FULL, config, first):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            if rank == 0:
                _assert_state_of_twin(state, expected, names)
                saved = copy.deepcopy(state)
            else:
                assert state == {}
            _goes_on(model, state, rank, world_size)
        loss_of(model, batches(world_size)[rank]).backward()
        optimizer.step()  # the very optimizer that was saved
        if rank == 0:
            assert_same(state, saved)  # what lies on the host is a copy, also on a CPU


@on_threads(2)
def test_the_older_functions_for_optimizer_state(rank: int, world_size: int) -> None:
    fsdp = FullyShardedDataParallel
    model = wrapped()
    optimizer = train(model, rank, world_size)
    state = fsdp.full_optim_state_dict(model, optimizer)
    assert bool(state) == (rank == 0)
    everywhere = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
    sharded = fsdp.sharded_optim_state_dict(model, optimizer)
    for loadable in (
        fsdp.scatter_full_optim_state_dict(state if rank == 0 else None, model, optim=optimizer),
        fsdp.shard_full_optim_state_dict(everywhere, model, optim=optimizer),
        fsdp.shard_full_optim_state_dict(everywhere, model),
        fsdp.flatten_sharded_optim_state_dict(sharded, model, optimizer),
    ):
        found = optimizer_of(model)
        found.load_state_dict(loadable)
        for param in model.parameters():
            for key, value in optimizer.state[param].items():
                assert torch.equal(in_full(found.state[param][key]), in_full(value)), key

    plain, reference = trained_twin(world_size)
    names, ids = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID
    by_name = fsdp.rekey_optim_state_dict(reference.state_dict(), names, plain)
    assert sorted(by_name["state"]) == sorted(everywhere["state"])
    assert fsdp.rekey_optim_state_dict(by_name, names, plain) is by_name
    by_id = fsdp.rekey_optim_state_dict(everywhere, ids, plain, optim=reference)
    reference.load_state_dict(by_id)
    with pytest.raises(ValueError, match=r"\['strange'\] are no parameters of Net"):
        fsdp.rekey_optim_state_dict({"state": {"strange": {}}, "param_groups": []}, ids, plain)
    with pytest.raises(ValueError, match=r"\[0, 1, 10, 2, 3\] are no parameters|no parameters of"):
        fsdp.optim_state_dict_to_load(model, optimizer, reference.state_dict())
    everywhere["state"]["gain"]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg of gain on rank \d: found shape"):
        fsdp.optim_state_dict_to_load(model, optimizer, everywhere)
    strange = torch.optim.Adam(nn.Linear(2, 2, bias=False).parameters())
    with pytest.raises(ValueError, match=r"of shape \[2, 2\], which the model does"):
        fsdp.optim_state_dict(model, strange)


def _head_first(model: nn.Module) -> list[dict[str, Any]]:
    """Groups in another order than the model, as scripts write them."""
    of_head, rest = [], []
    for name, param in model.named_parameters():
        (of_head if name.startswith("head") else rest).append(param)
    return [{"params": of_head, "lr": 0.03}, {"params": rest, "lr": 0.001}]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@on_threads(2)
def test_keys_are_of_the_groups_of_the_optimizer(
    rank: int, world_size: int, momentum: float
) -> None:
    fsdp = FullyShardedDataParallel
    names, ids = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID
    plain = seeded(Net)
    reference = torch.optim.SGD(_head_first(plain), lr=0.1, momentum=momentum)
    for param in plain.parameters():
        param.grad = torch.full_like(param, param.numel())
    reference.step()
    state = reference.state_dict()
    by_name = fsdp.rekey_optim_state_dict(state, names, plain, optim=reference)
    for name, param in plain.named_parameters():
        assert by_name["state"].get(name, {}) == reference.state.get(param, {}), name
    assert by_name["param_groups"][0]["params"] == ["head.bias", "head.weight"]
    for given in (reference, _head_first(plain)):
        assert fsdp.rekey_optim_state_dict(state, names, plain, given) == by_name
    with pytest.raises(ValueError, match="group 0: found 2 parameters, expected"):
        fsdp.rekey_optim_state_dict(state, names, plain, plain.parameters())
    with pytest.raises(ValueError, match="found 2 groups, and ids in their order"):
        fsdp.rekey_optim_state_dict(state, names, plain)
    with pytest.raises(ValueError, match=r"optim_input: found groups of \[\d+\] parameters"):
        fsdp.rekey_optim_state_dict(state, names, plain, plain.parameters(), reference)

    # And back, into an optimizer whose groups are in the other order.
    model = wrapped()
    its = torch.optim.SGD(_head_first(model.module)[::-1], lr=0.1, momentum=momentum)
    its.load_state_dict(fsdp.rekey_optim_state_dict(by_name, ids, model, optim=its))
    assert [group["lr"] for group in its.param_groups] == [0.001, 0.03]
    fsdp.optim_state_dict_to_load(model, its, by_name, load_directly=True)
    assert [group["lr"] for group in its.param_groups] == [0.001, 0.03]
    for name, param in plain.named_parameters():
        wanted = reference.state.get(param, {}).get("momentum_buffer")
        if momentum and wanted is not None:
            assert torch.equal(
                in_full(its.state[model.get_parameter(name)]["momentum_buffer"]), wanted
            )
    mixed = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"in one group of the optimizer.*'lr': 0\.0"):
        fsdp.optim_state_dict_to_load(model, mixed, by_name)


@on_threads(2)
def test_a_group_of_other_ranks_is_refused(rank: int, world_size: int) -> None:
    fsdp, model = FullyShardedDataParallel, wrapped()
    optimizer = train(model, rank, world_size)
    alone = new_group([rank])
    calls = (
        lambda group: fsdp.optim_state_dict(model, optimizer, group=group),
        lambda group: fsdp.full_optim_state_dict(model, optimizer, group=group),
        lambda group: fsdp.sharded_optim_state_dict(model, optimizer, group=group),
    )
    for call in calls:
        call(torch.distributed.group.WORLD)
        with pytest.raises(ValueError, match=rf"group on rank {rank}: found ranks \[{rank}\]"):
            call(alone)


@on_threads(2)
def test_state_finds_its_parameter_in_other_parameter_groups(rank: int, world_size: int) -> None:
    model = wrapped()
    saved = train(model, rank, world_size)
    state = FullyShardedDataParallel.optim_state_dict(model, saved)
    split = torch.optim.Adam(
        [
            {"params": [model.gain, *model.head.parameters()], "lr": 7.0},
            {"params": list(model.blocks.parameters()), "lr": 9.0},
        ]
    )
    FullyShardedDataParallel.optim_state_dict_to_load(model, split, state, load_directly=True)
    for param in model.parameters():
        assert torch.equal(
            in_full(split.state[param]["exp_avg"]), in_full(saved.state[param]["exp_avg"])
        )
    assert [group["lr"] for group in split.param_groups] == [1e-2, 1e-2]


# -- torch.distributed.checkpoint ------------------------------------------------------------------


@on_threads(2)
def test_torchs_state_dict_functions_see_the_wrapped_model(rank: int, world_size: int) -> None:
    model = wrapped()
    optimizer = train(model, rank, world_size)
    expected, _ = trained_twin(world_size)
    whole_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in whole_state.items():
        assert torch.equal(value, expected.get_parameter(name)), name
    FullyShardedDataParallel.set_state_dict_type(model, SHARDED)
    state, optim_state = copy.deepcopy(get_state_dict(model, optimizer))
    assert list(state) == list(expected.state_dict())
    assert all(isinstance(value, DTensor) for value in state.values())
    other = wrapped(seeded(Net, seed=5))
    FullyShardedDataParallel.set_state_dict_type(other, SHARDED)
    other_optimizer = optimizer_of(other)
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optim_state)
    assert_bits(other, expected)
    for param, twin in zip(other.parameters(), model.parameters(), strict=True):
        found, wanted = other_optimizer.state[param], optimizer.state[twin]
        assert torch.equal(in_full(found["exp_avg"]), in_full(wanted["exp_avg"]))
    third = wrapped(seeded(Net, seed=6))
    set_model_state_dict(third, whole_state, options=StateDictOptions(full_state_dict=True))
    assert_bits(third, expected)


# -- whole parameters ------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_host")
@on_threads(2)
def test_whole_parameters_are_lent_changed_and_written_back(rank: int, world_size: int) -> None:
    summon = FullyShardedDataParallel.summon_full_params
    expected = seeded(Net)
    for strategy in STRATEGIES:
        model = wrapped(sharding_strategy=strategy)
        optimizer = optimizer_of(model)
        loss_of(model, batches(world_size)[rank]).backward()
        with summon(model):
            for name, param in model.named_parameters():
                assert type(param) is nn.Parameter, name
                assert torch.equal(param, expected.get_parameter(name)), name
                assert param.grad is None
            assert list(model.state_dict()) == list(expected.state_dict())
            with torch.no_grad():
                model.head.weight.fill_(rank + 1)
        sharded = model.head.weight
        rows = sharded.to_local()
        assert torch.equal(rows, torch.full_like(rows, rank + 1)), "each rank its own rows"
        assert sharded is optimizer.param_groups[0]["params"][-2]
        with summon(model, writeback=False), torch.no_grad():
            model.head.bias.fill_(5)
        assert not (model.head.bias.to_local() == 5).any()
        with summon(model, with_grads=True):
            assert model.head.weight.grad.shape == (5, 6)
            model.head.weight.grad.zero_()
            model.gain.grad = None
        assert not model.head.weight.grad.to_local().any()
        assert model.gain.grad is None
        assert model.head.bias.grad.to_local().numel() == model.head.bias.to_local().numel()
        with summon(model, recurse=False):
            assert type(model.head.weight) is nn.Parameter
            assert isinstance(model.blocks[0].up.weight, DTensor)
        with summon(model, writeback=False, rank0_only=True, offload_to_cpu=True):
            assert isinstance(model.gain, DTensor) == (rank != 0)
        with summon(model):
            model.load_state_dict(expected.state_dict())
        assert_bits(model, expected)
        with summon(nn.Sequential(model.blocks[0], nn.ReLU())):
            assert type(model.blocks[0].up.weight) is nn.Parameter
        optimizer.zero_grad()
        train(model, rank, world_size)
        assert_bits(model, trained_twin(world_size)[0], "and trains on")


@on_threads(2)
def test_whole_parameters_are_lent_between_steps_only(rank: int, world_size: int) -> None:
    summon = FullyShardedDataParallel.summon_full_params
    model = wrapped()
    x = batches(world_size)[rank]
    with pytest.raises(NotImplementedError, match="writeback=False or rank0_only=False"):
        summon(model, rank0_only=True).__enter__()
    with summon(model):
        with pytest.raises(RuntimeError, match="run forward and backward outside of it"):
            model(x)
        with pytest.raises(ValueError, match="summoned already; do not nest"), summon(model):
            pass
    out = []
    model.blocks[0].module.register_forward_hook(lambda *_: out.append(_tries(summon, model)))
    loss_of(model, x).backward()
    assert "between steps only" in out[0]
    with contextlib.suppress(KeyError), summon(model):
        raise KeyError
    assert all(isinstance(param, DTensor) for param in model.parameters())


def _tries(summon: Any, model: nn.Module) -> str:
    try:
        with summon(model):
            return "entered"
    except ValueError as error:
        return str(error)


@on_threads(2)
def test_apply_sees_whole_parameters(rank: int, world_size: int) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert type(module.weight) is nn.Parameter
            with torch.no_grad():
                module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight))

    model = wrapped()
    assert model.apply(init) is model
    assert_bits(model, seeded(Net).apply(init))


@on_threads(2)
def test_a_tied_parameter_is_lent_once(rank: int, world_size: int) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    net[1][0].weight = net[0].weight
    net[1] = FullyShardedDataParallel(net[1])
    model = FullyShardedDataParallel(net)
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        assert net[0].weight is net[1][0].weight, "one parameter, in two units"
        net[0].weight.fill_(3)
    assert (in_full(net[1][0].weight) == 3).all()
