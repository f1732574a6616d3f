"""Optimizer state by parameter name: gathered to be saved, sharded again to be loaded.

    optimizer.state_dict()    {"state": {0: {"exp_avg": DTensor, "step": ...}}, "param_groups": []}
    by name                   {"state": {"0.weight": {"exp_avg": ..., "step": ...}}, ...}

A tensor that is sharded as its parameter is (a ``DTensor``) is converted as the parameter is. Any
other value (a step, a hyperparameter) stays as it is.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    OptimStateKeyType,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor, fsdp
from shardwise.base.boxes import Box, narrow
from shardwise.base.optim_names import counts, keys_in_order
from shardwise.base.states_keeper import keeper_of
from shardwise.checkpoint.disk.values import replaced_in
from shardwise.frontends.optim_groups import (
    check_same_groups,
    groups_like,
    made_from,
    names_by_key,
    renamed,
)
from shardwise.frontends.state_dict import (
    StateDict,
    exported,
    shard_of,
    sharded_params,
    wrappers_in,
)
from shardwise.frontends.summon import is_first
from shardwise.optim.pool import group_over
from shardwise.sharding.group_param import GroupParam
from shardwise.transport.buckets import as_sendable


def rekeyed(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: object,
    optim: torch.optim.Optimizer | None,
) -> StateDict:
    """See :meth:`OptimSavingModule.rekey_optim_state_dict`."""
    optim = made_from(optim, optim_input)
    wanted = str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int
    saved = optim_state_dict["param_groups"]
    given = [*optim_state_dict["state"], *keys_in_order(optim_state_dict)]
    kinds = {type(key) for key in given}
    if kinds <= {wanted}:
        return optim_state_dict
    if len(kinds) > 1:
        raise ValueError(
            f"optimizer state: found keys of types {sorted(map(str, kinds))}, expected names or ids"
        )
    if optim is None and wanted is str and len(saved) > 1:
        raise ValueError(
            f"optimizer state: found {len(saved)} groups, and ids in their order, expected the "
            "optimizer that has these groups; pass it as optim"
        )
    names = names_by_key(model, optim)
    table: Mapping[Any, Any] = (
        names if wanted is str else {name: key for key, name in names.items()}
    )
    unknown = [key for key in dict.fromkeys(given) if key not in table]
    if unknown:
        raise ValueError(
            f"optimizer state: {unknown} are no parameters of {type(model).__name__} that the "
            "optimizer has"
        )
    state = {table[key]: value for key, value in optim_state_dict["state"].items()}
    if wanted is int:
        return {"state": state, "param_groups": groups_like(optim, saved, table)}
    groups = [renamed(group, [table[key] for key in group["params"]]) for group in saved]
    if optim is not None:
        check_same_groups(groups, names, optim)
    return {"state": state, "param_groups": groups}


def save_by_name(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: StateDict,
    settings: StateDictSettings,
) -> StateDict:
    """The state of an optimizer by parameter name; empty on ranks that do not keep it."""
    _check_all_on_all_ranks(optimizer, "optim_state_dict")
    names = names_by_key(model, optimizer)
    config = settings.optim_state_dict_config
    rank0_only = getattr(config, "rank0_only", False)
    keeps = not rank0_only or is_first(wrappers_in(model)[0].settings.mesh)
    states: dict[str, dict[str, Any]] = {}
    for key in sorted(state_dict["state"], key=lambda key: _name_of(key, names)):
        name = _name_of(key, names)
        kept: dict[str, Any] = {}
        for kind, value in state_dict["state"][key].items():
            made = replaced_in(value, lambda each: exported(each, settings.state_dict_type, config))
            if keeps:
                kept[kind] = made
        states[name] = kept
    if not keeps:
        return {}
    groups = [
        {**copy.deepcopy(group), "params": [_name_of(key, names) for key in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


def _check_all_on_all_ranks(optimizer: torch.optim.Optimizer | None, doing: str) -> None:
    if keeper_of(optimizer).kept() is not None:
        raise ValueError(
            f"{doing}: found an optimizer of shardwise.optim.whole, which has states of different "
            "parameters on each rank, expected all on all ranks; use shardwise.checkpoint"
        )


def load_by_name(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state_dict: StateDict,
    settings: StateDictSettings,
    key_type: OptimStateKeyType = OptimStateKeyType.PARAM_ID,
    receive: Callable[[Any], Any] = lambda value: value,
) -> StateDict:
    """Convert a state by parameter name for ``optimizer.load_state_dict``, without communication.

    Without an optimizer, it is for one that has ``model.parameters()`` in order. Values are first
    what ``receive`` makes of them.
    """
    _check_all_on_all_ranks(optimizer, "optim_state_dict_to_load")
    names = names_by_key(model, optimizer)
    keys = {name: key for key, name in names.items()}
    params = sharded_params(model)
    _check_names(state_dict, keys, model)
    are_counts = counts(
        (kind, value.ndim, params[name].sharded.ndim)
        for name, state in state_dict["state"].items()
        for kind, value in state.items()
        if isinstance(value, torch.Tensor) and name in params
    )
    keeper = keeper_of(optimizer)
    tensors = dict(model.named_parameters())

    def place(
        what: str, param: GroupParam | None, form: torch.Tensor | None
    ) -> Callable[[Any], Any]:
        return lambda value: _place(what, receive(value), param, form, settings)

    states: dict[Any, dict[str, Any]] = {}
    for name, state in state_dict["state"].items():
        forms = keeper.new_state(tensors[name])
        made = {
            kind: receive(value).clone()
            if kind in are_counts and getattr(value, "ndim", None) == 0
            else replaced_in(value, place(f"{kind} of {name}", params.get(name), forms.get(kind)))
            for kind, value in state.items()
        }
        states[name if key_type is OptimStateKeyType.PARAM_NAME else keys[name]] = made
    groups = groups_like(optimizer, state_dict["param_groups"], keys)
    if key_type is OptimStateKeyType.PARAM_NAME:
        for group in groups:
            group["params"] = [names[key] for key in group["params"]]
    return {"state": states, "param_groups": groups}


def load_from_first_rank(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state: StateDict | None,
    settings: StateDictSettings,
    group: dist.ProcessGroup | None,
    keys: OptimStateKeyType = OptimStateKeyType.PARAM_ID,
) -> StateDict:
    """Load a full state by name that only the first rank has, one tensor at a time.

    All ranks of ``group`` call this; by default those of the mesh. They learn first what there is,
    with tensors on the meta device, and then get the values in the same order.
    """
    unit = wrappers_in(model)[0].settings
    group, device = group_over(unit.mesh) if group is None else group, unit.device
    source = dist.get_process_group_ranks(group)[0]
    tensors: deque[torch.Tensor] = deque()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    sent: list[Any] = [None]
    if dist.get_rank() == source:
        if state is None:
            raise ValueError(f"rank {source}: found None, expected the full optimizer state")
        held = replaced_in(state["state"], placeholder)
        sent[0] = {"state": held, "param_groups": state["param_groups"]}
    dist.broadcast_object_list(sent, src=source, group=group, device=device)

    def receive(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        mine = tensors.popleft() if tensors else torch.empty(value.shape, dtype=value.dtype)
        tensor = mine.to(device, copy=True).resolve_conj().resolve_neg().contiguous()
        dist.broadcast(as_sendable(tensor), source, group=group)
        return tensor.cpu()

    return load_by_name(model, optim, sent[0], settings, keys, receive)


def _name_of(key: Any, names: Mapping[int, str]) -> str:
    return key if isinstance(key, str) else names[key]


def _place(
    what: str,
    value: Any,
    param: GroupParam | None,
    form: torch.Tensor | None,
    settings: StateDictSettings,
) -> Any:
    """A copy of a state dict's value, sharded as the optimizer needs it: like ``form``, if any."""
    if not isinstance(value, torch.Tensor):
        return value
    value = fsdp.whole(value)
    if isinstance(value, DTensor) or param is None:
        return value.clone()
    if isinstance(form, DTensor) and form.shape != param.sharded.shape:
        return _placed_as(what, form, value, settings)
    return shard_of(f"optimizer state {what}", value, param, settings)


def _placed_as(
    what: str, form: DTensor, value: torch.Tensor, settings: StateDictSettings
) -> torch.Tensor:
    """A value of a state whose shape is not its parameter's, as the optimizer's own states are.

    Raises:
        ValueError: it has another shape.
    """
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    rows = dtensor.local_of(form)
    expected = rows.shape if is_local else form.shape
    if value.shape != expected:
        raise ValueError(
            f"optimizer state {what} on rank {dist.get_rank()}: found shape {tuple(value.shape)}, "
            f"expected {tuple(expected)}; the state dict type is {settings.state_dict_type.name}, "
            "see set_state_dict_type"
        )
    if not is_local:
        value = narrow(value, Box(*dtensor.chunk_of(form)))
    rows = value.detach().to(rows.device, copy=True).contiguous()
    return dtensor.wrap_local(rows, dtensor.with_dtype(dtensor.spec_of(form), rows.dtype))


def _check_names(state_dict: StateDict, keys: Mapping[str, int], model: nn.Module) -> None:
    named = [name for group in state_dict["param_groups"] for name in group["params"]]
    unknown = [name for name in [*state_dict["state"], *named] if name not in keys]
    if unknown:
        raise ValueError(
            f"optimizer state on rank {dist.get_rank()}: {unknown[:5]} are no parameters of "
            f"{type(model).__name__} that the optimizer has; expected names like "
            f"{next(iter(keys), None)!r}. rekey_optim_state_dict turns ids into names"
        )


def check_group(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Check that a process group is one that the model is sharded over.

    Raises:
        ValueError: it has other ranks.
    """
    if group is None:
        return
    mesh = wrappers_in(model)[0].settings.mesh
    every = [mesh.mesh.flatten().tolist()]
    every += [dist.get_process_group_ranks(each) for each in mesh.get_all_groups()]
    found = dist.get_process_group_ranks(group)
    if sorted(found) not in map(sorted, every):
        raise ValueError(
            f"group on rank {dist.get_rank()}: found ranks {found}, expected those that the model "
            f"is sharded over, {every[0]}; leave it out"
        )
