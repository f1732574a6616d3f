"""What all groups under one root share: their order, and the reductions under way."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from torch import nn

from shardwise import _torch
from shardwise.sharding.group import GroupState, ParamGroup
from shardwise.sharding.order import RunOrder
from shardwise.sharding.phase import Phase
from shardwise.sharding.reduce import Reduction


class ModuleState(Protocol):
    """What a root has to know of the state of a ``fully_shard`` call."""

    groups: list[ParamGroup]
    phase: Phase
    modules_to_run: set[nn.Module]


State = TypeVar("State", bound=ModuleState)


class Root(Generic[State]):
    """Shared by the states of a module tree; belongs to the outermost one that runs.

    Attributes:
        states: all states of the tree, in ``named_modules()`` order.
        forward_root: the state whose forward is the outermost one now running.
        order: order of groups, for prefetching.
        is_last_backward: whether the end of a backward completes all reductions.
    """

    def __init__(self) -> None:
        self.states: list[State] = []
        self.forward_root: State | None = None
        self.order = RunOrder()
        self.is_last_backward = True
        self._pending: list[Reduction] = []
        self._end_is_queued = False

    def end_forward(self) -> None:
        """The outermost forward is over."""
        self.forward_root = None
        self.order.end_forward()
        self._reshard_unused()

    def queue_end_of_backward(self) -> None:
        """Have :meth:`end_backward` called when the backward that now runs is over."""
        if not self._end_is_queued:
            self._end_is_queued = True
            _torch.queue_after_backward(self.end_backward)

    def post_backward(self, group: ParamGroup) -> None:
        """Start to reduce ``group``'s gradients, and move on those started before.

        Moving on first bounds what is in flight: the full gradients of one group, beside those
        that backward is making.
        """
        group.phase = Phase.REDUCED
        self._pending = [reduction for reduction in self._pending if not reduction.advance()]
        reduction = group.reduce_grads()
        if reduction is not None:
            self._pending.append(reduction)

    def end_backward(self) -> None:
        """Reduce what no hook has reduced, and complete everything."""
        self._end_is_queued = False
        self.forward_root = None
        for state in self.states:
            state.modules_to_run.clear()
            for group in reversed(state.groups):
                if group.phase is not Phase.REDUCED:
                    # Its forward inputs needed no gradient, so no hook saw its backward end.
                    self.post_backward(group)
                group.phase = Phase.IDLE
            state.phase = Phase.IDLE
        if self.is_last_backward:
            self._complete()

    def reset(self) -> None:
        """Go back to the state between steps after an exception; that step's gradients are lost."""
        self._pending.clear()
        self._end_is_queued = False
        self.forward_root = None
        self.order.reset()
        for state in self.states:
            state.modules_to_run.clear()
            state.phase = Phase.IDLE
            for group in state.groups:
                group.phase = Phase.IDLE
                group.forget()

    def _complete(self) -> None:
        while self._pending:
            self._pending.pop(0).finish()
        for state in self.states:
            for group in state.groups:
                group.wait_for_offload()
        self._reshard_unused()
        self.order.end_backward()

    def _reshard_unused(self) -> None:
        """Free groups that were unsharded ahead of time and then did not run."""
        for state in self.states:
            for group in state.groups:
                if group.state is GroupState.UNSHARDING:
                    group.reshard()
