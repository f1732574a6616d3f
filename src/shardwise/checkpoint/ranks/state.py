"""The state that a rank has to save: tensors and values by name, and facts about the model.

    {"model": {"a.weight": T}, "optimizer": {"state": {"a.weight": {"exp_avg": T}}}, "extra": ...}

becomes tensors named ``model.a.weight`` and ``optimizer.state.a.weight.exp_avg``, each with the
path that leads to it, and values that JSON can hold.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard

from shardwise._torch import dtensor
from shardwise._torch.module import joined, saved_tensors_of, visits
from shardwise.base.errors import CheckpointError
from shardwise.base.units import listed
from shardwise.checkpoint.disk.entries import (
    ModelFacts,
    Origin,
    StatePath,
    Value,
    dotted,
    dtype_name,
)
from shardwise.checkpoint.disk.values import RANKS, encode, held_in, leaves
from shardwise.checkpoint.ranks.optimizer import optimizer_tree, parameter_names
from shardwise.checkpoint.ranks.per_rank import LocalValue, PerRank, by_rank
from shardwise.checkpoint.ranks.subclasses import taken_apart
from shardwise.sharding import user_calls
from shardwise.sharding.param import forms_of
from shardwise.sharding.state import HasStateDictKinds, groups_of


@contextmanager
def sharded_state_dicts(model: nn.Module) -> Iterator[None]:
    """Make state dicts of ``model`` hold its shards as ``DTensor``s inside."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, HasStateDictKinds):
                stack.enter_context(module.sharded_kind())
        yield


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of ``model`` with its shards as ``DTensor``s.

    Args:
        model: a model that is wrapped, contains wrapped modules, or is sharded without a wrapper.
    """
    with sharded_state_dicts(model):
        return model.state_dict()


@dataclass
class SavedState:
    """What a rank has to save.

    Attributes:
        tensors: tensors by name. They share the memory of the model and the optimizer.
        origins: where each tensor is in the state, by name.
        values: everything else.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)

    def add(self, section: str, tree: Mapping[str, Any], rank: int = 0) -> None:
        """Add ``model``, ``optimizer`` or ``extra``.

        Args:
            section: which of these.
            tree: nested dicts and lists of tensors and plain values.
            rank: this rank, among those that save.

        Raises:
            TypeError: something is neither a tensor that can be saved nor a plain value.
            ValueError: two things have the same name, or a tensor is on the meta device.
        """
        for path, leaf in leaves((section,), tree):
            apart = None
            if section == "optimizer" and isinstance(leaf, Tensor):
                apart = taken_apart(leaf)
            elif section == "extra" and isinstance(leaf, LocalValue | PerRank):
                if any(isinstance(key, int) for key in path):  # beside tensors
                    raise _misplaced(dotted(path), "list")
                apart = by_rank(leaf, rank)
            elif section == "extra" and RANKS in path:
                raise ValueError(f"{dotted(path)}: expected no key {RANKS!r}; use per_rank")
            for part_path, part in [(path, leaf)] if apart is None else leaves(path, apart):
                self._add_leaf(part_path, part)

    def take_apart(self, names: Iterable[str]) -> None:
        """Take tensors apart whose shards are of a tensor subclass on other ranks.

        Args:
            names: of tensors of the optimizer. Those that this rank does not have are left out.
        """
        for name in [name for name in names if name in self.tensors]:
            tensor, origin = self.tensors.pop(name), self.origins.pop(name)
            apart = taken_apart(tensor, plain_too=True)
            for path, part in leaves(origin.path, apart):
                self._add_leaf(path, part)

    def _add_leaf(self, path: StatePath, leaf: Any) -> None:
        name = dotted(path)
        if not name.isprintable():
            raise ValueError(f"{name!r}: expected a name of printable characters")
        if isinstance(leaf, Tensor):
            if name in self.tensors:
                raise ValueError(f"{name}: two tensors have this name")
            self.tensors[name] = check_tensor(leaf, name)
            self.origins[name] = origin_of(leaf, path)
            if path[0] == "extra" and isinstance(leaf, DTensor):
                raise TypeError(f"{name}: is a DTensor, expected a plain tensor in extra")
        elif any(isinstance(each, LocalValue | PerRank) for each in held_in(leaf)):
            raise _misplaced(name, type(leaf).__name__)
        else:
            encode(leaf, name)  # raises before anything is written, if it cannot be saved
            # A copy, since it may be written after training has gone on.
            self.values.append(Value(path, copy.deepcopy(leaf)))


def _misplaced(name: str, kind: str) -> TypeError:
    return TypeError(
        f"{name}: found per_rank(...) inside a {kind}, expected it under a string key of extra, or "
        "of dicts in it"
    )


def check_tensor(tensor: Tensor, name: str) -> Tensor:
    """Check that a tensor can be saved, or loaded into, and return it.

    Raises:
        TypeError: it is sparse, quantized, of an unsupported dtype, or a partial sum.
        ValueError: it is on the meta device.
    """
    if tensor.device.type == "meta":
        raise ValueError(f"{name}: is on the meta device; materialize it first")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{name}: found layout {tensor.layout}, expected a dense tensor")
    try:
        dtype_name(tensor.dtype)
    except ValueError as error:
        raise TypeError(f"{name}: {error}") from None
    if isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor.placements):
        raise TypeError(f"{name}: has placements {tensor.placements}, expected no partial sums")
    held = type(dtensor.plain(tensor).detach())
    if held is not Tensor:
        raise TypeError(f"{name}: found {held.__name__} shards, expected plain tensors")
    return tensor


def check_same_names(where: str, missing: Set[str], unexpected: Set[str]) -> None:
    """Check that a checkpoint and a model have the same names.

    Args:
        where: the checkpoint, for the error message.
        missing: names that only the model has.
        unexpected: names that only the checkpoint has.

    Raises:
        CheckpointError: there are any.
    """
    differences = [
        f"{_listed(names)} not in the {place}"
        for names, place in ((missing, "checkpoint"), (unexpected, "model"))
        if names
    ]
    if differences:
        raise CheckpointError(f"{where}: is of another model: {'; '.join(differences)}")


def _listed(names: Set[str]) -> str:
    """The first names, how many more there are, and the verb that goes with them."""
    return f"{listed(sorted(names))} {'is' if len(names) == 1 else 'are'}"


def origin_of(tensor: Tensor, path: StatePath) -> Origin:
    """Where a tensor is in the state, and how it is sharded."""
    if not isinstance(tensor, DTensor):
        return Origin(path)
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    shape = " ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    return Origin(path, " ".join(map(_placement, tensor.placements)), shape)


def _placement(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return type(placement).__name__.lstrip("_") if placement.is_replicate() else str(placement)


def facts_of(model: nn.Module) -> ModelFacts:
    """What to record about a model: its strategy, its tied tensors, and its ``config.json``."""
    tied = {name: names[0] for name, names in ties(model).items() if name != names[0]}
    return ModelFacts(strategy_of(model), tied, config_of(model))


def ties(model: nn.Module) -> dict[str, list[str]]:
    """The names of each tensor that has several, by each of these names, in model order.

    A tied parameter counts as one in every state of its groups: two groups that are unsharded hold
    a full parameter each.
    """
    form_of = {
        id(owner.registered): id(param.form)
        for group in groups_of(model)
        for param in group.params
        for owner in param.owners
    }
    names: dict[int, list[str]] = {}
    for name, tensor in own_tensors(model).items():
        names.setdefault(form_of.get(id(tensor), id(tensor)), []).append(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that state dicts are made of, by name, whatever hooks do to them.

    Names have no parts that wrappers add.
    """
    return {
        joined(visit.name, name): tensor
        for visit in visits(model)
        for name, tensor in saved_tensors_of(visit.module)
    }


def reshard(model: nn.Module) -> None:
    """Let modules hold their shards, which are about to be loaded.

    Raises:
        MisuseError: a forward or backward is under way, with the values of before.
    """
    for group in groups_of(model):
        user_calls.before_load(group)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # torch's own, too
            module.reshard()


def in_place(state: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """The values of a state dict that are the model's own tensors, or share their memory.

    Hooks of modules may have replaced the others by copies.
    """
    own = {place for tensor in own_tensors(model).values() for place in dtensor.memory_of(tensor)}
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and own.issuperset(dtensor.memory_of(value) or [None])
    }


def config_of(model: nn.Module) -> dict[str, Any]:
    """The ``config.json`` of a transformers model, or of anything that looks like one."""
    config = getattr(model, "config", None)
    try:
        said = json.loads(config.to_json_string())  # type: ignore[union-attr]
        json.dumps(said, allow_nan=False)
    except Exception:  # not a transformers configuration: there is nothing to record
        return {}
    named = isinstance(said, dict) and isinstance(said.get("model_type"), str)
    return said if named else {}


def strategy_of(model: nn.Module) -> str:
    """The sharding strategy of a model, as the command line names it: ``full``, ``grad-op``, ...

    ZeRO-1 stores parameters as ``grad-op`` does. They differ in what a step does with gradients,
    which the model does not know.

    Returns:
        The name; empty if Shardwise does not shard the model.
    """
    groups = list(groups_of(model))
    if not groups:
        return ""
    # Groups at the end of a forward may stay full; a model reshards if any of its groups does.
    frees = any(group.options.reshard_after_forward for group in groups)
    mesh = groups[0].mesh
    if not mesh.shards or mesh.shard.world_size == 1:
        return "no-shard"
    if mesh.replicate is not None:
        return "hybrid" if frees else "hybrid-zero2"
    return "full" if frees else "grad-op"


def model_state(model: nn.Module, *, ignore_frozen_params: bool) -> dict[str, Any]:
    """The state dict of a model with its shards as ``DTensor``s, by torch's names.

    Args:
        model: the model, sharded or not.
        ignore_frozen_params: leave out parameters that require no gradient.
    """
    names = ModelNames(model)
    state = {names.of(key): value for key, value in sharded_state_dict(model).items()}
    if ignore_frozen_params:
        for name in frozen(model):
            state.pop(name, None)
    return state


def frozen(model: nn.Module) -> list[str]:
    """The names of the parameters that require no gradient."""
    return [
        name
        for name, tensor in own_tensors(model).items()
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    ]


class ModelNames:
    """Names in a model, without the parts that wrappers add, and the keys of its state dicts.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        found = list(visits(model))
        self._names = {visit.path: visit.name for visit in found}
        self._names |= {visit.key: visit.name for visit in found}
        self._keys = {visit.name: visit.key for visit in found}  # of the innermost module

    def of(self, key: str) -> str:
        """The name of what a state dict, or the model, has under a key with parts of wrappers."""
        return _moved(key, self._names)

    def key(self, name: str) -> str:
        """The key in state dicts of what has a name."""
        return _moved(name, self._keys)


def _moved(name: str, prefixes: Mapping[str, str]) -> str:
    """A name with the longest of ``prefixes`` that it has replaced."""
    prefix, rest = name, ""
    while prefix:
        prefix, _, part = prefix.rpartition(".")
        rest = joined(part, rest) if rest else part
        if prefix in prefixes:
            return joined(prefixes[prefix], rest)
    return name


def state_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None,
    *,
    ignore_frozen_params: bool = False,
    rank: int = 0,
) -> SavedState:
    """Collect what this rank has to save. Tensors share the memory of the model and the optimizer.

    Args:
        model: the model, sharded or not.
        optimizer: an optimizer of its parameters.
        extra: anything else; see :func:`.saving.save`.
        ignore_frozen_params: leave out parameters that require no gradient.
        rank: this rank, among those that save.

    Raises:
        TypeError: something is neither a tensor that can be saved nor a plain value.
        ValueError: two things have the same name, or a tensor is on the meta device.
        MisuseError: the values of a parameter were lost.
    """
    for form in forms_of(model.parameters()):
        form.check_not_lost()
    state = SavedState()
    saved = model_state(model, ignore_frozen_params=ignore_frozen_params)
    state.add("model", saved)
    if optimizer is not None:
        state.add("optimizer", optimizer_tree(optimizer, parameter_names(model, saved)))
    state.add("extra", extra or {}, rank)
    return state
