"""An optimizer's state under the names of its parameters, and back onto any sharding.

An optimizer numbers its parameters in the order in which it was given them. Names outlive that
order, and the mesh too. No optimizer takes a step here to see what its state looks like: the
checkpoint says so, or an optimizer whose state has shapes of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from shardwise.base.errors import CheckpointError
from shardwise.base.optim_names import (
    STEP,
    counts,
    keys_in_order,
    names_in_order,
    parameters_in_order,
    without_wrappers,
)
from shardwise.checkpoint.disk.entries import TensorEntry, torch_dtype
from shardwise.checkpoint.ranks.subclasses import SHARDS, is_needed, put_together, whole_path

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def parameter_names(model: nn.Module, saved: Mapping[str, Any]) -> dict[Tensor, str]:
    """The name of each parameter in the model's state dict.

    Args:
        model: the model.
        saved: its state dict.

    Returns:
        Names by parameter; for a parameter with several names, the first.
    """
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        name = without_wrappers(name)
        if name not in saved and name.removeprefix("module.") in saved:
            name = name.removeprefix("module.")
        names[parameter] = name
    return names


def optimizer_tree(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """The state of an optimizer, with names in place of numbers.

    Args:
        optimizer: the optimizer.
        names: names by parameter.

    Returns:
        ``{"state": {name: {"exp_avg": ...}}, "param_groups": [{"params": [name], "lr": ...}]}``,
        and anything else that the optimizer's own state dict has.

    Raises:
        ValueError: the optimizer has a parameter that is not one of the model's.
    """
    packed = dict(optimizer.state_dict())
    by_number = dict(zip(keys_in_order(packed), names_in_order(optimizer, names), strict=True))
    state = {by_number.get(key, key): value for key, value in packed.pop(STATE).items()}
    return {
        **packed,
        **({STATE: state} if state else {}),  # other ranks may have one
        GROUPS: [
            {**group, PARAMS: [by_number[number] for number in group[PARAMS]]}
            for group in packed[GROUPS]
        ],
    }


def load_optimizer_tree(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    tree: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Give an optimizer the state that :func:`optimizer_tree` returned.

    Integers, and states that had another dtype than their parameter, keep their dtype.

    Args:
        optimizer: the optimizer.
        names: names by parameter.
        tree: the state.
        dtypes: the dtypes that parameters had when it was saved, by name, as far as known.

    Raises:
        CheckpointError: the state is of other parameters.
        ValueError: the optimizer has a parameter that is not one of the model's.
    """
    packed = optimizer.state_dict()
    order = names_in_order(optimizer, names)
    numbers = dict(zip(order, keys_in_order(packed), strict=True))
    groups = [
        {**found, PARAMS: [numbers[name] for name in group]}
        for group, found in saved_groups(optimizer, names, tree)
    ]
    params = {name: param for param, name in names.items()}
    state = {
        numbers.get(name, name): _together(value, params[name], f"optimizer.{STATE}.{name}")
        if name in params
        else value
        for name, value in tree.get(STATE, {}).items()
    }
    optimizer.load_state_dict({**tree, STATE: state, GROUPS: groups})
    for name, values in tree.get(STATE, {}).items():
        if name in params:
            _keep_dtypes(optimizer, params[name], values, dtypes.get(name))


def _keep_dtypes(
    optimizer: torch.optim.Optimizer, param: Tensor, saved: Any, dtype: torch.dtype | None
) -> None:
    """Undo casts of a parameter's state to the parameter's dtype that would change what it means.

    Torch casts all but steps. That is right only for what had the dtype of its parameter before.

    Args:
        optimizer: an optimizer that has loaded the state.
        param: the parameter.
        saved: its state as it was saved.
        dtype: the dtype that the parameter had then; ``None`` if that is unknown.
    """
    held: Any = next(
        (each.state[param] for each in inside_of(optimizer) if param in each.state), {}
    )
    for key, value in saved.items() if isinstance(saved, dict) and isinstance(held, dict) else ():
        found = held.get(key)
        if not (isinstance(value, Tensor) and isinstance(found, Tensor)) or key == STEP:
            continue
        follows = value.dtype == dtype or (dtype is None and value.is_floating_point())
        if found.dtype != value.dtype and found.shape == value.shape and not follows:
            held[key] = value.to(found.device)


def saved_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tree: Mapping[str, Any]
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The names in each parameter group of an optimizer, and the saved group for it.

    Groups of equal settings count as one, as formats that have settings by parameter save them.

    Raises:
        CheckpointError: there is none.
        ValueError: the optimizer has a parameter that is not one of the model's.
    """
    saved = _groups_by_names(tree)
    order = iter(names_in_order(optimizer, names))
    own = [(each, [next(order) for _ in each[PARAMS]]) for each in optimizer.param_groups]
    alike, saved_alike = _joined(own), _joined((each, list(n)) for n, each in saved.items())
    equal = {names: group for group, names in saved_alike.values()}
    for each, group in own:
        found = saved.get(frozenset(group)) or equal.get(alike[_settings(each)][1])
        if found is None:
            raise CheckpointError(
                f"optimizer: found no group among the {len(saved)} saved ones with the same "
                f"{len(group)} parameters as the one that begins with "
                f"{group[0] if group else 'nothing'}"
            )
        yield group, found


def _together(state: Any, param: Tensor, where: str) -> Any:
    """Return the state of a parameter with whatever was saved shard by shard put together."""
    if isinstance(state, dict) and SHARDS in state:
        return put_together(state, param, where)
    if isinstance(state, dict):
        return {key: _together(each, param, f"{where}.{key}") for key, each in state.items()}
    return state


def destinations(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], entries: Iterable[TensorEntry]
) -> Callable[[TensorEntry], Tensor | None]:
    """Make tensors to read the saved state of an optimizer into, sharded like its parameters.

    State that the optimizer already has is reused, and overwritten when it is read into.

    Args:
        optimizer: the optimizer.
        names: names by parameter.
        entries: what was saved.

    Returns:
        A function that returns the tensor for an entry of the optimizer; ``None`` if this rank
        needs nothing of it. It raises ``CheckpointError`` if the entry is of a parameter that the
        optimizer does not have.
    """
    # Here, since a training that only saves does not need them.
    from shardwise.optim.forms import OwnStates
    from shardwise.optim.offloaded.optimizer import OffloadedOptimizer
    from shardwise.optim.on_shards import OptimizerOnShards

    mine = {name: param for param, name in names.items()}
    held = {id(param) for param in parameters_in_order(optimizer)}
    inside = list(inside_of(optimizer))
    own = next((each for each in inside if isinstance(each, OwnStates)), None)
    offloaded = next((each for each in inside if isinstance(each, OffloadedOptimizer)), None)
    on_shards = next((each for each in inside if isinstance(each, OptimizerOnShards)), None)
    kept = None if on_shards is None else on_shards.kept()
    are_counts = counts(
        (str(entry.path[-1]), len(entry.shape), mine[str(entry.path[2])].ndim)
        for entry in entries
        if entry.section == "optimizer" and len(entry.path) > 3 and str(entry.path[2]) in mine
    )

    @functools.cache
    def made(param: Tensor) -> dict[str, Tensor]:
        return {} if own is None else own.new_state(param)

    def destination(entry: TensorEntry) -> Tensor | None:
        if entry.path[1] != STATE or len(entry.path) < 4:
            return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        param = mine.get(str(entry.path[2]))
        if param is None or id(param) not in held:
            raise CheckpointError(f"{entry.fqn}: the optimizer has no parameter of this name")
        if kept is not None:
            made_whole = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
            return made_whole if param in kept else None
        if whole_path(entry.path) is not None:
            needed = is_needed(entry.path, param)
            return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype)) if needed else None
        before: Any = optimizer.state.get(param, {})
        for key in entry.path[3:]:
            before = before.get(key) if isinstance(before, dict) else None
        if _is_alike(before, entry, param):
            found: Tensor = before
            return found
        new = made(param).get(str(entry.path[-1]))
        if new is None or not _is_alike(new, entry, param):
            new = _made_for(param, entry, are_counts)
        return new if offloaded is None else offloaded.home_like(new)

    return destination


def inside_of(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """An optimizer, and those inside of it: that of ``offload``, ``in_backward`` or ``DiLoCo``."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner", None)


def _is_alike(before: Any, entry: TensorEntry, param: Tensor) -> bool:
    meshes = {each.device_mesh for each in (before, param) if isinstance(each, DTensor)}
    return (
        isinstance(before, Tensor)
        and len(meshes) < 2  # else the parameter has been moved since
        and tuple(before.shape) == entry.shape
        and before.dtype == torch_dtype(entry.dtype)
        and before.device.type != "meta"
    )


def _made_for(param: Tensor, entry: TensorEntry, are_counts: Container[str]) -> Tensor:
    dtype, name = torch_dtype(entry.dtype), str(entry.path[-1])
    is_count = name == STEP or (name in are_counts and not entry.shape)
    if not is_count and entry.shape == tuple(param.shape):
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    if isinstance(param, DTensor) and entry.placements:
        # For instance a factor of a factored moment: sharded on the dimensions that it shares.
        return empty_dtensor(
            *entry.shape,
            dtype=dtype,
            device_mesh=param.device_mesh,
            placements=[_fitting(each, entry.shape) for each in param.placements],
        )
    return torch.empty(entry.shape, dtype=dtype)


def _fitting(placement: Placement, shape: tuple[int, ...]) -> Placement:
    fits = type(placement) is Shard and placement.dim < len(shape)
    return placement if fits else Replicate()


def _joined(
    groups: Iterable[tuple[dict[str, Any], list[str]]],
) -> dict[str, tuple[dict[str, Any], frozenset[str]]]:
    """The first group of those with equal settings, and the names in all of them, by settings."""
    found: dict[str, tuple[dict[str, Any], frozenset[str]]] = {}
    for group, names in groups:
        first, others = found.get(_settings(group), (group, frozenset[str]()))
        found[_settings(group)] = first, others.union(names)
    return found


def _settings(group: Mapping[str, Any]) -> str:
    return repr(sorted((k, v) for k, v in group.items() if k not in (PARAMS, "param_names")))


def _groups_by_names(tree: Mapping[str, Any]) -> dict[frozenset[str], dict[str, Any]]:
    groups = tree.get(GROUPS)
    if not isinstance(groups, list):
        raise CheckpointError("optimizer: found no param_groups in the checkpoint")
    found = {}
    for i, group in enumerate(groups):
        params = group.get(PARAMS) if isinstance(group, dict) else None
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            raise CheckpointError(
                f"optimizer.param_groups, group {i}: found no list of parameter names"
            )
        found[frozenset(params)] = group
    return found
