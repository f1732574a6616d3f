"""Which backwards of a group are still to come in the backward that now runs.

A module that runs twice has two backwards, and its gradient is whole after the second. Forwards
alone do not tell: an output may have been dropped, or be left to another backward. Autograd does.
"""

from __future__ import annotations

import weakref

import torch

from shardwise._torch import autograd


class Pass:
    """A forward of a group, as long as its graph is there.

    Args:
        makes: how often the group's full parameters had been made.

    Attributes:
        makes: the same. Gradients arrive at those full parameters, and at no later ones.
        node: of the graph, which runs when this pass's backward ends; None where no input needs a
            gradient, and so only the end of the whole backward tells.
    """

    def __init__(self, makes: int) -> None:
        self.makes = makes
        self.node: weakref.ref[torch.autograd.graph.Node] | None = None
        self._ended_in = -1

    def end_backward(self) -> None:
        """Note that this pass's backward is over."""
        self._ended_in = autograd.backward_id()

    def has_backward_to_come(self) -> bool:
        """Whether this pass has a backward, not yet over, in the backward that now runs."""
        if self._ended_in == autograd.backward_id():
            return False
        if self.node is None:
            return True  # it may: its gradients are there when all is over
        node = self.node()
        return node is not None and autograd.runs_in_this_backward(node)


class Passes:
    """The passes of a group whose graphs are there; the graphs themselves keep them."""

    def __init__(self) -> None:
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._now: Pass | None = None

    def begin(self, makes: int) -> Pass:
        """Note that a forward with gradients begins; it is kept by whoever holds what is returned.

        Until :meth:`end`, this holds it.
        """
        self._now = Pass(makes)
        self._passes.add(self._now)
        return self._now

    def end(self) -> Pass | None:
        """Let go of the pass that now runs, if one does, and return it."""
        ended, self._now = self._now, None
        return ended

    def end_backward(self) -> None:
        """Note that the backward that now runs is over for all of them."""
        for each in list(self._passes):
            each.end_backward()

    def has_backward_to_come(self) -> bool:
        """Whether the gradient of the group grows further in the backward that now runs."""
        return autograd.in_backward() and any(
            each.has_backward_to_come() for each in list(self._passes)
        )
