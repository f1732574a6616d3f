"""A group's life: the parameters that travel together in one set of collectives.

It is in one of the states of ``group_state.py``. Its gradients leave it as a
:class:`~shardwise.sharding.reduce.Reduction`, which runs on while the group is already sharded
again.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch import autograd, dtensor
from shardwise.errors import MisuseError
from shardwise.sharding.form import COPIED
from shardwise.sharding.group_state import MOVES, GroupState
from shardwise.sharding.kept import KeptShards
from shardwise.sharding.memory import GroupMemory, check_home
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.offload import Offload
from shardwise.sharding.options import GroupOptions
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.passes import Passes
from shardwise.sharding.phase import Phase
from shardwise.sharding.precision import Precision
from shardwise.sharding.reduce import Reduction
from shardwise.sharding.unrecorded import unrecorded
from shardwise.sharding.unreduced import Unreduced
from shardwise.transport.base import Label


def _no_root_yet() -> NoReturn:
    raise RuntimeError("the model has not run forward yet: there is nothing to reduce")


class ParamGroup:
    """The parameters of one ``fully_shard`` call.

    Attributes:
        params: its parameters, in the order in which every rank gathers and reduces them.
        modules: the modules that were sharded together.
        mesh: over which ranks, and what carries the bytes between them.
        fqn: fully qualified name of the modules from the root, for messages and profiles.
        phase: where in a backward it is.
        passes: its forwards whose backward may come.
        options: what a user may switch.
        kept: the shards between forward and backward, if those are kept on fewer ranks.
        makes: how often its full parameters had to be made anew, as the shards were replaced.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        modules: tuple[nn.Module, ...],
        mesh: DataMesh,
        precision: Precision,
        offload: Offload,
        reshard_after_forward: bool,
        kept: KeptShards | None = None,
    ) -> None:
        self.params = list(params)
        self.modules = modules
        self.mesh = mesh
        self.kept = kept
        self.fqn = ""
        self.phase = Phase.IDLE
        self.passes = Passes()
        self.options = GroupOptions(reshard_after_forward=reshard_after_forward)
        self._precision = precision
        self._offload = offload
        self.makes = 0
        self._memory: GroupMemory | None = None
        self._label: tuple[str, Label] | None = None
        # The versions of the shards that the last gather took, and whether a forward or backward
        # left what came of it in memory.
        self._gathered: list[int] = []
        self._is_left = False
        # The outermost forward in which it ran last, and whether its gradients were reduced since.
        self._forward = 0
        self._is_reduced = False
        # Whether a user has unsharded it for the forward to come.
        self._is_ahead = False
        self._unreduced = Unreduced(self.params, precision)
        self._state = GroupState.SHARDED
        #: Reduces the gradients by way of the root; ``torch.distributed.pipelining`` calls it.
        self.post_backward: Callable[[], None] = _no_root_yet

    def __deepcopy__(self, memo: dict[Any, Any]) -> ParamGroup:
        """Copy for copied modules, sharded, without gradients that are on their way."""
        copied = memo[COPIED]
        made = ParamGroup.__new__(ParamGroup)
        # Before the modules are copied, whose hooks on state dicts call the group.
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
        made.fqn = self.fqn
        made.options = dataclasses.replace(self.options)
        if self.kept is not None:
            made.kept = KeptShards(made.params, self.kept.mesh)
        return made

    def reshard_for_state_dict(self, *_: Any) -> None:
        """Reshard, as a hook on state dicts: those are of the sharded form."""
        self.reshard()

    def refresh_from_state_dict(self, *_: Any) -> None:
        """Take over what was loaded, as a hook on state dicts."""
        self.refresh()

    @property
    def state(self) -> GroupState:
        """Where in its life the group is."""
        return self._state

    # -- forms ---------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start to gather. Does nothing if that has begun or is done.

        Raises:
            RuntimeError: the parameters are lent, or on the meta device.
        """
        if self._state is GroupState.LENT:
            raise RuntimeError(
                f"rank {dist.get_rank()}: the whole parameters of group {self.fqn!r} are lent; run "
                "forward and backward outside of summon_full_params"
            )
        if self._state is not GroupState.SHARDED and self._state is not GroupState.KEPT:
            return
        if self._state is GroupState.SHARDED:
            self._take_over_replaced()
        elif self.kept is not None and self.kept.written:
            self.reshard()  # which raises
        self._take_over_from_ties()
        with unrecorded():
            if self._memory is None:
                check_home(self.params, self._offload.home)
                self._memory = GroupMemory(self.params, self.mesh, self._precision, self.kept)
            source = self.kept if self._state is GroupState.KEPT else None
            if source is None:
                self._gathered = self._versions()
            self._memory.start(self.label, source)
            self._move(GroupState.UNSHARDING)  # unless that raised

    def wait_for_unshard(self) -> None:
        """Wait for the gather; then the modules hold full parameters.

        Raises:
            PeerLostError: a peer died or stalled; the message names this group.
        """
        if self._state is not GroupState.UNSHARDING:
            return
        assert self._memory is not None
        try:
            with unrecorded():
                self._memory.finish()
        except BaseException:
            # Its memory stays: messages that are on their way may still be written to it.
            self._use_sharded()
            raise
        if self.kept is not None:
            self.kept.release()
        for param in self.params:
            param.use_full()
        self._move(GroupState.UNSHARDED)

    def enter_backward(self) -> None:
        """Unshard for a backward, in which those have gradients that need them by now.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        if self.options.unshard_in_backward:
            self.unshard()
            self.wait_for_unshard()
        for param in self.params:
            param.enter_backward()

    def reshard(self) -> None:
        """Put the shards back into the modules and free the full parameters.

        Parameters that are lent stay so: whoever lent them takes them back.

        Raises:
            MisuseError: a module replaced a full parameter, or wrote to it and to its shard.
        """
        if self._state is GroupState.LENT:
            return
        self.wait_for_unshard()
        replaced = []
        written = [] if self.kept is None else self.kept.written
        if self._state is GroupState.UNSHARDED:
            replaced = [param for param in self.params if param.is_replaced]
        if self._state is not GroupState.SHARDED:
            self._use_sharded()
        self._free()
        for param in written:
            raise MisuseError(
                f"{param.fqn} on rank {dist.get_rank()}: it was written to between forward and "
                "backward, when its modules held what is kept of it on fewer ranks, and the write "
                "is lost. Call reshard() on the module first, on every rank, "
                "or shard it with reshard_after_forward=True"
            )
        for param in replaced:
            raise MisuseError(
                f"{param.fqn} on rank {dist.get_rank()}: a module of group {self.fqn!r} replaced "
                "or deleted this parameter while it was gathered, and the replacement is lost. "
                "Write to the parameter in place, or replace it between steps"
            )

    def lend(self) -> None:
        """Let the modules hold what the parameters' forms say is lent, until :meth:`take_back`."""
        self.reshard()
        for param in self.params:
            assert param.form.lent is not None
            param.register(param.form.lent)
        self._move(GroupState.LENT)

    def take_back(self) -> None:
        """End what :meth:`lend` began."""
        self._use_sharded()

    def reshard_after_forward(self) -> None:
        """Free the full parameters until backward, if that is what was asked for."""
        if self._state is not GroupState.UNSHARDED:
            return
        if not self.frees_after_forward:
            for param in self.params:
                if param.form.is_tied:
                    param.deliver_writes()
            self.note_left()
            return
        assert self._memory is not None
        if self.kept is not None:
            with torch.no_grad():
                self.kept.keep()
            self._memory.free()
            self._move(GroupState.KEPT)
            self.note_left()
            return
        self.reshard()

    @property
    def frees_after_forward(self) -> bool:
        """Whether :meth:`reshard_after_forward` gives the memory of full parameters back."""
        options = self.options
        asked = options.reshard_after_forward and not options.keep_unsharded
        return asked and self._state is GroupState.UNSHARDED

    @property
    def full_storages(self) -> frozenset[int]:
        """The storages of full parameters that have memory of their own, as long as it lasts."""
        return frozenset() if self._memory is None else self._memory.storages

    def note_left(self) -> None:
        """Note that a forward or backward leaves the full parameters, or kept ones, in memory."""
        self._is_left = True

    def unshard_for_user(self) -> None:
        """Start to gather ahead of the forward to come, which sees that nothing was written since.

        Raises:
            RuntimeError: the parameters are lent, or on the meta device.
        """
        self.free_left()
        self.unshard()
        self.note_left()
        self._is_ahead = True

    def free_left(self) -> None:
        """Free what an earlier forward or backward has left, unless a user asked to keep it.

        The shards may have changed since. Which of them have, a rank can tell of its own at best.
        So it does not ask, and all ranks gather again.
        """
        if self._is_left and not self._is_kept_for_forward:
            self.reshard()

    def enter_forward(self, number: int) -> None:
        """Unshard for a forward of the group's modules, with what the shards hold now.

        Args:
            number: of the outermost forward. Within one, a group that runs again is not gathered
                again where it is left unsharded.

        Raises:
            MisuseError: full parameters were to be kept, and a shard was written to since.
            PeerLostError: a peer died or stalled.
        """
        if number != self._forward:
            if not self._is_ahead:
                self.free_left()
            self._forward = number
            self._is_reduced = self._is_ahead = False
        if self._is_left and self._gathered != self._versions():
            raise MisuseError(
                f"group {self.fqn!r} on rank {dist.get_rank()}: its parameters were written to "
                "while it was kept unsharded for another forward, so its full parameters are out "
                "of date. Call reshard() on its module, on every rank, after such a write, or "
                "shard it with reshard_after_forward=True"
            )
        self.unshard()
        self.wait_for_unshard()
        self._take_over_from_ties()

    def refresh(self) -> None:
        """Take over what ``to()``, ``to_empty()`` or a loaded state dict did to the shards.

        Does nothing unless the modules hold those: full parameters were made of them as they are.

        Raises:
            MisuseError: something was replaced in a backward of the group.
            ValueError: by what is no ``DTensor`` of the same global shape and placements.
        """
        if self._state is not GroupState.SHARDED:
            return
        changed = [param.refresh() for param in self.params]
        if any(changed):
            if self.phase is not Phase.IDLE and autograd.in_backward():
                self.refuse_replaced()
            self._free()
            self._memory = self._label = None
            self.makes += 1

    def refuse_replaced(self) -> NoReturn:
        """Raise: gradients of a forward have no parameter any more that they belong to.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            f"group {self.fqn!r} on rank {dist.get_rank()}: its parameters were replaced (by "
            "load_state_dict(assign=True), to() or swap_tensors) between a forward and the end of "
            "its backward, so the gradients would be lost. Replace them between steps"
        )

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients of the shards, and drop those that are not reduced yet."""
        for param in self.params:
            grad = param.sharded.grad
            if set_to_none:
                param.sharded.grad = None
            elif grad is not None:
                dtensor.local_of(grad).detach().zero_()
        self._unreduced.drop()

    def change_mesh(self, mesh: DataMesh) -> None:
        """Let other transports carry this group from now on."""
        self.reshard()
        self.mesh = mesh
        self._memory = None
        self.makes += 1

    @property
    def label(self) -> Label:
        """What messages call the group, and what ranks have to agree on."""
        if self._label is None or self._label[0] != self.fqn:
            lines = [
                f"{param.fqn}: {tuple(param.layout.shape)} {param.dtype}".replace("torch.", "")
                for param in self.params
            ]
            self._label = self.fqn, Label(self.fqn or "the root group", "\n".join(lines))
        return self._label[1]

    # -- gradients -----------------------------------------------------------------------------

    def reduce_grads(self) -> Reduction | None:
        """Take the full gradients and start to reduce them; reshards if it should.

        Returns:
            The reduction under way, or ``None`` if no parameter has a gradient, or if
            synchronisation is off: then gradients stay here, unreduced.
        """
        params, grads = self._unreduced.take(self.options)
        if self.options.reshard_after_backward:
            self.reshard()
        self._is_reduced = self.options.requires_gradient_sync
        if not params:
            return None
        partial = self._unreduced.partial
        return Reduction(
            self.label, params, grads, self.mesh, self._precision, self.options, partial
        )

    def wait_for_offload(self) -> None:
        """Block until reduced gradients that are copied to the host have arrived."""
        for param in self.params:  # one that is tied to another call's has that one's offload
            param.form.offload.wait()

    def forget(self) -> None:
        """Drop gradients that are not yet reduced and go back to the shards, without waiting."""
        if self._state is GroupState.UNSHARDING:
            assert self._memory is not None
            self._memory.abandon()  # a peer that raised has not come to it
            self._use_sharded()
        else:
            if self.kept is not None:
                self.kept.release()  # whatever was written to it
            self.reshard()
        self._unreduced.drop()

    # -- inside --------------------------------------------------------------------------------

    @property
    def _is_kept_for_forward(self) -> bool:
        """Whether forwards go on with full parameters that earlier ones, or backwards, have left.

        A user asks for it: with :meth:`FSDPModule.keep_unsharded`, or by accumulating gradients
        without synchronization and without resharding.
        """
        options = self.options
        accumulates = not (options.reshard_after_backward or options.requires_gradient_sync)
        return options.keep_unsharded or (accumulates and not self._is_reduced)

    def _take_over_from_ties(self) -> None:
        """Have this group's tied parameters hold what modules of other groups wrote to them."""
        for param in self.params:
            if param.form.is_tied:
                param.take_over_from_ties()

    def _versions(self) -> list[int]:
        return [param.shard_version for param in self.params]

    def _take_over_replaced(self) -> None:
        """Take over parameters that a user has put in the place of the sharded ones.

        Raises:
            MisuseError: one was deleted.
            ValueError: it is no ``DTensor`` like the one before, or one place of several where it
                is tied was given other values.
        """
        places = [(param, owner) for param in self.params for owner in param.owners]
        if all(owner.holds(param.sharded) for param, owner in places):
            if self._memory is not None and self._memory.is_outdated:  # by swap_tensors, say
                self.refresh()
            return
        for param, owner in places:
            if owner.holds(None):
                raise MisuseError(
                    f"{param.fqn} on rank {dist.get_rank()}: the parameter {owner.name!r} of a "
                    f"{type(owner.module).__name__} was deleted. Delete parameters before "
                    "fully_shard"
                )
        self.refresh()
        for param, owner in places:
            param.form.take_over(owner)  # in the other places where it is tied

    def _use_sharded(self) -> None:
        for param in self.params:
            param.use_sharded()
        self._move(GroupState.SHARDED)

    def _free(self) -> None:
        """Free the full parameters, and what is kept of them."""
        self._is_left = self._is_ahead = False
        if self.kept is not None:
            self.kept.release()
        if self._memory is not None:
            self._memory.free()

    def _move(self, to: GroupState) -> None:
        if (self._state, to) not in MOVES:
            raise AssertionError(
                f"group {self.fqn!r} on rank {dist.get_rank()} cannot go from "
                f"{self._state.value} to {to.value}"
            )
        self._state = to

    def __repr__(self) -> str:
        return f"ParamGroup({self.fqn!r}, {len(self.params)} parameters, {self._state.value})"
