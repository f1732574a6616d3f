"""A parameter group: parameters that are gathered and reduced together.

``states.py`` lists the states of a group and the moves between them. Gradients leave a group as a
:class:`~shardwise.sharding.delivery.Delivery`, which continues after the group is sharded again.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch import autograd, dtensor
from shardwise.base import observe
from shardwise.base.errors import MisuseError
from shardwise.base.observe import Activity
from shardwise.base.offload import Offload
from shardwise.sharding import states
from shardwise.sharding.delivery import Delivery, GroupGrads
from shardwise.sharding.full_params import FullParams, PostForwardShards, check_home
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.param import COPIED, Growth, ShardedParam
from shardwise.sharding.policy import GroupOptions, Precision
from shardwise.sharding.states import Freshness, GroupState, Lease, Passes
from shardwise.transport.base import Label

if TYPE_CHECKING:
    from shardwise.sharding.paging import Pages
    from shardwise.sharding.stepping import Stepper


class GatherAgreement(Protocol):
    """How ranks that may run other groups agree on what is gathered."""

    def gather(self, group: ParamGroup, start: Callable[[], None]) -> None:
        """Have all ranks gather a group that this one needs now."""

    def offer(self, group: ParamGroup, start: Callable[[], None]) -> None:
        """Have all ranks gather a group that this one needs soon, unless others need one now."""


class Leader(Protocol):
    """What a group asks the root of its model."""

    @property
    def own_order(self) -> GatherAgreement | None:
        """What agrees with ranks that may run other groups; ``None``: all run the same."""

    def is_in_forward(self) -> bool:
        """Whether an outermost forward of the model is running."""

    def post_backward(self, group: ParamGroup) -> None:
        """Start to deliver the gradients of a group, whose backward is over."""


class _NoLeader:
    """For a group of a model that has not run forward, whose root is not known."""

    own_order = None

    def is_in_forward(self) -> bool:
        return False

    def post_backward(self, group: ParamGroup) -> NoReturn:
        raise RuntimeError("the model has not run forward yet, so there is nothing to reduce")


_NO_LEADER = _NoLeader()


class ParamGroup:
    """The parameters of one ``fully_shard`` call.

    Attributes:
        params: the parameters, in the order in which every rank gathers and reduces them.
        modules: the modules that were sharded together.
        mesh: the ranks to shard over, and the transports between them.
        fqn: fully qualified names of the modules, from the root; for messages and profiles.
        state: the state of the group.
        phase: where the group is in a backward.
        passes: forwards whose backward may still come.
        options: what the user can set with the methods of ``FSDPModule``.
        post_forward: the shards between forward and backward, under an integer
            ``reshard_after_forward``.
        fulls: the full parameters; ``None`` until the first gather, and once shards were replaced.
        leader: the root of the model, from its first forward on.
        is_loading: whether a state dict is loaded whose parameters are adopted at its end.
        stepper: what updates the shards during backward, if anything does.
        pages: the shards that are kept on a disk; ``None`` if none is.
    """

    def __init__(
        self,
        params: Sequence[GroupParam],
        modules: tuple[nn.Module, ...],
        mesh: DataMesh,
        precision: Precision,
        offload: Offload,
        reshard_after_forward: bool,
        post_forward: PostForwardShards | None = None,
    ) -> None:
        self.params = list(params)
        self.modules = modules
        self.mesh = mesh
        self.post_forward = post_forward
        self.fqn = ""
        self.state = states.SHARDED
        self.phase = states.IDLE
        self.passes = Passes()
        self.options = GroupOptions(reshard_after_forward=reshard_after_forward)
        self._precision = precision
        self._offload = offload
        self.fulls: FullParams | None = None
        self.stepper: Stepper | None = None
        self.pages: Pages | None = None
        if paged := [param.form for param in params if param.form.offload.disk is not None]:
            from shardwise.sharding.paging import Pages

            self.pages = Pages(paged)
        self._lease = Lease()
        self.leader: Leader = _NO_LEADER
        self._labels: dict[tuple[GroupParam, ...], Label] = {}
        self._unreduced = GroupGrads(self.params, precision)
        # The modules' places for parameters, and the parameter of each.
        self._places = [(owner, param) for param in self.params for owner in param.owners]
        # A parameter tied to another group has that group's offload.
        offloads = [param.form.offload for param in self.params]
        self._offloads = [each for each in offloads if each.enabled]
        # What the group has reported as begun: its forward, its backward.
        self._observed: dict[Activity, int] = {}
        self.is_loading = False

    def __deepcopy__(self, memo: dict[Any, Any]) -> ParamGroup:
        """Copy the group for copied modules: sharded, without gradients that are being reduced."""
        copied = memo[COPIED]
        made = ParamGroup.__new__(ParamGroup)
        # Before the modules are copied: their state dict hooks call the group.
        memo[id(self)] = made
        ParamGroup.__init__(
            made,
            copy.deepcopy(self.params, memo),
            tuple(copy.deepcopy(module, memo) for module in self.modules if module in copied),
            self.mesh,
            self._precision,
            copy.deepcopy(self._offload, memo),
            self.options.reshard_after_forward,
        )
        for param in made.params:
            param.form.groups.append(made)
        made.fqn = self.fqn
        made.options = dataclasses.replace(self.options)
        if self.post_forward is not None:
            made.post_forward = PostForwardShards(made.params, self.post_forward.mesh)
        return made

    def install(self) -> None:
        """Replace the original parameters by their sharded forms in all modules."""
        for param in self.params:
            param.install()
            param.form.groups.append(self)
            for group in param.form.groups:
                group.__dict__.pop("_tied", None)

    def begin(self, activity: Activity) -> None:
        """Report that the group begins its forward or its backward."""
        if self._observed:  # a forward that is recomputed may run inside itself
            self.end(activity)
        if observe.is_observed():
            self._observed[activity] = observe.begin(activity, self.label.name)

    def end(self, activity: Activity) -> None:
        """Report that the forward or the backward of the group has ended, if it had begun."""
        if self._observed:
            observe.end(self._observed.pop(activity, 0))

    # -- forms ---------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start the all-gather. Does nothing if it was started before.

        Raises:
            RuntimeError: the parameters are summoned, or on the meta device.
            MisuseError: a tied parameter was written to in two groups.
        """
        order, fulls = self.leader.own_order, self.fulls
        if order is not None and not self.is_unsharded and (fulls is None or fulls.moves):
            order.gather(self, self._unshard)
        else:
            self._unshard()

    def _unshard(self) -> None:
        """Start the all-gather, as all ranks do now."""
        source = None
        if self.state is states.SHARDED:
            if self.fulls is not None and self.fulls.is_allocated:  # it is left
                self._free()
            self._adopt_shards()
        elif self.state is states.SHARDED_POST_FORWARD:
            source = self.post_forward
            if source is not None and source.written:
                self.reshard()  # this raises
        elif self.state is states.SUMMONED:
            raise RuntimeError(
                f"rank {dist.get_rank()}: the parameters of group {self.fqn!r} are inside "
                "summon_full_params; run forward and backward outside of it"
            )
        else:
            return
        if self._tied:
            self._deliver_ties()
        fulls = self.fulls or self._make_fulls()
        if source is None and self.pages is not None:
            self.pages.load(self.label.name)
        if fulls.moves:
            with observe.during(Activity.UNSHARD, self.label.name):
                fulls.start(self.label, source)
        self._move(states.UNSHARDING)  # unless start() raised

    def _adopt_shards(self) -> None:
        """Adopt the parameters that the modules hold, if they are others than before."""
        for owner, param in self._places:
            if not owner.holds(param.form.parameter):
                self._take_over_replaced()
                break
        if self.fulls is not None and not self.fulls.aliased.follow():
            self.refresh()  # after swap_tensors, say

    def _make_fulls(self) -> FullParams:
        """Make the full parameters, without memory, if there are none.

        Raises:
            RuntimeError: the parameters are on the meta device.
        """
        if self.fulls is None:
            check_home(self.params, self._offload.home)
            with autograd.no_grad():
                self.fulls = FullParams(self.params, self.mesh, self.post_forward)
        return self.fulls

    def supply(self) -> None:
        """Take part in an all-gather that other ranks need, and keep nothing of it.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        if not self.is_unsharded:
            self._adopt_shards()
        self.deliver_writes()
        self._deliver_ties()
        with observe.during(Activity.SUPPLY, self.label.name):
            self._make_fulls().supply(self.label)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather. Afterwards the modules hold full parameters.

        Raises:
            PeerLostError: a peer died or stalled; the message names the group.
        """
        if self.state is not states.UNSHARDING:
            return
        assert self.fulls is not None
        if self.fulls.moves:
            try:
                self.fulls.finish()
            except BaseException:
                self.fulls.abandon()
                self.use_shards()
                raise
        if self.post_forward is not None:
            self.post_forward.release()
        self._use_fulls()

    def _use_fulls(self) -> None:
        """Put the full parameters, which hold their values, into the modules."""
        GroupParam.freeze_or_unfreeze_all(self.params)
        for owner, param in self._places:
            owner.register(param.full)
        self._move(states.UNSHARDED)

    def use_now(self) -> None:
        """Unshard, wait, and let autograd see what was written to shards that are used in place.

        Raises:
            PeerLostError: a peer died or stalled; the message names the group.
            RuntimeError: the parameters are summoned, or on the meta device.
        """
        fulls = self.fulls
        is_followed = self.state is states.SHARDED and not self._tied and self.pages is None
        if is_followed and fulls is not None and not fulls.moves:
            self._adopt_shards()
            if self.fulls is fulls:  # they share all memory with the shards: nothing has to move
                self._use_fulls()
                return
        if self.state is not states.UNSHARDED:
            self.unshard()
            self.wait_for_unshard()
        assert self.fulls is not None
        if not is_followed:
            self.fulls.aliased.follow()

    def prefetch(self) -> None:
        """Start the all-gather of a group that runs soon, if it takes any time."""
        if self.fulls is not None and not self.fulls.moves:
            return
        order = self.leader.own_order
        if order is None or self.is_unsharded:
            self._unshard()
        else:
            order.offer(self, self._unshard)

    def enter_backward(self) -> None:
        """Unshard for a backward. Only parameters that require gradients now will get them.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        unshards = self.options.unshard_in_backward and self.state is not states.UNSHARDED
        if self.options.unshard_in_backward:
            self.use_now()
        if not unshards:  # otherwise this was done with the full parameters
            GroupParam.freeze_or_unfreeze_all(self.params)
        if not autograd.in_transform():  # which gives gradients to its caller, none to parameters
            self._unreduced.expect()

    def reshard(self) -> None:
        """Put the shards back into the modules, and free the full parameters.

        Does nothing inside ``summon_full_params``, which puts the shards back itself.

        Raises:
            MisuseError: a module replaced a full parameter, or wrote to it and to its shard.
        """
        self._put_shards_back(self._free)

    def put_shards_back(self) -> None:
        """Put the shards back as :meth:`reshard` does, and leave the full parameters in memory."""
        self._put_shards_back(self._deliver_all)

    def _put_shards_back(self, then: Callable[[], None]) -> None:
        if self.state is states.SHARDED:
            if self.is_left:
                then()
            return
        if self.state is states.SUMMONED:
            return
        if self.state is states.UNSHARDING:
            self.wait_for_unshard()
        written = [] if self.post_forward is None else self.post_forward.written
        held_full = self.state is states.UNSHARDED
        replaced = self.use_shards()
        then()
        for param in written:
            raise MisuseError(
                f"{param.fqn} on rank {dist.get_rank()}: it was written to between forward and "
                "backward, while its modules held its post-forward shards, and the write is lost. "
                "Call reshard() on the module first, on every rank, or shard it with "
                "reshard_after_forward=True"
            )
        for param in replaced if held_full else ():
            raise MisuseError(
                f"{param.fqn} on rank {dist.get_rank()}: a module of group {self.fqn!r} replaced "
                "or deleted this parameter while it was gathered, and the replacement is lost. "
                "Write to the parameter in place, or replace it between steps"
            )

    def use_summoned(self) -> None:
        """Put the full parameters that a user has summoned into the modules."""
        self.reshard()
        self._move(states.SUMMONED)
        for param in self.params:
            assert param.form.summoned is not None
            param.register(param.form.summoned)

    def use_shards(self) -> list[GroupParam]:
        """Put the shards into the modules, and leave the full parameters as they are.

        Returns:
            The parameters in whose place a module held something other than the full one.
        """
        GroupParam.leave_all(self.params)
        replaced = []
        for owner, param in self._places:
            if not owner.register(param.form.parameter, before=param.full):
                replaced.append(param)
        self._move(states.SHARDED)
        return replaced

    def reshard_after_forward(self) -> None:
        """Free the full parameters until backward, if the options say so."""
        if self.state is not states.UNSHARDED:
            if self.is_left:
                self._free()
            return
        if not self.frees_after_forward:
            self.mark_stale()
        elif self.post_forward is not None:
            with torch.no_grad():
                self.post_forward.keep(self.label)
            self._free_memory()
            self._move(states.SHARDED_POST_FORWARD)
            self.mark_stale()
        else:
            self.reshard()

    @property
    def frees_after_forward(self) -> bool:
        """Whether :meth:`reshard_after_forward` frees the full parameters."""
        options = self.options
        asked = options.reshard_after_forward and not options.keep_unsharded
        return (asked and self.state is states.UNSHARDED) or self.is_left

    @property
    def ends_with_forward(self) -> bool:
        """Whether the end of the outermost forward frees the full parameters: see ``Root``."""
        evaluates = not (torch.is_grad_enabled() or self.options.keep_unsharded)
        return self.is_left or (evaluates and self.state is states.UNSHARDED)

    def mark_stale(self) -> None:
        """Note that full parameters, or post-forward shards, stay in memory beyond their use.

        The shards may be read and written to from now on. After an evaluation, users expect them.

        Raises:
            MisuseError: a module wrote to a full parameter and to its shard.
        """
        self.deliver_writes()
        if self.is_unsharded:
            self._lease.outlive(self._left_behind)

    def unshard_ahead(self) -> None:
        """Start the all-gather for the next forward, which checks that nothing was written since.

        Raises:
            RuntimeError: the parameters are summoned, or on the meta device.
        """
        self.reshard_if_stale()
        self.unshard()
        self._lease.freshness = states.AHEAD

    def reshard_if_stale(self) -> None:
        """Free what an earlier forward or backward left in memory, unless it is to be kept.

        The shards may have changed since then. A rank can see that of its own shards at best, so
        every rank gathers again without asking.
        """
        lease = self._lease
        if not lease.is_held or lease.freshness is states.CURRENT:
            return
        # A user asks to keep them, or accumulates gradients. Not if shards stepped in backward.
        kept = self.options.keep_unsharded or lease.freshness is states.KEPT
        if not kept or lease.steps != self.steps_in_backward:
            self.reshard()

    def enter_forward(self, module: nn.Module, number: int) -> None:
        """Unshard for a forward of ``module``, with the values that its shards have now.

        Args:
            module: one of those of the group.
            number: the number of the outermost forward. A group that runs twice in it and is left
                unsharded in between is gathered once.

        Raises:
            MisuseError: a shard of ``module`` was written to since it was gathered.
            PeerLostError: a peer died or stalled.
        """
        lease = self._lease
        if lease.forward != number and lease.freshness is not states.AHEAD:
            self.reshard_if_stale()
        fulls = self.fulls
        if lease.is_held and fulls is not None:
            for param in fulls.filled.outdated:
                # What only other modules have, these may have used before the write.
                if any(owner.module in module.modules() for owner in param.owners):
                    raise MisuseError(
                        f"{param.fqn} on rank {dist.get_rank()}: it was written to while group "
                        f"{self.fqn!r} was unsharded, so its full parameter is out of date. Call "
                        "reshard() on its module, on every rank, after such a write"
                    )
            self._deliver_ties()  # otherwise this is done before the gather
            if lease.freshness is not states.CURRENT:  # and this with it
                GroupParam.freeze_or_unfreeze_all(self.params)
        self.use_now()
        lease.use(number)

    def refresh(self, module: nn.Module | None = None) -> None:
        """Adopt the shards that ``to()``, ``to_empty()`` or a loaded state dict made.

        Does nothing unless the modules hold the shards.

        Args:
            module: the module that holds them; ``None`` for all of the group's.

        Raises:
            MisuseError: a parameter was replaced during a backward of the group.
            ValueError: the replacement is not a ``DTensor`` of the same shape and placements.
        """
        if self.is_unsharded:
            return
        for param in self.params:
            if param.is_in(module):
                param.refresh()
        if self.fulls is None or self.fulls.is_outdated:
            if self.fulls is not None and self.phase is not states.IDLE and autograd.in_backward():
                self.refuse_replaced()
            self._free()
            self._forget_labels()  # they have the dtypes
            self.fulls = None

    def refuse_replaced(self) -> NoReturn:
        """Raise an error: the parameters that the gradients of a forward belong to are gone.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            f"group {self.fqn!r} on rank {dist.get_rank()}: its parameters were replaced (by "
            "load_state_dict(assign=True), to() or swap_tensors) between a forward and the end of "
            "its backward, so the gradients would be lost. Replace them between steps"
        )

    @property
    def steps_in_backward(self) -> int:
        """A number that grows with every update of a shard during backward."""
        if self.stepper is None:
            return 0
        return sum(param.form.steps_in_backward for param in self.params)

    def refuse_stepped(self) -> NoReturn:
        """Raise an error: the shards were updated since the forward that this backward is of.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            f"group {self.fqn!r} on rank {dist.get_rank()}: its parameters have stepped in another "
            "backward since this forward, so the gradients would mix old values and new ones. Call "
            "set_is_last_backward(False) on the root before every backward of a step but the last"
        )

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients of the shards, and drop unreduced ones."""
        for param in self.params:
            grad = param.sharded.grad
            if set_to_none:
                param.sharded.grad = None
            elif grad is not None:
                dtensor.local_of(grad).detach().zero_()
        self._unreduced.drop()

    def change_mesh(self, mesh: DataMesh) -> None:
        """Use the transports of ``mesh`` from now on."""
        self.reshard()
        self.mesh = mesh
        self.fulls = None

    def drop_fulls(self) -> None:
        """Drop the full parameters, which may share memory with the shards."""
        self.reshard()
        self.fulls = None
        for param in self.params:
            param.full = param.memory = None

    def rename(self, fqn: str) -> None:
        """Take another name."""
        self.fqn = fqn
        self._forget_labels()

    def _forget_labels(self) -> None:
        self.__dict__.pop("label", None)
        self._labels.clear()

    def full_parameters(self) -> list[nn.Parameter]:
        """Return the full parameters, once they have been gathered."""
        return [param.full for param in self.params if param.full is not None]

    @functools.cached_property
    def label(self) -> Label:
        """The name of the group in messages, and the parameters that ranks must agree on."""
        return self._make_label(self.params)

    def _label_of(self, params: Sequence[GroupParam]) -> Label:
        """The label of a reduction in which only some of the parameters take part."""
        found = self._labels.get(tuple(params))
        if found is None:
            found = self._labels[tuple(params)] = self._make_label(params)
        return found

    def _make_label(self, params: Sequence[GroupParam]) -> Label:
        return Label.of_group(self.fqn, ((p.fqn, p.layout.shape, p.dtype) for p in params))

    # -- gradients -----------------------------------------------------------------------------

    def reduce_grads(self, completes: bool = False) -> Delivery | None:
        """Start to reduce the full gradients, and reshard if the options say so.

        Args:
            completes: whether no later backward adds to the gradients, so that what steps in
                backward may step.

        Returns:
            The delivery. ``None`` if no parameter takes part, or a rank that is alone is done; or
            synchronization is off, or another pass of this backward is to come: gradients stay.
        """
        options, waiting = self.options, self._unreduced
        syncs = options.requires_gradient_sync
        # Ranks that agree reduce now, whatever this one finds. It may even use the group again.
        is_agreed = syncs and self.leader.own_order is not None
        if syncs and not is_agreed and self.passes.has_backward_to_come():
            # Which gradients are complete before the last pass may differ between ranks.
            self.phase = states.DEFERRED
            if options.reshard_after_backward:
                self.reshard()
            return None
        grads = []
        if syncs:
            grads = waiting.take(options, self.mesh, self.label.name)
        else:
            waiting.keep(self.label.name)
        if not is_agreed:
            self.leave_backward()
        if not grads:
            return None
        steps = self.stepper is not None and completes and self.completes_grads
        if self.mesh.is_alone and options.all_reduce_hook is None:
            with autograd.no_grad():
                waiting.complete(grads, options, self.label.name)
                if steps:
                    self._step_own()
            return None
        all_take_part = len(grads) == len(self.params)
        label = self.label if all_take_part else self._label_of([grad.param for grad in grads])
        way = waiting.deliver(grads, self.mesh, options, label)
        return Delivery(way, self._step_own if steps else None)

    @property
    def has_waiting_grads(self) -> bool:
        """Whether gradients wait to be reduced."""
        return self._unreduced.are_left(self.options)

    def leave_backward(self) -> None:
        """Reshard after a backward if the options say so, and leave the gradients for later."""
        if self.options.reshard_after_backward:
            self.reshard()
        elif self.is_unsharded and self._lease.freshness is not states.AHEAD:
            self.deliver_writes()
            self._lease.freshness = self._left_behind

    def expect_all(self) -> None:
        """Have every parameter that requires gradients take part in the next delivery."""
        with autograd.no_grad():
            self._make_fulls()
        self._unreduced.expect_all()

    def complete_ties(self) -> None:
        """Complete gradients to which other groups have added, too."""
        for param in self._tied:
            param.form.end_backward()

    @property
    def completes_grads(self) -> bool:
        """Whether backward reduces the gradients over all ranks."""
        options = self.options
        reduces_all = options.requires_all_reduce or self.mesh.replicate is None
        return options.requires_gradient_sync and reduces_all

    def step_in_backward(self, growing: Container[ShardedParam] = ()) -> None:
        """Have the stepper update the shards, and wait for gradients that are offloaded.

        Args:
            growing: the parameters whose gradients are not complete.
        """
        if self.stepper is None:
            return
        forms = [
            param.form
            for param in self.params
            if param.form.parameter.grad is not None and param.form not in growing
        ]
        if forms:
            self.wait_for_offload()
            self.stepper.step(self.label.name, forms)
            if self.pages is not None:
                self.pages.let_go()

    def _step_own(self) -> None:
        """Have the stepper update the parameters that no other group has."""
        self.step_in_backward([param.form for param in self._tied])

    def wait_for_offload(self) -> None:
        """Block until reduced gradients have been copied to the host, where they are offloaded."""
        for offload in self._offloads:
            with observe.during(Activity.COPY, self.label.name):
                offload.wait()

    def forget(self) -> None:
        """Drop unreduced gradients and go back to the shards, without waiting for peers."""
        self.end(Activity.FORWARD)
        self.end(Activity.BACKWARD)
        if self.state is states.UNSHARDING:
            assert self.fulls is not None
            self.fulls.abandon()  # a peer that raised never started this gather
            self.use_shards()
        else:
            if self.post_forward is not None:
                self.post_forward.release()  # also if it was written to
            self.reshard()
        self._unreduced.drop()
        for param in self.params:
            param.form.growth = Growth.NONE

    def post_backward(self) -> None:
        """Reduce the gradients through the root. ``torch.distributed.pipelining`` calls this."""
        self.leader.post_backward(self)

    # -- inside --------------------------------------------------------------------------------

    @functools.cached_property
    def _tied(self) -> list[GroupParam]:
        """The parameters that other groups have, too."""
        return [param for param in self.params if param.form.is_tied]

    @property
    def _left_behind(self) -> Freshness:
        """What full parameters are that stay in memory now; the next forward has other options."""
        accumulates = not (self.completes_grads or self.options.reshard_after_backward)
        return states.KEPT if accumulates else states.STALE

    def _deliver_ties(self) -> None:
        """Have other groups give the shards what they wrote to parameters that are tied to these.

        Raises:
            MisuseError: this or another group holds values of before.
        """
        for param in self._tied:
            for group in param.form.groups:
                if group is not self:
                    group.deliver_writes()

    def deliver_writes(self) -> None:
        """Give the shards what modules wrote to full parameters (a clamped weight, say).

        Raises:
            MisuseError: a shard was written to as well, or a full parameter got data of another
                shape, or another group that the parameter is tied to has values of before.
        """
        if self.fulls is None or not self.fulls.moves:
            return
        for param in self.fulls.filled.deliver():
            for group in param.form.groups:
                if group is not self:
                    group.see_write(param, self.fqn)

    def see_write(self, written: GroupParam, by: str) -> None:
        """Note that another group wrote to a parameter that is tied to one of this group.

        Args:
            written: the parameter in the other group.
            by: the name of that group.

        Raises:
            MisuseError: this group uses the value of before.
        """
        if self.fulls is None:
            return
        in_use = self.is_unsharded and self._lease.freshness is not states.STALE
        for param in self.fulls.filled.params if in_use else self.fulls.filled.written:
            if param.form is written.form:
                raise MisuseError(
                    f"{param.fqn} on rank {dist.get_rank()}: a module of group {by!r} wrote to its "
                    f"full parameter, while group {self.fqn!r}, which has it too, was unsharded "
                    "with the value of before. The shard has the new one. Call reshard() on the "
                    "other module before such a write, or shard both modules in one group"
                )
        self.outdate(written.form)

    def outdate(self, form: ShardedParam) -> None:
        """Make autograd refuse what it has saved of a parameter: the shard has other values now."""
        if self.fulls is not None:
            self.fulls.filled.outdate(form)

    def _take_over_replaced(self) -> None:
        """Adopt the parameters by which a user replaced the sharded ones.

        Raises:
            MisuseError: a parameter was deleted.
            ValueError: the new one is not a ``DTensor`` like the old one, or a tied parameter was
                replaced in only some of its modules.
        """
        self.refresh()
        for owner, param in self._places:
            param.form.take_over(owner)  # in the other modules that it is tied to

    @property
    def is_unsharded(self) -> bool:
        """Whether modules hold, or are about to hold, anything but shards."""
        return self._lease.is_held

    @property
    def is_in_use(self) -> bool:
        """Whether a forward or backward uses the full parameters, in its modules or beside them."""
        if self.is_unsharded:
            has_values = self.state is states.UNSHARDED
        else:
            has_values = self.fulls is not None and self.fulls.filled.holds_values
        return has_values and self._lease.is_used(self.phase)

    @property
    def is_left(self) -> bool:
        """Whether full parameters are in memory that modules do not hold any more.

        A user has resharded while they were in use.
        """
        return not self.is_unsharded and self.fulls is not None and self.fulls.is_allocated

    def _deliver_all(self) -> None:
        """Give the shards what modules wrote, and leave the full parameters in memory."""
        if self.fulls is not None:
            self.fulls.aliased.take_back()
        self.deliver_writes()

    def _free(self) -> None:
        """Free the full parameters and the post-forward shards."""
        if self.post_forward is not None:
            self.post_forward.release()
        self._free_memory()

    def _free_memory(self) -> None:
        if self.pages is not None:
            self.pages.let_go()
        if self.fulls is not None and not self.fulls.moves:
            self.fulls.aliased.take_back()
        elif self.fulls is not None:
            try:
                self.deliver_writes()
            finally:
                if self.options.keep_unsharded_storage:
                    self.fulls.retain()
                else:
                    self.fulls.free()

    def _move(self, to: GroupState) -> None:
        if (self.state, to) not in states.MOVES:
            raise AssertionError(
                f"group {self.fqn!r} on rank {dist.get_rank()} cannot go from "
                f"{self.state.value} to {to.value}"
            )
        self.state = to
        if to is states.SHARDED:
            self._lease.is_held = False
        elif not self._lease.is_held:
            self._lease.take(self.steps_in_backward)

    def __repr__(self) -> str:
        return f"ParamGroup({self.fqn!r}, {len(self.params)} parameters, {self.state.value})"
