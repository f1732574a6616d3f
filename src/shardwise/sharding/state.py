"""What ``fully_shard`` adds to modules, and what all modules of a model share.

The outermost module that runs is the root. It is known at its first forward, when all nested calls
have been made.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise._torch import autograd, fsdp
from shardwise.base import observe
from shardwise.base.errors import MisuseError
from shardwise.base.observe import Activity
from shardwise.sharding import states
from shardwise.sharding.additions import Additions
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.ledger import GradientReductionHandle, Ledger, StepProgress
from shardwise.sharding.mesh import unaveraged_dims
from shardwise.sharding.param import COPIED
from shardwise.sharding.policy import Precision
from shardwise.sharding.states import GroupOrder

if TYPE_CHECKING:
    from shardwise.sharding.own_order import OwnOrder
    from shardwise.sharding.stepping import Stepper


class HasStateDictKinds:
    """A module whose state dicts are of one of several kinds."""

    def sharded_kind(self) -> AbstractContextManager[None]:
        """Return a context in which its state dicts hold its shards as ``DTensor``s."""
        raise NotImplementedError


class RunOrder:
    """The order in which groups run forward, and the group whose backward comes next.

    Backward runs in the reverse order of its forward. Every rank runs the same model, so every rank
    prefetches alike and issues its collectives in the same order. Forward does not prefetch by
    default: it would miss what a program writes to the next group before that group runs.
    """

    def __init__(self) -> None:
        # Finished forwards whose backward has not come yet, in order. A group that ran twice is
        # in it twice.
        self._finished: list[ParamGroup] = []
        self._positions: dict[ParamGroup, list[int]] = {}
        # The number of those when the running forward began.
        self._finished_before = 0

    def begin_forward(self) -> None:
        """Note that a forward of the outermost module begins."""
        self._finished_before = len(self._finished)

    def abort_forward(self) -> None:
        """Forget the running forward. It raised, so it has no backward."""
        while len(self._finished) > self._finished_before:
            self._positions[self._finished.pop()].pop()

    def leave_forward(self, group: ParamGroup) -> None:
        """Note that the forward of ``group`` is over, and that its backward may come."""
        self._positions.setdefault(group, []).append(len(self._finished))
        self._finished.append(group)

    def enter_backward(self, group: ParamGroup) -> ParamGroup | None:
        """Note that the backward of ``group`` begins.

        Returns:
            The group whose backward is expected next, if any.
        """
        positions = self._positions.get(group)
        if not positions:
            return None  # a second backward through the same forward
        position = positions.pop()
        return self._finished[position - 1] if position > 0 else None

    def end_backward(self) -> None:
        """Forget all finished forwards: their backward is over."""
        self._finished.clear()
        self._positions.clear()
        self._finished_before = 0


class _End:
    """The callback that ends a backward of a root."""

    def __init__(self, root: Root) -> None:
        self.root = root

    def __call__(self) -> None:
        self.root.end_backward()


#: For each running backward, the end of the root that it came to first.
_FIRST_ENDS: weakref.WeakValueDictionary[int | None, _End] = weakref.WeakValueDictionary()


class Root:
    """What all states of a module tree share: their order, and the gradients on their way.

    Attributes:
        states: all states of the tree, in ``named_modules()`` order.
        groups: their groups.
        forward_root: the state whose forward is the outermost one that is running.
        forward_number: the number of outermost forwards so far.
        order: the order of groups, for prefetching.
        own_order: what agrees with ranks that may run other groups; ``None``: all run the same.
        ledger: the gradients that are not complete.
        additions: the parameters that its modules got since they were sharded.
        knows_what_is_averaged: whether the user was warned of dimensions without an average.
        post_optim_event: what the first gather of the next forward waits for, instead of all work
            on the current stream.
    """

    def __init__(self) -> None:
        self.states: list[FSDPState] = []
        self.groups: list[ParamGroup] = []
        self.forward_root: FSDPState | None = None
        self.forward_number = 0
        self.order = RunOrder()
        self.post_optim_event: torch.Event | None = None
        self.own_order: OwnOrder | None = None
        self.ledger = Ledger(self.groups, self._complete_or_reset)
        self.additions = Additions()
        self.knows_what_is_averaged = False
        # The callback that ends the running backward. Autograd holds it, until backward raises.
        self._end: weakref.ref[_End] | None = None

    def __deepcopy__(self, memo: dict[Any, Any]) -> Root:
        """Make a new root: a copied model determines its root at its first forward."""
        made = Root()
        made.ledger.is_manual = self.ledger.is_manual
        return made

    @property
    def all_states(self) -> list[FSDPState]:
        """The name under which ``torch.distributed.pipelining`` asks for :attr:`states`."""
        return self.states

    def is_in_forward(self) -> bool:
        """Whether an outermost forward is running."""
        return self.forward_root is not None

    def begin_forward(self, state: FSDPState) -> None:
        """Begin an outermost forward.

        Raises:
            RuntimeError: :meth:`finalize` has started reductions that were not waited for.
            StepInterruptedError: an exception has interrupted a step in backward.
            MisuseError: a parameter was added that ranks would train apart.
        """
        if self.ledger.is_finalized:
            raise RuntimeError(
                f"forward on rank {dist.get_rank()}: finalize_backward(async_op=True) still "
                "reduces gradients; wait() for the handle that it returned"
            )
        self._forget_failed_backward()
        for stepper in self._steppers():
            stepper.check()
        if self.own_order is not None:
            self.own_order.check()
        if torch.is_grad_enabled():
            if state.is_root and not all(group.mesh.is_alone for group in self.groups):
                self.additions.check(state.modules[0])
            if not self.knows_what_is_averaged:
                self.knows_what_is_averaged = True
                self._warn_of_what_is_not_averaged()
        self.forward_root = state
        self.order.begin_forward()
        self.forward_number += 1

    def _warn_of_what_is_not_averaged(self) -> None:
        """Warn on rank 0 of mesh dimensions over which the first step will average nothing."""
        if dist.get_rank() != 0 or any(group.options.all_reduce_hook for group in self.groups):
            return
        meshes = (param.form.spec.mesh for group in self.groups for param in group.params)
        for name, size in unaveraged_dims(meshes).items():
            warnings.warn(
                f"nothing is averaged over the {size} ranks along {name!r}: the mesh to shard over "
                "was sliced without it, so each of them trains a model of its own. If their data "
                f"differ, pass mesh[{name!r}, ...], which replicates over it. If that is meant, "
                f"pass separate_dims=[{name!r}] to fully_shard",
                stacklevel=2,
            )

    def abort_forward(self) -> None:
        """End the outermost forward, which raised."""
        self.forward_root = None
        self.order.abort_forward()
        self._reshard_unused()

    def end_forward(self) -> None:
        """End the outermost forward."""
        self.forward_root = None
        if self.own_order is not None:
            self.own_order.end_forward()
        self._reshard_unused()
        if not torch.is_grad_enabled():
            # No backward needs them, and users expect shards: to step, freeze or clear.
            for group in self.groups:
                group.reshard_if_stale()

    def queue_end_of_backward(self) -> None:
        """Make autograd call :meth:`end_backward` when the running backward is over.

        Raises:
            NotImplementedError: it came through another model, whose ranks have their own order.
            StepInterruptedError: an exception has interrupted a step in backward.
        """
        self._forget_failed_backward()
        if self._end is None:
            for stepper in self._steppers():
                stepper.check()
            end = _End(self)
            first = _FIRST_ENDS.setdefault(autograd.backward_id(), end).root
            if first is not self and first.own_order is not None:
                raise NotImplementedError(
                    f"backward on rank {dist.get_rank()}: found another sharded model after one "
                    'with order="own". Ranks that are through with that would run this one, while '
                    "others wait for them. Put both into one module, and apply "
                    'fully_shard(..., order="own") to it'
                )
            self._end = weakref.ref(end)
            autograd.queue_after_backward(end)
            self.ledger.begin_step()
            for group in self.groups:
                group.passes.await_backward = False  # also if this one raises before it gets there

    def queue_delivery(self) -> None:
        """Make autograd complete the gradients when the running backward is over.

        Unlike :meth:`queue_end_of_backward`, this does not touch other groups, whose backward is
        still to come.
        """
        autograd.queue_after_backward(self._deliver_or_reset)

    def post_backward(self, group: ParamGroup) -> None:
        """Start to deliver the gradients of ``group``: its backward, or a pass of it, is over."""
        group.phase = states.REDUCED
        group.end(Activity.BACKWARD)
        if self.own_order is None:
            self.ledger.start(group)
        elif not group.options.requires_gradient_sync:
            with observe.during(Activity.REDUCE, group.label.name):
                group.reduce_grads()  # keeps them; what is in flight moves on with all ranks only
        else:
            group.leave_backward()
            self.own_order.finish(group)

    def reduce_with_others(self, group: ParamGroup) -> None:
        """Start to deliver the gradients of a group that no rank adds to any more."""
        group.expect_all()
        self.ledger.start(group)

    def skip(self) -> None:
        """Take part in the backward of other ranks, or in their forward where gradients are off."""
        if self.own_order is not None and not torch.is_grad_enabled():
            self.own_order.end_forward()
        else:
            # After a backward that raised, what it has computed stays, as without sharding. Other
            # ranks complete what it had started.
            self.end_backward()

    def end_backward(self) -> None:
        """Reduce the gradients that no hook has reduced, and complete all reductions.

        An exception here (from a hook, a lost peer, Ctrl-C) loses the gradients of the step, as
        anywhere in backward: none of them may reach the next step.
        """
        with self._or_reset():
            self._end_backward()

    def _end_backward(self) -> None:
        self._end, is_manual = None, self.ledger.is_manual
        for state in self.states:
            if self._is_in_forward(state):
                continue  # its forward computes a gradient (forces, say), and is still running
            state.modules_to_run.clear()
            for group in reversed(state.groups):
                is_reduced = group.phase is states.REDUCED
                syncs = group.options.requires_gradient_sync
                if not is_reduced:
                    # The forward inputs needed no gradient, so no hook saw the backward end.
                    group.passes.end_backward()
                    group.end(Activity.BACKWARD)
                    if not (is_manual and syncs):
                        self.post_backward(group)
                is_left = is_manual and not (is_reduced and syncs)
                group.phase = states.DEFERRED if is_left else states.IDLE
            state.phase = states.IDLE
        if self.forward_root is not None and not any(map(self._is_in_forward, self.states)):
            self.forward_root = None
        if self.own_order is not None:
            self.own_order.end_backward()
        if self.ledger.ends_step:
            self._complete()
        else:
            self.ledger.hold()

    def reset(self) -> None:
        """Return to the state between steps after an exception. The step's gradients are lost."""
        self._end = None
        self.forward_root = None
        for stepper in self._steppers():
            stepper.interrupt()
        self.ledger.end(StepProgress.DROPPED)
        self.order.end_backward()
        if self.own_order is not None:
            self.own_order.reset()
        for state in self.states:
            state.modules_to_run.clear()
            state.phase = states.IDLE
            for group in state.groups:
                group.phase = states.IDLE
                group.forget()

    def finalize(self) -> GradientReductionHandle:
        """Reduce what the backwards so far have left. The handle completes all reductions.

        Raises:
            RuntimeError: the end of each backward completes it; a backward or a forward is running;
                or an earlier reduction has not been waited for.
        """
        self.ledger.check()
        self._forget_failed_backward()
        with self._or_reset():
            for state in reversed(self.states):
                for group in reversed(state.groups):
                    if group.phase is states.DEFERRED:
                        self.post_backward(group)
                        group.phase = states.IDLE
                    elif group.options.reshard_after_backward:
                        group.reshard()
            if self.own_order is not None:
                self.own_order.end_backward()
        handle = self.ledger.begin_step()
        handle.progress = StepProgress.FINALIZED
        return handle

    def _forget_failed_backward(self) -> None:
        """Reset if the last backward raised: its callback is gone without having run."""
        if self._end is not None and self._end() is None:
            self.reset()

    @contextmanager
    def _or_reset(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def _is_in_forward(self, state: FSDPState) -> bool:
        """Whether the backward that ends now ran inside the forward of ``state``."""
        return self.forward_root is not None and state.phase is states.FORWARD

    def _deliver_or_reset(self) -> None:
        if self.own_order is not None:
            with self._or_reset():
                self.own_order.end_backward()
        if self.ledger.is_manual:
            for group in self.groups:
                if group.phase is states.REDUCED and not group.options.requires_gradient_sync:
                    group.phase = states.DEFERRED
        if self.ledger.ends_step:
            with self._or_reset():
                self._deliver()

    def _deliver(self) -> None:
        self.ledger.settle()
        for group in self.groups:
            group.complete_ties()
        for group in self.groups:
            group.wait_for_offload()
        self._end_step()

    def _end_step(self) -> None:
        """Have groups step in backward that could not before its end, and end that step."""
        steppers = self._steppers()
        if not steppers:
            return
        incomplete = {
            param.form: None
            for group in self.groups
            if not group.completes_grads
            for param in group.params
        }
        for group in self.groups:
            group.step_in_backward(incomplete)
        for stepper in steppers:
            stepper.finish()
        # A program that steps in backward needs memory more than the time to get it anew.
        meshes = {id(each.mesh): each.mesh for each in self.groups if each.stepper is not None}
        for mesh in meshes.values():
            mesh.trim()

    def _steppers(self) -> list[Stepper]:
        found = [group.stepper for group in self.groups if group.stepper is not None]
        return list(dict.fromkeys(found))

    def _complete_or_reset(self) -> None:
        with self._or_reset():
            self._complete()

    def _complete(self) -> None:
        self._deliver()
        self.ledger.end(StepProgress.COMPLETE)
        for state in self.states:
            for group in state.groups:
                if group.state is states.SHARDED or self._is_in_forward(state):
                    continue
                if group.options.reshard_after_backward and not group.options.keep_unsharded:
                    # Frees parameters for a backward that did not come, and those that a forward
                    # in a hook of this backward left.
                    group.reshard()
        self._reshard_unused()
        self.order.end_backward()

    def _reshard_unused(self) -> None:
        """Free groups that were prefetched and then did not run, or that a user has resharded."""
        is_over = not self.is_in_forward()
        for group in self.groups:
            if group.state is states.UNSHARDING or (is_over and group.is_left):
                group.reshard()
            elif group.state is not states.SHARDED:
                group.mark_stale()


_STATE = "_shardwise_state"


class FSDPState:
    """The state that one ``fully_shard`` call adds to its modules.

    Attributes:
        modules: the modules that were sharded together.
        groups: their parameter groups: usually one; none if no parameters were left for them.
        device: the device on which they compute.
        precision: the dtypes in which they compute.
        phase: where they are in a training step.
        is_root: whether this is the outermost state; ``None`` before the first forward.
        keeps_if_root: whether full parameters stay after forward if this becomes the root.
        root: what they share with the other states of the model.
        modules_to_run: the modules whose forward has yet to run in this pass, if there are several.
        forward_prefetch: the states to unshard when the forward of this one begins.
        backward_prefetch: the states to unshard when the backward of this one begins; if empty,
            the one that ran before it.
        order: which groups ranks run, if this is the root.
        handled: for each forward that is running, the exception that was being handled when it
            began; a new exception is one that the forward raised.
        before_forward: the hook before forward, called with a module, its args and kwargs.
        after_forward: the hook after forward, called with a module, its args and its output.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: list[ParamGroup],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
        order: GroupOrder = GroupOrder.SAME,
    ) -> None:
        self.modules = modules
        self.groups = groups
        self.device = device
        self.phase = states.IDLE
        self.root: Root = Root()
        self.modules_to_run: set[nn.Module] = set()
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []
        self.handled: list[BaseException | None] = []
        self.before_forward: Callable[..., Any]
        self.after_forward: Callable[..., Any]
        self.precision = Precision.of(mp_policy)
        # Nothing was asked for: then the root keeps its parameters, which backward needs first.
        self.keeps_if_root = reshard_after_forward is None
        self.is_root: bool | None = None
        self.order = order
        for module in modules:
            module.__dict__[_STATE] = self

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        """Copy for copied modules. They determine their root anew."""
        made = copy.copy(self)
        memo[id(self)] = made
        copied: frozenset[nn.Module] = memo[COPIED]
        made.modules = tuple(copy.deepcopy(m, memo) for m in self.modules if m in copied)
        made.groups = copy.deepcopy(self.groups, memo)
        made.phase = states.IDLE
        made.root = copy.deepcopy(self.root, memo)
        made.modules_to_run = set()
        for name in ("forward_prefetch", "backward_prefetch"):
            wanted = [s for s in getattr(self, name) if copied.issuperset(s.modules)]
            setattr(made, name, [copy.deepcopy(state, memo) for state in wanted])
        made.handled = []
        made.before_forward = copy.deepcopy(self.before_forward, memo)
        made.after_forward = copy.deepcopy(self.after_forward, memo)
        made.is_root = None
        return made

    def set_reshard_after_forward(self, reshard_after_forward: bool) -> None:
        """Set ``reshard_after_forward`` for all groups, also if this is or becomes the root."""
        self.keeps_if_root = False
        for group in self.groups:
            group.options.reshard_after_forward = reshard_after_forward

    def lazy_init(self) -> None:
        """Make this state the root of its module tree, unless the root is known.

        Raises:
            RuntimeError: a nested state has already run forward as a root, or several modules that
                were sharded together would be the root.
        """
        if self.is_root is not None:
            return
        if len(self.modules) > 1:
            names = ", ".join(type(module).__name__ for module in self.modules)
            raise RuntimeError(
                f"fully_shard([{names}]) cannot be the root: expected one module that contains all "
                "others. Apply fully_shard to the whole model last, and run its forward"
            )
        top = self.modules[0]
        for name, module in top.named_modules():
            state = state_of(module)
            if state is None or state in self.root.states:
                continue
            if state is not self and state.is_root is not None:
                raise RuntimeError(
                    f"{name} has already run forward as a root of its own, before the module that "
                    "contains it. Run the forward of the outermost fully_shard module first"
                )
            if state.root is not self.root and state.root.ledger.is_manual:
                raise RuntimeError(
                    f"set_manual_backward_finalization(True) was called on {name}: expected the "
                    "root, the outermost module that fully_shard was applied to"
                )
            self.root.states.append(state)
            self.root.groups += state.groups
        self._name_everything(top)
        groups = self.root.groups
        if self.order is GroupOrder.OWN and groups and not groups[0].mesh.is_alone:
            from shardwise.sharding.own_order import OwnOrder, check_own_order

            check_own_order(groups)
            self.root.own_order = OwnOrder(groups, self.root.reduce_with_others)
        for state in self.root.states:
            if state.order is GroupOrder.OWN and self.order is not GroupOrder.OWN:
                raise MisuseError(
                    f"{type(state.modules[0]).__name__} on rank {dist.get_rank()}: found "
                    f'order="own" inside of a {type(top).__name__} with order="same"; expected it '
                    "on the outermost module that fully_shard is applied to"
                )
            state.is_root = state is self
            state.root = self.root
            for group in state.groups:
                group.refresh()
                group.leader = state.root
        paged = [group.pages for group in self.root.groups if group.pages is not None]
        for pages in paged:
            pages.order = paged[0].order
        if self.keeps_if_root:
            for group in self.groups:
                group.options.reshard_after_forward = False

    def _name_everything(self, top: nn.Module) -> None:
        names = {module: name for name, module in top.named_modules()}
        for state in self.root.states:
            fqn = ", ".join(names[module] for module in state.modules if module in names)
            for group in state.groups:
                group.rename(fqn)
                for param in group.params:
                    owner = param.form.owners[0]
                    prefix = names.get(owner.module)
                    if prefix is not None:
                        param.form.fqn = f"{prefix}.{owner.name}" if prefix else owner.name


fsdp.name_state(FSDPState)


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of ``module``; ``None`` if ``fully_shard`` was not applied to it."""
    return module.__dict__.get(_STATE)


def require_state(module: object) -> FSDPState:
    """The state of ``module``.

    Raises:
        ValueError: ``fully_shard`` was not applied to it.
    """
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ValueError(
            f"expected a module that shardwise.fully_shard was applied to, found "
            f"{type(module).__name__}"
        )
    return state


def states_of(module: object, recurse: bool = True) -> Iterator[FSDPState]:
    """The state of ``module`` and, with ``recurse``, of the modules in it; each once."""
    top = cast(nn.Module, module)
    found = (state_of(each) for each in (top.modules() if recurse else [top]))
    return iter(dict.fromkeys(state for state in found if state is not None))


def groups_of(module: object, recurse: bool = True) -> Iterator[ParamGroup]:
    """The groups of :func:`states_of`."""
    for state in states_of(module, recurse):
        yield from state.groups


def gather_in_order(module: object) -> None:
    """Make every forward prefetch the next group, in the order in which modules are registered.

    For models that run their modules in that order, and programs that write to parameters between
    steps only: a write to a group after the forward of the one before it began is refused.
    """
    states = [state for state in states_of(module) if state.groups]
    for state, following in itertools.pairwise(states):
        state.forward_prefetch = [following]
