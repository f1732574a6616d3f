"""What all groups under one root share: their order, and the reductions under way."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from shardwise._torch import autograd
from shardwise.sharding.form import ShardedForm
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.group_state import GroupState
from shardwise.sharding.order import RunOrder
from shardwise.sharding.phase import Phase
from shardwise.sharding.reduce import Reduction


class StateUnderRoot(Protocol):
    """What a root has to know of the state of a ``fully_shard`` call."""

    groups: list[ParamGroup]
    phase: Phase
    modules_to_run: set[nn.Module]


State = TypeVar("State", bound=StateUnderRoot)


class _End:
    """Ends a backward of a root, when it is called."""

    def __init__(self, root: Root[Any]) -> None:
        self._root = root

    def __call__(self) -> None:
        self._root.end_backward()


class Root(Generic[State]):
    """Shared by the states of a module tree; belongs to the outermost one that runs.

    Attributes:
        states: all states of the tree, in ``named_modules()`` order.
        forward_root: the state whose forward is the outermost one now running.
        forward_number: how many outermost forwards have begun.
        order: order of groups, for prefetching.
        is_last_backward: whether the end of a backward completes all reductions.
        post_optim_event: what the first gather of the next forward waits for, instead of all that
            the current stream holds.
    """

    def __init__(self) -> None:
        self.states: list[State] = []
        self.forward_root: State | None = None
        self.forward_number = 0
        self.order = RunOrder()
        self.is_last_backward = True
        self.post_optim_event: torch.Event | None = None
        self._pending: list[Reduction] = []
        # Reductions whose all-reduce over replicas goes on while backward computes.
        self._left_alone: list[Reduction] = []
        # What ends the backward under way. The backward has it; where it raised, nobody does.
        self._end: weakref.ref[_End] | None = None
        # Parameters whose gradient may grow until this backward is over; an optimizer in backward
        # waits so long.
        self._growing: dict[ShardedForm, None] = {}

    def __deepcopy__(self, memo: dict[Any, Any]) -> Root[State]:
        """A copied model finds its root anew."""
        return Root()

    @property
    def all_states(self) -> list[State]:
        """The name under which ``torch.distributed.pipelining`` asks for :attr:`states`."""
        return self.states

    def begin_forward(self, state: State) -> None:
        """The outermost forward begins."""
        self._forget_failed_backward()
        self.forward_root = state
        self.order.begin_forward()
        self.forward_number += 1

    def abort_forward(self) -> None:
        """The outermost forward raised."""
        self.forward_root = None
        self.order.abort_forward()
        self._reshard_unused()

    def end_forward(self) -> None:
        """The outermost forward is over."""
        self.forward_root = None
        self._reshard_unused()
        if not torch.is_grad_enabled():
            # No backward needs them, and users shall find shards: to step, to freeze, to clear.
            for group in self._groups():
                group.free_left()

    def queue_end_of_backward(self) -> None:
        """Have :meth:`end_backward` called when the backward that now runs is over."""
        self._forget_failed_backward()
        if self._end is None:
            end = _End(self)
            self._end = weakref.ref(end)
            autograd.queue_after_backward(end)

    def queue_delivery(self) -> None:
        """Have gradients complete when the backward that now runs is over.

        Unlike :meth:`queue_end_of_backward` this leaves the other groups as they are: theirs is
        still to come.
        """
        autograd.queue_after_backward(self._deliver_or_reset)

    def post_backward(self, group: ParamGroup) -> None:
        """Start to reduce ``group``'s gradients, and move on those started before.

        Moving on first bounds what is in flight: the full gradients of one group (or of as many
        as its ``reduce_scatter_max_input_buffers``), beside those that backward is making. An
        all-reduce over a network holds shards only: backward does not wait for it.
        """
        group.phase = Phase.REDUCED
        due = max(0, len(self._pending) - (group.options.reduce_scatter_max_input_buffers - 1))
        moving, self._pending = self._pending[:due], self._pending[due:]
        self._pending[:0] = [each for each in moving if not self._move_on(each)]
        reduction = group.reduce_grads()
        if reduction is not None:
            grows = group.passes.has_backward_to_come()
            for param in group.params:
                if grows or param.form.is_tied:
                    self._growing[param.form] = None
                else:
                    self._growing.pop(param.form, None)
            reduction.leave_hooks(self._growing)
            self._pending.append(reduction)
            if reduction.has_hooks:
                # An optimizer in backward steps before the backward of what comes next, with the
                # whole gradient: also with what earlier backwards of the group have under way.
                self._finish_reductions()

    def end_backward(self) -> None:
        """Reduce what no hook has reduced, and complete everything.

        What raises here (a hook, a lost peer, Ctrl-C) loses the step's gradients, as anywhere in
        backward: none of them may reach the next step.
        """
        try:
            self._end_backward()
        except BaseException:
            self.reset()
            raise

    def _end_backward(self) -> None:
        self._end = None
        for state in self.states:
            if self._is_in_forward(state):
                continue  # it took a gradient in its forward (forces, say), which goes on
            state.modules_to_run.clear()
            for group in reversed(state.groups):
                if group.phase is not Phase.REDUCED:
                    # Its forward inputs needed no gradient, so no hook saw its backward end.
                    group.passes.end_backward()
                    self.post_backward(group)
                group.phase = Phase.IDLE
            state.phase = Phase.IDLE
        if not any(self._is_in_forward(state) for state in self.states):
            self.forward_root = None
        if self.is_last_backward:
            self._complete()
        else:
            # What waits for a later all-reduce has to be where that looks for it.
            self._pending = [
                each for each in self._pending if not (each.stops_at_partial and each.advance())
            ]

    def reset(self) -> None:
        """Go back to the state between steps after an exception; that step's gradients are lost."""
        self._pending.clear()
        self._left_alone.clear()
        self._growing.clear()
        self._end = None
        self.forward_root = None
        self.is_last_backward = True
        self.order.end_backward()
        for state in self.states:
            state.modules_to_run.clear()
            state.phase = Phase.IDLE
            for group in state.groups:
                group.phase = Phase.IDLE
                group.forget()

    def _forget_failed_backward(self) -> None:
        """Reset, if the last backward raised: then what was to end it is gone, and has not run."""
        if self._end is not None and self._end() is None:
            self.reset()

    def _is_in_forward(self, state: State) -> bool:
        """Whether the forward of ``state`` is under way around the backward that now ends."""
        return self.forward_root is not None and state.phase is Phase.FORWARD

    def _groups(self) -> Iterator[ParamGroup]:
        return (group for state in self.states for group in state.groups)

    def _move_on(self, reduction: Reduction) -> bool:
        """Wait for what ``reduction`` has under way, and start its next collective.

        Returns:
            Whether it needs no further move: it is complete, or left alone until backward is over.
        """
        if reduction.advance():
            return True
        if not reduction.can_be_left:
            return False
        self._left_alone.append(reduction)
        # No more than one gradient of every group, however many backwards leave theirs.
        if len(self._left_alone) > sum(1 for _ in self._groups()):
            self._left_alone.pop(0).finish()
        return True

    def _finish_reductions(self) -> None:
        while self._pending:
            reduction = self._pending.pop(0)
            if not self._move_on(reduction):
                reduction.finish()
        while self._left_alone:
            self._left_alone.pop(0).finish()

    def _deliver_or_reset(self) -> None:
        try:
            self._deliver()
        except BaseException:
            self.reset()
            raise

    def _deliver(self) -> None:
        if not self.is_last_backward:
            return
        self._finish_reductions()
        growing, self._growing = self._growing, {}
        for form in growing:
            form.end_backward()
        for state in self.states:
            for group in state.groups:
                group.wait_for_offload()

    def _complete(self) -> None:
        self._deliver()
        for state in self.states:
            for group in state.groups:
                asked = group.options.reshard_after_backward and not group.options.keep_unsharded
                if group.state is GroupState.SHARDED or (asked and not self._is_in_forward(state)):
                    # Frees what a backward that did not come was to use, and what a forward in a
                    # hook of this backward has left.
                    group.reshard()
        self._reshard_unused()
        self.order.end_backward()

    def _reshard_unused(self) -> None:
        """Free groups that were unsharded ahead of time and then did not run."""
        for state in self.states:
            for group in state.groups:
                if group.state is GroupState.UNSHARDING:
                    group.reshard()
                elif group.state is not GroupState.SHARDED:
                    group.note_left()
