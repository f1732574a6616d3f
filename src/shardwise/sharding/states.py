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
``reshard_after_forward``. A gather that fails leads from ``UNSHARDING`` back to ``SHARDED``; one in
which nothing moves, from ``SHARDED`` to ``UNSHARDED``. Between steps a user may summon full
parameters: ``SHARDED`` to ``SUMMONED`` and back.
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
    (GroupState.SHARDED, GroupState.UNSHARDED),
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
    """Whether the full parameters of a lease may be used by the next forward.

    ``CURRENT``: the running forward or backward gathered them. ``STALE``: a forward or backward
    left them in memory, and the shards may have been written to since. ``KEPT``: the same, while
    gradients accumulate without resharding, so that no write is expected. ``AHEAD``: the user
    unsharded them for the next forward.
    """

    CURRENT = "current"
    STALE = "stale"
    KEPT = "kept"
    AHEAD = "ahead"


class Lease:
    """The use of a group's full parameters: from a gather until modules hold shards again.

    A group is ``SHARDED`` while its lease is not held. Full parameters may stay in memory even
    then: a user has resharded while they were in use.

    Attributes:
        is_held: whether modules hold, or are about to hold, anything but shards.
        freshness: whether the next forward may use what is in memory.
        steps: how many steps in backward the shards had made when they were gathered.
        forward: the outermost forward that has used it last, by its number; 0: none.
    """

    __slots__ = ("forward", "freshness", "is_held", "steps")

    def __init__(self) -> None:
        self.is_held = False
        self.freshness = Freshness.STALE
        self.steps = 0
        self.forward = 0

    def take(self, steps: int) -> None:
        """Hold it: what is gathered now is of shards that have made ``steps`` in backward."""
        self.is_held, self.freshness, self.steps, self.forward = True, Freshness.CURRENT, steps, 0

    def use(self, forward: int) -> None:
        """Note that an outermost forward uses what was gathered."""
        self.forward, self.freshness = forward, Freshness.CURRENT

    def outlive(self, kept: Freshness) -> None:
        """Note that a forward is over, and that what it gathered stays in memory, as ``kept``.

        What stays for later backwards is not kept beyond an evaluation: users expect shards then.
        """
        is_kept = self.freshness is Freshness.KEPT
        if self.freshness is Freshness.CURRENT or (is_kept and not torch.is_grad_enabled()):
            self.freshness = kept

    def is_used(self, phase: Phase) -> bool:
        """Whether a forward or backward uses what is in memory, in its modules or beside them."""
        if phase is Phase.BACKWARD:  # unless an exception has ended it
            return autograd.in_backward()
        return self.freshness is Freshness.CURRENT


class Phase(enum.Enum):
    """Where a module or a group is in a training step.

    ``IDLE -> FORWARD -> IDLE -> BACKWARD -> REDUCED -> IDLE``. Only a group is ever ``REDUCED``:
    its gradients have been passed to a delivery in this backward. Or it is ``DEFERRED``: it
    has left some to the last of its passes, to the end of backward, or to the user's finalization.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "reduced"
    DEFERRED = "deferred"


# Names of their own: until Python 3.12, reading a member of an enum costs as much as a call.
SHARDED, UNSHARDING, UNSHARDED, SHARDED_POST_FORWARD, SUMMONED = GroupState
CURRENT, STALE, KEPT, AHEAD = Freshness
IDLE, FORWARD, BACKWARD, REDUCED, DEFERRED = Phase


class GroupOrder(enum.Enum):
    """Which groups the ranks run in a step: all the same ones, or each its own."""

    SAME = "same"
    OWN = "own"


class Pass:
    """One forward of a group, for as long as the graph of its outputs exists.

    A module that runs twice has two backwards, and its gradient is complete after the second.
    Counting forwards does not tell which backwards will come: an output may be dropped, or belong
    to another backward. Autograd knows.

    Args:
        fulls: the group's full parameters when the forward began.
        steps: how many steps in backward the group's shards had made.

    Attributes:
        fulls: as given. Gradients belong to them, and to none that are made later.
        steps: as given. Gradients belong to the values of before the next step.
        is_in_transform: whether the forward ran inside a ``torch.func`` transform.
    """

    __slots__ = (
        "__weakref__",
        "_ended_in",
        "_inputs",
        "_is_marked",
        "_nodes",
        "_ran",
        "_ran_in",
        "fulls",
        "is_in_transform",
        "steps",
    )

    def __init__(self, fulls: object, steps: int) -> None:
        self.fulls = fulls
        self.steps = steps
        self.is_in_transform = False
        # A node of the graph for each input that needs a gradient. It runs when that gradient is
        # known, and the last of them when the backward of this pass ends. What keeps the pass
        # keeps these nodes, and all of the graph that leads to the inputs.
        self._nodes: list[torch.autograd.graph.Node] = []
        self._inputs: list[torch.Tensor] = []  # while forward runs
        # Whether the nodes tell when the backward ends. If not, only the end of the whole does.
        self._is_marked = False
        self._ended_in: int | None = None
        # The backward that ran nodes of this pass last, and how many.
        self._ran_in: int | None = None
        self._ran = 0

    def add_input(self, marked: torch.Tensor) -> torch.autograd.graph.Node:
        """Add an input, a new view.

        Returns:
            The node of the view, which runs when the gradient of the input is known.
        """
        node = marked.grad_fn
        assert node is not None
        self._inputs.append(marked)
        self._nodes.append(node)
        return node

    def end_forward(self) -> list[torch.Tensor]:
        """Note that the forward is over.

        Returns:
            The inputs that were written to in place.
        """
        # A write takes the node of the input out of the graph.
        inputs = zip(self._inputs, self._nodes, strict=True)
        written = [marked for marked, node in inputs if marked.grad_fn is not node]
        self._is_marked = bool(self._nodes) and not written
        self._inputs.clear()
        return written

    def precedes(self, node: torch.autograd.graph.Node | None) -> bool:
        """Whether ``node`` was made after the inputs were marked, so that they do not need it."""
        if node is None:
            return False
        return not self._nodes or autograd.is_newer(node, self._nodes[-1])

    def end_backward(self) -> None:
        """Note that the backward of this pass is over."""
        self._ended_in = autograd.backward_id()

    def run_node(self) -> bool:
        """Note that the gradient of an input is known.

        Returns:
            Whether it is the last one of the running backward, which ends the backward of this
            pass.
        """
        if self._inputs:
            self.end_forward()  # of one module, where others have not run
        if not self._is_marked:
            return False
        if len(self._nodes) > 1:
            running = autograd.backward_id()
            if running != self._ran_in:
                self._ran_in, self._ran = running, 0
            self._ran += 1
            if self._ran < sum(map(autograd.runs_in_this_backward, self._nodes)):
                return False
        self.end_backward()
        return True

    def may_come_in(self, running: int) -> bool:
        """Whether the running backward still includes the backward of this pass, or may do so."""
        if self._ended_in == running:
            return False
        return not self._is_marked or any(map(autograd.runs_in_this_backward, self._nodes))


class Passes:
    """The passes of a group whose graphs still exist. The graphs keep them alive.

    Attributes:
        current: the pass whose forward is running.
        await_backward: whether a pass has begun since the last backward of the model.
    """

    def __init__(self) -> None:
        self._passes: list[weakref.ref[Pass]] = []
        self.current: Pass | None = None
        self.await_backward = False

    def begin(self, fulls: object, steps: int) -> Pass:
        """Start a pass. It is kept alive here until :meth:`end`, and then by its graph."""
        self.current = Pass(fulls, steps)
        self._passes = [ref for ref in self._passes if ref() is not None]
        self._passes.append(weakref.ref(self.current))
        self.await_backward = not autograd.in_backward()  # checkpointing recomputes in one
        return self.current

    def end(self) -> list[torch.Tensor]:
        """End the forward of the current pass, if there is one, and release it.

        Returns:
            The inputs that its forward wrote to.
        """
        ended, self.current = self.current, None
        return [] if ended is None else ended.end_forward()

    def end_backward(self) -> None:
        """Note that the running backward is over for all passes."""
        self.await_backward = False
        for ref in self._passes:
            each = ref()
            if each is not None:
                each.end_backward()

    def has_backward_to_come(self) -> bool:
        """Whether the gradient of the group still grows in the running backward."""
        running = autograd.backward_id()
        if running is not None:
            for ref in self._passes:
                each = ref()
                if each is not None and each.may_come_in(running):
                    return True
        return False
