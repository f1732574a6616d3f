"""How torch's own optimizers step on local shards, where they would step through ``DTensor``.

An optimizer that updates each element by itself computes the same numbers from the local tensors of
parameters, gradients and states as from the ``DTensor``s around them, and needs no dispatch of each
operation. Torch calls a hook before a step, which may replace its arguments. Ours replaces ``self``
by a stand-in that shares all attributes, two of which differ for torch's code of the step alone:

    param_groups    the same options, and local tensors in place of parameters
    state           reads local tensors of states, and writes what is new as ``DTensor``s

The optimizer itself, which the program, hooks and checkpoints see, always has ``DTensor``s. The
step asks for groups after all hooks and its closure, and nothing but the step keeps what it gets.
If the optimizer has what has no local meaning, these are its own groups, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardwise._torch import autograd, dtensor
from shardwise.base.arguments import check_arguments

#: Of torch's optimizers that update each element by itself: the states that are cut as parameters.
_CUT: Mapping[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.Adadelta: frozenset({"square_avg", "acc_delta"}),
    torch.optim.Adagrad: frozenset({"sum"}),
    torch.optim.Adam: frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    torch.optim.AdamW: frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    torch.optim.Adamax: frozenset({"exp_avg", "exp_inf"}),
    torch.optim.ASGD: frozenset({"ax"}),
    torch.optim.NAdam: frozenset({"exp_avg", "exp_avg_sq"}),
    torch.optim.RAdam: frozenset({"exp_avg", "exp_avg_sq"}),
    torch.optim.RMSprop: frozenset({"square_avg", "momentum_buffer", "grad_avg"}),
    torch.optim.Rprop: frozenset({"prev", "step_size"}),
    torch.optim.SGD: frozenset({"momentum_buffer"}),
}


def step_on_shards(optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Let an optimizer of torch step on local shards, whoever has sharded its parameters.

    For parameters of torch's FSDP2, or sharded by hand; those of :func:`shardwise.fully_shard` step
    so by themselves. Numbers, states and their classes are what they are without it.

    Args:
        optimizer: one of torch's that update each element by itself: ``Adadelta``, ``Adagrad``,
            ``Adam``, ``AdamW``, ``Adamax``, ``ASGD``, ``NAdam``, ``RAdam``, ``RMSprop``, ``Rprop``
            or ``SGD``; no subclass of one.

    Returns:
        A handle; ``remove()`` ends it.

    Raises:
        TypeError: it is another optimizer.
    """
    check_arguments(step_on_shards, locals())
    if type(optimizer) not in _CUT:
        known = ", ".join(kind.__name__ for kind in _CUT)
        raise TypeError(
            f"step_on_shards: optimizer: found {type(optimizer).__name__}, expected one of {known} "
            "of torch.optim; shardwise.optim.local and shardwise.optim.whole let others work on "
            "shards"
        )
    return optimizer.register_step_pre_hook(stepping_locally)


def stepping_locally(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let a step of an optimizer work on local shards: a hook for before a step.

    Args:
        optimizer: the optimizer.
        args: of its step; the first is what the step knows as ``self``.
        kwargs: of its step.

    Returns:
        Arguments with which the step works on local shards; ``None`` if it is to stay as it is,
        since the optimizer is none that updates each element by itself.
    """
    if args[:1] != (optimizer,) or not _is_elementwise(optimizer):
        return None
    stand_in = object.__new__(_STAND_INS[type(optimizer)])
    stand_in.__dict__ = optimizer.__dict__  # one and the same: scaling of gradients is noted there
    stand_in.optimizer = optimizer
    return (stand_in, *args[1:]), kwargs


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's, with the step that torch gave it."""
    return (
        type(optimizer) in _CUT
        and autograd.has_torchs_step(optimizer)
        and not torch.compiler.is_compiling()
    )


def _stand_in_class(kind: type[torch.optim.Optimizer]) -> type[Any]:
    """Return a class of optimizers whose steps see local tensors of another one."""

    def param_groups(self: Any) -> list[dict[str, Any]]:
        optimizer: torch.optim.Optimizer = self.optimizer
        # Hooks read it, too, since it is among the arguments.
        local = _local_groups(optimizer) if autograd.is_read_by_step(kind) else None
        return optimizer.param_groups if local is None else local

    def state(self: Any) -> Any:
        states = self.optimizer.state
        return _States(states) if autograd.is_read_by_step(kind) else states

    def write(name: str) -> Callable[[Any, Any], None]:
        return lambda self, value: setattr(self.optimizer, name, value)

    body = {
        "__slots__": ("optimizer",),
        "__module__": __name__,
        "__reduce_ex__": lambda self, protocol: self.optimizer.__reduce_ex__(protocol),
        "param_groups": property(param_groups, write("param_groups")),
        "state": property(state, write("state")),
    }
    return type(kind.__name__, (kind,), body)


_STAND_INS = {kind: _stand_in_class(kind) for kind in _CUT}


def _local_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]] | None:
    """Return groups with local tensors, of parameters that have a gradient, if all can have them.

    Each tensor brings its states along, for :class:`_States`.
    """
    if not _has_local_meaning(optimizer):
        return None
    written: list[Tensor] = []
    groups = []
    for group in optimizer.param_groups:
        shown = []
        for param in group["params"]:
            if (grad := param.grad) is None:
                continue
            local = param
            if isinstance(param, DTensor):
                written.append(param)
                state = _local_state(optimizer, param, written)
                local = dtensor.local_with_grad(param, grad)
                if local is None or state is None:
                    return None
                setattr(local, _STATE, state)
            shown.append(local)
        groups.append({**group, "params": shown})
    if len(set(map(id, written))) < len(written):
        return None  # listed twice, so the second one has to see what the step does to the first
    # As each operation on a DTensor does, for those who have kept it for a backward.
    increment_version(written)
    return groups


def _has_local_meaning(optimizer: torch.optim.Optimizer) -> bool:
    """Whether groups and states are as torch makes them, with options that parts can have."""
    groups = optimizer.param_groups
    return (
        getattr(optimizer.state, "default_factory", None) is dict
        and not optimizer.defaults["differentiable"]
        and all(type(group) is dict and not group.get("differentiable") for group in groups)
        and not any(_is_dtensor(each) for group in groups for each in group.values())
    )


def _is_dtensor(option: object) -> bool:
    """Whether an option of a group is a ``DTensor``, or a pair of them as ``betas`` are."""
    return isinstance(option, DTensor) or (
        isinstance(option, tuple) and any(isinstance(each, DTensor) for each in option)
    )


#: The attribute of a local tensor that has the states of its parameter.
_STATE = "_shardwise_state"


class _States:
    """States by local tensor. Parameters that stay as they are have their own.

    Args:
        states: of the optimizer.
    """

    def __init__(self, states: Mapping[Tensor, Any]) -> None:
        self._states = states

    def __getitem__(self, param: Tensor) -> Any:
        local: _LocalState | None = getattr(param, _STATE, None)
        return self._states[param] if local is None else local


class _LocalState(dict[str, Any]):
    """The states of a parameter as local tensors. What is new goes to the optimizer, too.

    Attributes:
        optimizer: the optimizer.
        param: the parameter.
    """

    __slots__ = ("optimizer", "param")
    optimizer: torch.optim.Optimizer
    param: Tensor

    def __setitem__(self, key: str, value: Any) -> None:
        if value is self.get(key, self):
            return
        super().__setitem__(key, value)
        is_cut = key in _CUT[type(self.optimizer)] and isinstance(value, Tensor)
        kept = dtensor.placed_as(self.param, value) if is_cut else value
        self.optimizer.state[self.param][key] = kept


def _local_state(
    optimizer: torch.optim.Optimizer, param: Tensor, written: list[Tensor]
) -> _LocalState | None:
    """Return the states of a parameter as local tensors, if these can stand for them.

    Args:
        optimizer: the optimizer.
        param: the parameter.
        written: gets the ``DTensor``s of which the step writes to the local tensors.
    """
    cut, spec, found = _CUT[type(optimizer)], dtensor.spec_of(param), _LocalState()
    found.optimizer, found.param = optimizer, param
    states = optimizer.state.get(param, _NONE)
    if type(states) is not dict:  # it may compute what is read
        return None
    for key, value in states.items():
        part = value
        if key in cut:
            part = dtensor.part_like(value, spec)
            written.append(value)
        if part is None or isinstance(part, DTensor):
            return None
        dict.__setitem__(found, key, part)
    return found


_NONE: dict[str, Any] = {}
