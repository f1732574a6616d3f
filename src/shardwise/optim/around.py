"""An optimizer that does something around the steps of another one."""

from __future__ import annotations

from typing import Any

import torch


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
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """Ignored: the base class would start with a state of its own."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported after construction.

        Args:
            param_group: ignored.

        Raises:
            NotImplementedError: always; the base class adds none either.
        """
        if self._constructed:
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
