"""What updates shards during backward, as soon as their gradients are complete for the step.

The runtime decides when that is. ``optim/step_in_backward.py`` has the optimizer.

    the last reduction of a group is over     step() with the parameters of that group alone
    a backward that completes gradients ends  step() with whatever is left, then finish()

What is left are parameters that several groups share, groups that ran again later in the backward,
and gradients that only earlier backwards have added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Steppable(Protocol):
    """A sharded parameter: of a group of our runtime, or of torch's own FSDP2.

    Attributes:
        steps_in_backward: how many it has made.
    """

    steps_in_backward: int

    @property
    def fqn(self) -> str:
        """Its name."""

    @property
    def parameter(self) -> torch.Tensor:
        """What the optimizer updates."""


class Stepper(Protocol):
    """An optimizer that steps in backward. A group has at most one."""

    def check(self) -> None:
        """Check that all shards have made the same steps, and are the ones to update.

        Raises:
            StepInterruptedError: an exception left some groups a step ahead of others.
            RuntimeError: parameters were replaced.
        """

    def check_whole(self) -> None:
        """Check that all shards have made the same steps.

        Raises:
            StepInterruptedError: an exception left some groups a step ahead of others.
        """

    def step(self, name: str, forms: Sequence[Steppable]) -> None:
        """Update shards whose gradients are complete, and drop those gradients.

        Args:
            name: the group, for messages.
            forms: its parameters. Some may have no gradient.
        """

    def finish(self) -> None:
        """End the step: no group will be updated any more in this backward."""

    def interrupt(self) -> None:
        """Note that an exception has ended the backward."""
