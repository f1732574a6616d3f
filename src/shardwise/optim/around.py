"""An optimizer around another one, and a step of that one in parts: some parameters, then others.

One ordinary optimizer has all parameters. To step with some, it is shown those alone, so everything
else about it (states, hyperparameters, state dicts) is as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise._torch import autograd


class AroundOptimizer(torch.optim.Optimizer):
    """An optimizer with the parameters, settings and state of another one.

    Args:
        inner: the other optimizer.

    Attributes:
        inner: the other optimizer.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self._constructed = False
        super().__init__(inner.param_groups, inner.defaults)
        self._constructed = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the inner optimizer."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        """Give the inner optimizer these groups; the base class would start with its own."""
        if self._constructed:
            self.inner.param_groups = value

    @property
    def state(self) -> Any:
        """The state of the inner optimizer; the outer state is in :meth:`state_dict`."""
        self.settle()
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """Give the inner optimizer this state; the base class would start with one of its own."""
        if self._constructed:
            self.replace_state(value)

    def step_part(self) -> None:
        """Step with the parameters that :attr:`param_groups` has now. Others may follow.

        States may still be on their way afterwards: :meth:`settle` waits for them.
        """
        self.step()

    def settle(self) -> None:
        """Wait until the state can be read."""

    def replace_state(self, value: Any) -> None:
        """Give the inner optimizer another state.

        Args:
            value: states by parameter.
        """
        self.inner.state = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: add groups to the inner optimizer, before this one is made.

        Args:
            param_group: a group; during construction, one of the inner optimizer.

        Raises:
            NotImplementedError: it is another.
        """
        if not any(param_group is each for each in self.inner.param_groups):
            raise NotImplementedError(
                f"{type(self).__name__}: parameters cannot be added; add them to the inner "
                f"optimizer and create {type(self).__name__} again"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the inner optimizer does.

        Args:
            set_to_none: drop the gradients (``True``) or fill them with zeros (``False``).
        """
        self.inner.zero_grad(set_to_none)


_PARAMS = "params"
_PARAM_NAMES = "param_names"  # torch keeps them beside named parameters


class PartialSteps:
    """One step of an optimizer, made in parts.

    Every part starts with the hyperparameters of before the step, so that an optimizer that counts
    steps in its parameter groups counts each step once.

    Args:
        optimizer: the optimizer.
        step: what makes it step with the parameters that it is shown.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
        self._optimizer = optimizer
        self._step = step
        groups = optimizer.param_groups
        self._number_of: dict[torch.Tensor, int] = {
            param: number for number, group in enumerate(groups) for param in group[_PARAMS]
        }
        self._name_of: dict[torch.Tensor, str] = {
            param: name
            for group in groups
            for param, name in zip(group[_PARAMS], group.get(_PARAM_NAMES) or (), strict=False)
        }
        # The hyperparameters of parameter groups before the step, and after it.
        self._before = [hyperparameters(group) for group in groups]
        self._after: dict[int, dict[str, Any]] = {}

    def __contains__(self, param: torch.Tensor) -> bool:
        """Whether the optimizer has a parameter."""
        return param in self._number_of

    def run(
        self,
        params: Sequence[torch.Tensor],
        stand_ins: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Step with some parameters as if the optimizer had no others.

        Args:
            params: parameters of the optimizer, at least one.
            stand_ins: what the optimizer is shown in place of some of them.
        """
        others = stand_ins or {}
        parts: dict[int, list[torch.Tensor]] = {}
        for param in params:
            parts.setdefault(self._number_of[param], []).append(param)
        shown = {}
        for number, part in parts.items():
            seen = [others.get(param, param) for param in part]
            shown[number] = {_PARAMS: seen, **self._before[number]}
            if all(param in self._name_of for param in part):
                shown[number][_PARAM_NAMES] = [self._name_of[param] for param in part]
        every = self._optimizer.param_groups
        self._optimizer.param_groups = list(shown.values())
        try:
            with autograd.outside_autocast(params[0].device):
                self._step()
        finally:
            self._optimizer.param_groups = every
        for number, group in shown.items():
            self._after[number] = hyperparameters(group)

    def finish(self) -> None:
        """Keep the hyperparameters that the step has changed."""
        for number, values in self._after.items():
            before = self._before[number]
            self._optimizer.param_groups[number].update(
                {key: value for key, value in values.items() if before.get(key) is not value}
            )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer computes the loss in its step, maybe several times, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in (_PARAMS, _PARAM_NAMES)}
