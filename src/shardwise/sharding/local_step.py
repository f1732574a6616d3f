"""How torch's own optimizers step on local shards, where they would step through ``DTensor``.

An optimizer that updates each element by itself computes the same numbers from the local tensors of
parameters, gradients and states as from the ``DTensor``s around them, and needs no dispatch of each
operation. Torch calls a hook before a step, which may replace its arguments. Ours replaces
``self``, for the code of the step alone, by a stand-in that shares all attributes but two:

    param_groups    the same options, and local tensors in place of parameters
    state           reads local tensors of states, and writes what is new as ``DTensor``s

The optimizer itself, which the program, hooks and checkpoints see, always has ``DTensor``s. The
stand-in looks at it when the step first asks for groups, after all hooks, and after a closure. If
it finds what has no local meaning, the step works on the optimizer's own groups, as in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardwise._torch import dtensor
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
    look = stand_in.look = _Look(optimizer)
    rest = [look.after(each) if callable(each) else each for each in args[1:]]
    named = {key: look.after(value) if callable(value) else value for key, value in kwargs.items()}
    return (stand_in, *rest), named


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's, with the step that torch gave it."""
    kind = type(optimizer)
    return (
        kind in _CUT
        and kind.step.__module__.startswith("torch.optim.")
        and not torch.compiler.is_compiling()
    )


def _stand_in_class(kind: type[torch.optim.Optimizer]) -> type[Any]:
    """Return a class of optimizers whose groups and states are those of a look at another one."""

    def param_groups(self: Any) -> list[dict[str, Any]]:
        return cast(_Look, self.look).param_groups

    def state(self: Any) -> Mapping[Tensor, Any]:
        return cast(_Look, self.look).state

    body = {
        "__slots__": ("look",),
        "__module__": __name__,
        "param_groups": property(param_groups),
        "state": property(state),
    }
    return type(kind.__name__, (kind,), body)


_STAND_INS = {kind: _stand_in_class(kind) for kind in _CUT}


class _Look:
    """What an optimizer has for a step, as local tensors.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._cut = _CUT[type(optimizer)]
        self._groups: list[dict[str, Any]] | None = None
        self._states: Mapping[Tensor, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with local tensors in place of parameters that have a gradient."""
        if self._groups is None:
            self._groups, self._states = self._take()
        return self._groups

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The states, by local tensor."""
        if self._groups is None:
            self._groups, self._states = self._take()
        return self._states

    def after(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure after which the optimizer is looked at anew."""

        @functools.wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            self._groups = None
            return result

        return call

    def _take(self) -> tuple[list[dict[str, Any]], Mapping[Tensor, Any]]:
        """Return groups and states of local tensors; the optimizer's own, if some have none."""
        optimizer = self._optimizer
        states = _LocalStates(optimizer.state)
        sharded, groups = [], []
        for group in optimizer.param_groups:
            if group["differentiable"] or any(isinstance(each, DTensor) for each in group.values()):
                return optimizer.param_groups, optimizer.state
            shown = []
            for param in group["params"]:
                if (grad := dtensor.placed_grad(param)) is None:
                    continue
                local = param
                if isinstance(param, DTensor):
                    local, state = dtensor.local_with_grad(param, grad), self._local_state(param)
                    if local is None or state is None:
                        return optimizer.param_groups, optimizer.state
                    states[local] = state
                    sharded.append(param)
                shown.append(local)
            groups.append({**group, "params": shown})
        # As each operation on a DTensor does, for those who have kept it for a backward.
        increment_version(sharded)
        return groups, states

    def _local_state(self, param: Tensor) -> _LocalState | None:
        """Return the local tensors of the states of a parameter, if they can stand for them."""
        cut, spec, found = self._cut, dtensor.spec_of(param), _LocalState()
        found.look, found.param = self, param
        for key, value in self._optimizer.state.get(param, _NONE).items():
            part = dtensor.part_like(value, spec) if key in cut else value
            if part is None or isinstance(part, DTensor):
                return None
            dict.__setitem__(found, key, part)
        return found

    def write(self, param: Tensor, key: str, value: Any) -> None:
        """Give the optimizer a state that is new: a local tensor, or another value."""
        is_cut = key in self._cut and isinstance(value, Tensor)
        self._optimizer.state[param][key] = dtensor.placed_as(param, value) if is_cut else value


_NONE: Mapping[str, Any] = {}


class _LocalStates(dict[Tensor, Any]):
    """States of an optimizer by local tensor. Parameters that are no ``DTensor`` have their own.

    Args:
        states: by parameter.
    """

    def __init__(self, states: Mapping[Tensor, Any]) -> None:
        super().__init__()
        self._states = states

    def __missing__(self, param: Tensor) -> Any:
        return self._states[param]


class _LocalState(dict[str, Any]):
    """The states of a parameter as local tensors. What is new goes to the optimizer, too.

    Attributes:
        look: at the optimizer.
        param: the parameter.
    """

    __slots__ = ("look", "param")
    look: _Look
    param: Tensor

    def __setitem__(self, key: str, value: Any) -> None:
        if value is not self.get(key, self):
            super().__setitem__(key, value)
            self.look.write(self.param, key, value)
