"""Optimizer state by parameter names: gathered for saving, cut again for loading.

    optimizer.state_dict()    {"state": {0: {"exp_avg": DTensor, "step": ...}}, "param_groups": []}
    by name                   {"state": {"0.weight": {"exp_avg": ..., "step": ...}}, ...}

A tensor that lies as its parameter does (a ``DTensor``) is converted as the parameter is; any other
value (a step, a hyperparameter) is taken as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor

from shardwise.frontends.state_dicts import as_shard, cut, exported
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.reach import groups_of

StateDict = dict[str, Any]
Receive = Callable[[Any], Any]


def save_by_name(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: StateDict,
    settings: StateDictSettings,
    *,
    keeps: bool,
) -> StateDict:
    """The state of an optimizer by parameter names, its tensors as ``settings`` say.

    Args:
        model: the model that the optimizer trains.
        optimizer: the optimizer.
        state_dict: its state, by parameter ids or names.
        settings: the kind of state dict.
        keeps: whether this rank wants whole tensors; it takes part in gathering them anyway.

    Returns:
        The state; empty where a whole one is not wanted.
    """
    names = _names_by_key(model, optimizer)
    to_host = settings.optim_state_dict_config.offload_to_cpu
    states: dict[str, dict[str, Any]] = {}
    for key in sorted(state_dict["state"], key=lambda key: _name_of(key, names)):
        name = _name_of(key, names)
        kept: dict[str, Any] = {}
        for kind, value in state_dict["state"][key].items():
            made = exported(value, settings.state_dict_type, to_host=to_host)
            if keeps:
                kept[kind] = made
        states[name] = kept
    if not keeps:
        return {}
    groups = copy.deepcopy(state_dict["param_groups"])
    for group in groups:
        group["params"] = [_name_of(key, names) for key in group["params"]]
    return {"state": states, "param_groups": groups}


def load_by_name(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state_dict: StateDict,
    settings: StateDictSettings,
    *,
    keeps_names: bool = False,
    receive: Receive = lambda value: value,
) -> StateDict:
    """What ``optimizer.load_state_dict`` takes, of a state by parameter names. No communication.

    Args:
        model: the model that the optimizer trains.
        optimizer: the optimizer; without one, of ``model.parameters()`` in their order.
        state_dict: whole tensors, ``DTensor``s, or this rank's rows under ``LOCAL_STATE_DICT``.
        settings: the kind of state dict.
        keeps_names: leave names as keys, as optimizers want that know parameters by name.
        receive: applied to every value first; see :func:`broadcast_state`.

    Raises:
        ValueError: a name is not one of the model's, or a tensor does not have the shape of its
            parameter.
    """
    keys = {name: key for key, name in _names_by_key(model, optimizer).items()}
    params = sharded_params(model)
    _check_names(state_dict, keys, model)
    states: dict[Any, dict[str, Any]] = {}
    for name, state in state_dict["state"].items():
        made = {
            kind: _place(f"{kind} of {name}", receive(value), params.get(name), settings)
            for kind, value in state.items()
        }
        states[name if keeps_names else keys[name]] = made
    groups = _groups_like(optimizer, state_dict["param_groups"], keys)
    if keeps_names:
        names = {key: name for name, key in keys.items()}
        for group in groups:
            group["params"] = [names[key] for key in group["params"]]
    return {"state": states, "param_groups": groups}


def broadcast_state(
    state_dict: StateDict | None, group: dist.ProcessGroup, device: torch.device
) -> tuple[StateDict, Receive]:
    """Tell every rank of ``group`` what the whole state is that its first rank has.

    Args:
        state_dict: the state by names; looked at on the first rank only.
        group: the ranks; all of them call it.
        device: where collectives run.

    Returns:
        The state without its tensors, and a function that turns what stands in the place of one
        into that tensor. All ranks call it in the same order; so no rank holds more than one.
    """
    source = dist.get_process_group_ranks(group)[0]
    tensors: list[torch.Tensor] = []

    def blank(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return _Blank(len(tensors) - 1, value.shape, value.dtype)

    told: list[Any] = [None]
    if dist.get_rank() == source:
        if state_dict is None:
            raise ValueError(f"rank {source}: expected the whole optimizer state, found None")
        told[0] = {
            "state": {
                name: {kind: blank(value) for kind, value in state.items()}
                for name, state in state_dict["state"].items()
            },
            "param_groups": state_dict["param_groups"],
        }
    dist.broadcast_object_list(told, src=source, group=group, device=device)

    def receive(value: Any) -> Any:
        if not isinstance(value, _Blank):
            return value
        mine = tensors[value.index] if tensors else torch.empty(value.shape, dtype=value.dtype)
        tensor = mine.to(device, copy=True).contiguous()
        dist.broadcast(tensor, source, group=group)
        return tensor.cpu()

    return told[0], receive


def rekey(
    state_dict: StateDict,
    key_type: OptimStateKeyType,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> StateDict:
    """The same state with parameter names as keys, or with parameter ids.

    Raises:
        ValueError: some keys are names and some are ids, or one is not of this model.
    """
    wanted = str if key_type is OptimStateKeyType.PARAM_NAME else int
    kinds = {type(key) for key in state_dict["state"]}
    if kinds <= {wanted}:
        return state_dict
    if len(kinds) > 1:
        raise ValueError(
            f"optimizer state: expected names or ids as keys, found {sorted(map(str, kinds))}"
        )
    names = _names_by_key(model, optimizer)
    table: Mapping[Any, Any] = (
        names if wanted is str else {name: key for key, name in names.items()}
    )
    unknown = [key for key in state_dict["state"] if key not in table]
    if unknown:
        raise ValueError(
            f"optimizer state: {unknown} are no parameters of {type(model).__name__} that the "
            "optimizer has"
        )
    groups = copy.deepcopy(state_dict["param_groups"])
    for group in groups:
        group["params"] = sorted(table[key] for key in group["params"])
    state = {table[key]: value for key, value in state_dict["state"].items()}
    return {"state": state, "param_groups": groups}


def sharded_params(model: nn.Module) -> dict[str, ShardedParam]:
    """The sharded parameters of ``model`` by all names that they have."""
    places: dict[tuple[nn.Module, str], ShardedParam] = {}
    for group in groups_of(model):
        for param in group.params:
            places.update(((owner.module, owner.name), param) for owner in param.owners)
    found: dict[str, ShardedParam] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            if (module, name) in places:
                found[f"{prefix}.{name}" if prefix else name] = places[module, name]
    return found


def _names_by_key(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
    """The name of every parameter by the id that the optimizer's state dict gives it."""
    names = {param: name for name, param in model.named_parameters()}
    if optimizer is None:
        return dict(enumerate(names.values()))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    strange = [tuple(param.shape) for param in params if param not in names]
    if strange:
        raise ValueError(
            f"the optimizer has parameters of shapes {strange} that {type(model).__name__} does "
            "not have now; make it of model.parameters() after wrapping the model, and call this "
            "outside of summon_full_params"
        )
    return {key: names[param] for key, param in enumerate(params)}


def _name_of(key: Any, names: Mapping[int, str]) -> str:
    return key if isinstance(key, str) else names[key]


def _place(what: str, value: Any, param: ShardedParam | None, settings: StateDictSettings) -> Any:
    """A value of a state dict as the optimizer is to have it, which will write to it."""
    if not isinstance(value, torch.Tensor):
        return value
    is_step = value.ndim == 0 and param is not None and param.sharded.ndim > 0
    if isinstance(value, DTensor) or param is None or is_step:
        return value.clone()
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    expected = param.local.shape if is_local else param.sharded.shape
    if value.shape != expected:
        raise ValueError(
            f"optimizer state {what} on rank {dist.get_rank()}: expected shape {tuple(expected)} "
            f"under {settings.state_dict_type.name}, found {tuple(value.shape)}"
        )
    return as_shard(param, value) if is_local else cut(param, value)


def _check_names(state_dict: StateDict, keys: Mapping[str, int], model: nn.Module) -> None:
    named = [name for group in state_dict["param_groups"] for name in group["params"]]
    unknown = [name for name in [*state_dict["state"], *named] if name not in keys]
    if unknown:
        raise ValueError(
            f"optimizer state on rank {dist.get_rank()}: {unknown[:5]} are no parameters of "
            f"{type(model).__name__} that the optimizer has; expected names like "
            f"{next(iter(keys), None)!r}. rekey_optim_state_dict turns ids into names"
        )


def _groups_like(
    optimizer: torch.optim.Optimizer | None, saved: list[dict[str, Any]], keys: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Saved parameter groups, by ids, in the order and with the members that the optimizer has.

    ``Optimizer.load_state_dict`` goes by the place of a parameter, not by its id.
    """
    groups = copy.deepcopy(saved)
    for group in groups:
        group["params"] = sorted(keys[name] for name in group["params"])
    if optimizer is None:
        return groups
    group_of = {key: group for group in groups for key in group["params"]}
    made: list[dict[str, Any]] = []
    first = 0
    for own in optimizer.param_groups:
        members = list(range(first, first + len(own["params"])))
        first += len(members)
        found = next((group_of[key] for key in members if key in group_of), {})
        made.append({**found, "params": members})
    return made


@dataclass(frozen=True)
class _Blank:
    """What is told of a tensor before it comes."""

    index: int
    shape: torch.Size
    dtype: torch.dtype
