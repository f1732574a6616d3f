"""An optimizer's state back onto any sharding, from the names of its parameters.

No optimizer takes a step here to see what its state looks like: the checkpoint says so, or an
optimizer whose state has shapes of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from shardwise.base.errors import CheckpointError
from shardwise.base.optim_names import (
    STEP,
    counts,
    keys_in_order,
    names_in_order,
    parameters_in_order,
)
from shardwise.base.states_keeper import check_goes_on, inside_of, keeper_of
from shardwise.checkpoint.disk.entries import TensorEntry, Value, torch_dtype
from shardwise.checkpoint.disk.values import unflatten
from shardwise.checkpoint.ranks.optimizer import GROUPS, PARAMS, STATE
from shardwise.checkpoint.ranks.subclasses import SHARDS, is_needed, put_together, whole_path

_OPTIMIZER = "optimizer"
_NAMES = "param_names"
_UNNAMED = (
    "; numbers do not tell whose the states are: load the model alone, or save what torch's "
    "get_optimizer_state_dict returns"
)


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
        if name in params and isinstance(values, dict):
            _keep_as_saved(optimizer, params[name], values, dtypes.get(name))


def _keep_as_saved(
    optimizer: torch.optim.Optimizer, param: Tensor, saved: Any, dtype: torch.dtype | None
) -> None:
    """Undo what torch changes in a parameter's state that it loads, if that changes what it means.

    It casts all tensors but steps to the parameter's dtype, inside of dicts and lists, too. That is
    right only for what had the dtype of its parameter before. And it replaces strings.

    Args:
        optimizer: an optimizer that has loaded the state.
        param: the parameter.
        saved: its state as it was saved.
        dtype: the dtype that the parameter had then; ``None`` if that is unknown.
    """
    held: Any = next(
        (each.state[param] for each in inside_of(optimizer) if param in each.state), {}
    )
    for key in held.keys() & saved.keys() if isinstance(held, dict) else ():
        if key != STEP:
            held[key] = _as_saved(held[key], saved[key], dtype)


def _as_saved(found: Any, saved: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(found, Tensor) and isinstance(saved, Tensor):
        follows = saved.dtype == dtype or (dtype is None and saved.is_floating_point())
        differs = found.dtype != saved.dtype and found.shape == saved.shape and not follows
        return saved.to(found.device) if differs else found
    if isinstance(found, dict) and isinstance(saved, dict) and found.keys() == saved.keys():
        return {key: _as_saved(each, saved[key], dtype) for key, each in found.items()}
    if isinstance(found, list | tuple) and type(saved) is type(found) and len(saved) == len(found):
        pairs = zip(found, saved, strict=True)
        return type(saved)(_as_saved(each, old, dtype) for each, old in pairs)
    return saved if isinstance(found, str) and isinstance(saved, str) else found


def saved_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tree: Mapping[str, Any]
) -> list[tuple[list[str], dict[str, Any]]]:
    """The names in each parameter group of an optimizer, and the saved group for it.

    Groups belong together if they have the same parameters; those without any, by their order.
    Groups of equal settings may be one saved group: formats that have settings by parameter do not
    tell them apart.

    Raises:
        CheckpointError: the optimizer has other groups than the saved ones.
        ValueError: the optimizer has a parameter that is not one of the model's.
    """
    saved = _groups_by_names(tree)
    count = sum(map(len, saved.values()))
    order = iter(names_in_order(optimizer, names))
    own = [(each, [next(order) for _ in each[PARAMS]]) for each in optimizer.param_groups]
    alike = _joined(own)
    pairs, joint = [], set[str]()
    for each, group in own:
        if found := saved.get(frozenset(group)):
            pairs.append((group, _in_order(found.pop(0), group)))
        elif group and (found := saved.get(alike[_settings(each)])):
            pairs.append((group, {k: v for k, v in found[0].items() if k != _NAMES}))
            joint |= alike[_settings(each)]
        else:
            raise CheckpointError(
                f"optimizer: found no group among the {count} saved ones with the same "
                f"{len(group)} parameters as the one that begins with {_first(group)}"
            )
    for group in (each[PARAMS] for rest in saved.values() for each in rest):
        if not group or not joint.issuperset(group):
            raise CheckpointError(
                f"optimizer: found {len(own)} groups, expected the {count} saved ones; none has "
                f"the same {len(group)} parameters as the saved one that begins with "
                f"{_first(group)}"
            )
    return pairs


def check_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], values: Iterable[Value]
) -> None:
    """Check that an optimizer has the saved groups, before anything is loaded into it.

    Args:
        optimizer: the optimizer.
        names: names by parameter.
        values: what was saved beside tensors.

    Raises:
        CheckpointError: it has others.
        ValueError: the optimizer has a parameter that is not one of the model's.
    """
    groups = [each for each in values if each.path[:2] == (_OPTIMIZER, GROUPS)]
    # Settings may be lists of which some items are tensors.
    found = [(each.path, each.value) for each in groups if each.path[3:] in ((), (PARAMS,))]
    saved_groups(optimizer, names, unflatten(found, _OPTIMIZER).get(_OPTIMIZER, {}))


def _first(group: list[str]) -> str:
    return group[0] if group else "nothing"


def _in_order(saved: dict[str, Any], params: list[str]) -> dict[str, Any]:
    """A saved group with the names that its parameters were given in the order of others."""
    given = saved.get(_NAMES)
    if not isinstance(given, list) or len(given) != len(params):
        return saved
    by_name = dict(zip(saved[PARAMS], given, strict=True))
    return {**saved, _NAMES: [by_name[name] for name in params]}


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
        optimizer does not have, or of an optimizer from which it cannot go on.
    """
    mine = {name: param for param, name in names.items()}
    held = {id(param) for param in parameters_in_order(optimizer)}
    keeper = keeper_of(optimizer)
    kept = keeper.kept()
    are_counts = counts(
        (str(entry.path[-1]), len(entry.shape), mine[str(entry.path[2])].ndim)
        for entry in entries
        if entry.section == "optimizer" and len(entry.path) > 3 and str(entry.path[2]) in mine
    )

    new_state = functools.cache(keeper.new_state)

    def destination(entry: TensorEntry) -> Tensor | None:
        if entry.path[1] != STATE or len(entry.path) < 4:
            return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        param = mine.get(str(entry.path[2]))
        if param is None or id(param) not in held:
            of_numbers = str(entry.path[2]).isdecimal()  # as in torch's optimizer.state_dict()
            raise CheckpointError(
                f"{entry.fqn}: the optimizer has no parameter of this name{_UNNAMED * of_numbers}"
            )
        try:
            check_goes_on(optimizer, str(entry.path[3]))
        except ValueError as error:
            raise CheckpointError(f"{entry.fqn}: {error}") from None
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
        new = new_state(param).get(str(entry.path[-1]))
        if new is None or not _is_alike(new, entry, param):
            new = _made_for(param, entry, are_counts)
        return keeper.home_like(new)

    return destination


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


def _joined(groups: Iterable[tuple[dict[str, Any], list[str]]]) -> dict[str, frozenset[str]]:
    """The names in all groups of equal settings, by settings."""
    found: dict[str, frozenset[str]] = {}
    for group, names in groups:
        found[_settings(group)] = found.get(_settings(group), frozenset[str]()).union(names)
    return found


def _settings(group: Mapping[str, Any]) -> str:
    return repr(sorted((k, v) for k, v in group.items() if k not in (PARAMS, _NAMES)))


def _groups_by_names(tree: Mapping[str, Any]) -> dict[frozenset[str], list[dict[str, Any]]]:
    groups = tree.get(GROUPS)
    if not isinstance(groups, list):
        raise CheckpointError("optimizer: found no param_groups in the checkpoint")
    found: dict[frozenset[str], list[dict[str, Any]]] = {}
    for i, group in enumerate(groups):
        params = group.get(PARAMS) if isinstance(group, dict) else None
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            numbered = isinstance(params, list) and all(type(each) is int for each in params)
            raise CheckpointError(
                f"optimizer.param_groups, group {i}: found no list of parameter names"
                f"{_UNNAMED * numbered}"
            )
        found.setdefault(frozenset(params), []).append(group)
    return found
