"""An optimizer around another: what loops, schedules and checkpoints expect, passed on."""

from __future__ import annotations

from typing import Any

import torch


class AroundOptimizer(torch.optim.Optimizer):
    """Has the parameters, settings and state of another optimizer.

    Args:
        inner: the other one.

    Attributes:
        inner: the other one.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self._made = False
        super().__init__(inner.param_groups, inner.defaults)
        self._made = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        """The base class begins with none of its own, and adds the inner optimizer's to them."""

    @property
    def state(self) -> Any:
        """The inner optimizer's; the outer state is in :meth:`state_dict`."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """The base class begins with an empty one of its own."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after construction.

        Raises:
            NotImplementedError: always; the base class does not add any either.
        """
        if self._made:
            raise NotImplementedError(
                "DiLoCo: parameters cannot be added; add them to the inner optimizer and make "
                "DiLoCo again"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the inner optimizer does."""
        self.inner.zero_grad(set_to_none)
