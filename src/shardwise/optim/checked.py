"""What optimizers have in common: options in range, and a closure before the step."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch


class CheckedOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer that checks the options of its groups."""

    @abc.abstractmethod
    def _rules(self, options: Mapping[str, Any]) -> Iterable[tuple[str, bool, str]]:
        """Yield options by name, whether each is in range, and the range. NaN is in none."""

    @abc.abstractmethod
    def _step(self) -> None:
        """Update all parameters that have a gradient. Nothing is differentiated."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options of its own.

        Args:
            param_group: ``params``, and options.

        Raises:
            ValueError: an option is out of range.
        """
        options = {**self.defaults, **param_group}
        for name, is_right, expected in self._rules(options):
            if not is_right:
                raise ValueError(
                    f"{type(self).__name__}: {name}: found {options[name]}, expected {expected}"
                )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient. All ranks call it.

        Args:
            closure: computes the loss and its gradients again.

        Returns:
            What ``closure`` returned, if there is one.

        Raises:
            TypeError: a gradient is sparse. No parameter has been changed.
            RuntimeError: a gradient is sparse, or a parameter complex. Nothing has been changed.
            ValueError: a state that was loaded does not lie as its parameter does. Nothing has been
                changed.
            RanksDivergedError: ranks have gradients of different parameters, or another rank
                failed before the step. Nothing was changed.
            PeerLostError: a peer is lost, or failed during the step. Nothing was changed on this
                rank, but other ranks may have made the step: go on from the last checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss
