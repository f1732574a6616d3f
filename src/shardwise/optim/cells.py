"""An instance of any optimizer for some parameters, in which plain tensors stand in for them.

The class of the optimizer never sees how parameters are cut. What it counts in parameter groups, as
many do with steps, is kept beside the states of parameters, under ``"group"``; and what its state
has besides those, under ``"rest"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import dtensor
from shardwise.optim.around import hyperparameters

#: Makes the optimizer from parameter groups.
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
_GROUP, _REST = "group", "rest"


@dataclass(frozen=True)
class ParamCall:
    """A parameter in one call.

    Attributes:
        name: its name, for messages.
        param: the parameter.
        settings: of its group; one object for the whole group.
        value: what stands in for it, which is changed in place or not.
        grad: the gradient of that.
    """

    name: str
    param: Tensor
    settings: Mapping[str, Any]
    value: Tensor
    grad: Tensor | None


class Cell:
    """An optimizer of its own for some parameters. Between calls, stand-ins have no memory.

    Args:
        make: makes the optimizer.
        entries: its parameters.
        states: what :meth:`state_of` returned of them before, if anything.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        entries: Sequence[ParamCall],
        states: Mapping[Tensor, Mapping[str, Any]],
    ) -> None:
        self._stand_ins: dict[Tensor, nn.Parameter] = {}
        groups: dict[int, dict[str, Any]] = {}
        for each in entries:
            made = nn.Parameter(each.value, requires_grad=each.param.requires_grad)
            vars(made).update(vars(each.param))  # attributes, which an optimizer may read
            self._stand_ins[each.param] = made
            group = groups.setdefault(id(each.settings), {**each.settings, "params": []})
            group["params"].append(made)
        self._inner = make(list(groups.values()))
        settings = {self._stand_ins[each.param]: each.settings for each in entries}
        #: The settings from outside that each group has.
        self._seen = [dict(settings[group["params"][0]]) for group in self._inner.param_groups]
        for param, state in states.items():
            group, _ = self._group_of(param)
            own = _on_device(state, self._stand_ins[param].device, group)
            group.update(own.pop(_GROUP, {}))
            self._inner.state.update(own.pop(_REST, {}))
            if own:
                self._inner.state[self._stand_ins[param]] = own

    def call(self, method: str, entries: Sequence[ParamCall]) -> list[Tensor]:
        """Call a method of the optimizer, such as ``step``.

        Args:
            method: its name.
            entries: all parameters. Settings that are new replace those that the optimizer has.

        Returns:
            The new values, in the same memory or not.
        """
        for each in entries:
            group, seen = self._group_of(each.param)
            new = {k: v for k, v in each.settings.items() if v is not seen.get(k, self)}
            group.update(new)
            seen.update(new)
            self._stand_ins[each.param].data = each.value
            self._stand_ins[each.param].grad = each.grad
        try:
            getattr(self._inner, method)()
            return [self._stand_ins[each.param].data for each in entries]
        finally:
            for stand_in in self._stand_ins.values():
                stand_in.grad = None
                stand_in.data = dtensor.without_memory(stand_in.data, stand_in.shape)

    def state_of(self, param: Tensor) -> dict[str, Any]:
        """Return the state of a parameter, with what is counted for all of its group."""
        group, seen = self._group_of(param)
        own = hyperparameters(group).items()
        common = {
            _GROUP: {key: value for key, value in own if value is not seen.get(key, self)},
            _REST: {k: v for k, v in self._inner.state.items() if not isinstance(k, Tensor)},
        }
        state = self._inner.state.get(self._stand_ins[param], {})
        return {**state, **{key: value for key, value in common.items() if value}}

    def _group_of(self, param: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the group of a parameter, and the settings from outside that it has."""
        stand_in = self._stand_ins[param]
        return next(
            (group, seen)
            for group, seen in zip(self._inner.param_groups, self._seen, strict=True)
            if any(each is stand_in for each in group["params"])
        )


def _on_device(
    state: Mapping[str, Any], device: torch.device, group: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the local tensors of a state, where an optimizer that has made them has them."""

    def moved(value: Any, to: torch.device | None) -> Any:
        if isinstance(value, Tensor):
            return dtensor.plain(value).to(to)
        if isinstance(value, dict):
            return {key: moved(each, to) for key, each in value.items()}
        return type(value)(moved(each, to) for each in value) if type(value) is list else value

    # As in torch: counts stay on the host, unless a kernel reads them.
    on_host = () if group.get("capturable") or group.get("fused") else ("step",)
    return {key: moved(value, None if key in on_host else device) for key, value in state.items()}
