"""Optimizer state by parameter name: gathered to be saved, sharded again to be loaded.

    optimizer.state_dict()    {"state": {0: {"exp_avg": DTensor, "step": ...}}, "param_groups": []}
    by name                   {"state": {"0.weight": {"exp_avg": ..., "step": ...}}, ...}

A tensor that is sharded as its parameter is (a ``DTensor``) is converted as the parameter is. Any
other value (a step, a hyperparameter) stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from shardwise.frontends.settings import UnitSettings
from shardwise.frontends.state_dict import (
    SavingModule,
    as_shard,
    cut,
    exported,
    sharded_params,
    state_dict_settings,
    wrappers_in,
)
from shardwise.sharding.group_param import GroupParam


class OptimSavingModule(SavingModule):
    """A wrapper that knows the optimizer's state by the names of its parameters."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """The state of ``optim`` by parameter names, in the kind that is set on ``model``.

        Every rank calls it.

        Args:
            model: the model, wrapped or with wrapped modules in it.
            optim: an optimizer of its parameters.
            optim_state_dict: in place of ``optim.state_dict()``.
            group: not needed: parameters know over which ranks they are cut.
        """
        settings = SavingModule.get_state_dict_type(model)
        state = optim.state_dict() if optim_state_dict is None else optim_state_dict
        keeps = wrappers_in(model)[0].keeps_whole(settings.optim_state_dict_config)
        return save_by_name(model, optim, state, settings, keeps=keeps)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Turn what :meth:`optim_state_dict` made into what ``optim.load_state_dict`` takes.

        With ``rank0_only`` in the settings of a whole state, only the first rank has to have it.

        Args:
            model: the model, wrapped or with wrapped modules in it.
            optim: an optimizer of its parameters.
            optim_state_dict: the state by parameter names.
            is_named_optimizer: whether ``optim`` knows its parameters by name.
            load_directly: call ``optim.load_state_dict`` too.
            group: over which ranks to send what only the first one has; by default all of the mesh.

        Raises:
            ValueError: a name that the model does not have, or a tensor of another shape.
        """
        settings = SavingModule.get_state_dict_type(model)
        only_first = getattr(settings.optim_state_dict_config, "rank0_only", False)
        made = _to_load(
            model, optim, optim_state_dict, settings, is_named_optimizer, only_first, group
        )
        if load_directly:
            optim.load_state_dict(made)
        return made

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: object = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """The whole state by parameter names, on the host; an older :meth:`optim_state_dict`."""
        config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        settings = state_dict_settings(StateDictType.FULL_STATE_DICT, None, config)
        keeps = wrappers_in(model)[0].keeps_whole(config)
        return save_by_name(model, optim, optim.state_dict(), settings, keeps=keeps)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> StateDict:
        """The state by parameter names as ``DTensor``s; an older :meth:`optim_state_dict`."""
        settings = state_dict_settings(StateDictType.SHARDED_STATE_DICT)
        return save_by_name(model, optim, optim.state_dict(), settings, keeps=True)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """What ``load_state_dict`` takes, of a whole state that every rank has."""
        settings = state_dict_settings(StateDictType.FULL_STATE_DICT)
        return _to_load(model, optim, full_optim_state_dict, settings)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: torch.optim.Optimizer
    ) -> StateDict:
        """What ``load_state_dict`` takes, of what :meth:`sharded_optim_state_dict` made."""
        settings = state_dict_settings(StateDictType.SHARDED_STATE_DICT)
        return _to_load(model, optim, sharded_optim_state_dict, settings)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """What ``load_state_dict`` takes, of a whole state that only the first rank has."""
        settings = state_dict_settings(StateDictType.FULL_STATE_DICT)
        return _to_load(model, optim, full_optim_state_dict, settings, only_first=True, group=group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """The same state with parameter names as keys, or with parameter ids.

        Args:
            optim_state_dict: by names or by ids.
            optim_state_key_type: which of both is wanted.
            model: the model, which need not be wrapped.
            optim_input: not needed.
            optim: an optimizer of its parameters; without one, ``model.parameters()`` in order.

        Raises:
            ValueError: some keys are names and some are ids, or one is not of this model.
        """
        return rekey(optim_state_dict, optim_state_key_type, model, optim)


def _to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state: StateDict | None,
    settings: StateDictSettings,
    keeps_names: bool = False,
    only_first: bool = False,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    if not only_first:
        assert state is not None
        return load_by_name(model, optim, state, settings, keeps_names=keeps_names)
    unit = wrappers_in(model)[0].settings
    over = group if group is not None else _group_of(unit)
    state, receive = broadcast_state(state, over, unit.device)
    return load_by_name(model, optim, state, settings, keeps_names=keeps_names, receive=receive)


def _group_of(unit: UnitSettings) -> dist.ProcessGroup:
    """A process group of all ranks of a mesh."""
    if unit.mesh.ndim == 1:
        return unit.mesh.get_group()
    if unit.mesh.size() != dist.get_world_size():
        raise ValueError(
            "a mesh of two dimensions over a part of all ranks: pass group=, the process group of "
            "the ranks that load the state"
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


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


def _place(what: str, value: Any, param: GroupParam | None, settings: StateDictSettings) -> Any:
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
