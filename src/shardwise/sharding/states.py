"""The states of a group and of a training step, and the moves between them.

            unshard()              wait_for_unshard()
  SHARDED ------------> UNSHARDING ------------------> UNSHARDED
     ^                     ^                            |     |
     |                     | unshard()                  |     |
     |                     +-- SHARDED_POST_FORWARD <---+     |
     |                                 reshard_after_forward()|
     +--------------------------------------------------------+
                           reshard()

A group is ``SHARDED_POST_FORWARD`` between forward and backward under an integer
``reshard_after_forward``. A gather that fails leads from ``UNSHARDING`` back to ``SHARDED``.
Between steps a user may summon full parameters: ``SHARDED`` to ``SUMMONED`` and back.
"""

from __future__ import annotations

import enum
import weakref

import torch

from shardwise._torch import autograd


class GroupState(enum.Enum):
    """Which form of its parameters the modules of a group hold."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"
    SHARDED_POST_FORWARD = "sharded after forward, over fewer ranks"
    SUMMONED = "summoned by a user"

    # Members are singletons. The hash that enums have costs a call of a Python function.
    __hash__ = object.__hash__


#: The moves between states that are allowed.
MOVES = {
    (GroupState.SHARDED, GroupState.UNSHARDING),
    (GroupState.UNSHARDING, GroupState.UNSHARDED),
    (GroupState.UNSHARDING, GroupState.SHARDED),
    (GroupState.UNSHARDED, GroupState.SHARDED),
    (GroupState.UNSHARDED, GroupState.SHARDED_POST_FORWARD),
    (GroupState.SHARDED_POST_FORWARD, GroupState.UNSHARDING),
    (GroupState.SHARDED_POST_FORWARD, GroupState.SHARDED),
    (GroupState.SHARDED, GroupState.SUMMONED),
    (GroupState.SUMMONED, GroupState.SHARDED),
}


class Freshness(enum.Enum):
    """Whether full parameters in memory may be used by the next forward.

    ``CURRENT``: the running forward or backward gathered them. ``STALE``: a forward or backward
    left them in memory, and the shards may have been written to since. ``AHEAD``: the user
    unsharded them for the next forward.
    """

    CURRENT = "current"
    STALE = "stale"
    AHEAD = "ahead"


class Phase(enum.Enum):
    """Where a module or a group is in a training step.

    ``IDLE -> FORWARD -> IDLE -> BACKWARD -> REDUCED -> IDLE``. Only a group is ever ``REDUCED``:
    its gradients have been passed to a reduction in this backward.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "reduced"


class Pass:
    """One forward of a group, for as long as its autograd graph exists.

    A module that runs twice has two backwards, and its gradient is complete after the second.
    Counting forwards does not tell which backwards will come: an output may be dropped, or belong
    to another backward. Autograd knows.

    Args:
        makes: how often the group's full parameters had been made when the forward began.

    Attributes:
        makes: the same number. Gradients belong to those full parameters, and to no later ones.
        node: the node of the graph that runs when the backward of this pass ends. ``None`` if no
            input needs a gradient: then only the end of the whole backward says so.
        is_in_transform: whether the forward ran inside a ``torch.func`` transform.
    """

    def __init__(self, makes: int) -> None:
        self.makes = makes
        self.node: weakref.ref[torch.autograd.graph.Node] | None = None
        self.is_in_transform = False
        self._ended_in: int | None = None

    def end_backward(self) -> None:
        """Note that the backward of this pass is over."""
        self._ended_in = autograd.backward_id()

    def has_backward_to_come(self) -> bool:
        """Whether the running backward still includes the backward of this pass."""
        if self._ended_in == autograd.backward_id():
            return False
        if self.node is None:
            return True  # possibly: its gradients are complete at the end
        node = self.node()
        return node is not None and autograd.runs_in_this_backward(node)


class Passes:
    """The passes of a group whose graphs still exist. The graphs keep them alive."""

    def __init__(self) -> None:
        self._passes: list[weakref.ref[Pass]] = []
        self._current: Pass | None = None

    def begin(self, makes: int) -> Pass:
        """Start a pass. It is kept alive here until :meth:`end`, and then by its graph."""
        self._current = Pass(makes)
        self._passes = [ref for ref in self._passes if ref() is not None]
        self._passes.append(weakref.ref(self._current))
        return self._current

    def end(self) -> Pass | None:
        """Release the current pass, if there is one, and return it."""
        ended, self._current = self._current, None
        return ended

    def end_backward(self) -> None:
        """Note that the running backward is over for all passes."""
        for each in self._alive():
            each.end_backward()

    def has_backward_to_come(self) -> bool:
        """Whether the gradient of the group still grows in the running backward."""
        return autograd.in_backward() and any(each.has_backward_to_come() for each in self._alive())

    def _alive(self) -> list[Pass]:
        return [each for ref in self._passes if (each := ref()) is not None]
