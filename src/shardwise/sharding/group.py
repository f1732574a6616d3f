"""A group's life: the parameters that travel together in one set of collectives.

            unshard()              wait_for_unshard()
  SHARDED ------------> UNSHARDING ------------------> UNSHARDED
     ^                                                     |
     +-----------------------------------------------------+
                           reshard()

Its gradients leave it as a :class:`~shardwise.sharding.reduce.Reduction`, which runs on while the
group is already sharded again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import naming
from shardwise.sharding.memory import GroupMemory
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.offload import Offload
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.phase import Phase
from shardwise.sharding.precision import Precision
from shardwise.sharding.reduce import Partial, Reduction


class GroupState(enum.Enum):
    """Which form of its parameters a group's modules hold."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


_MOVES = {
    (GroupState.SHARDED, GroupState.UNSHARDING),
    (GroupState.UNSHARDING, GroupState.UNSHARDED),
    (GroupState.UNSHARDED, GroupState.SHARDED),
}


@dataclass
class GroupOptions:
    """What a user may switch while training; see the ``FSDPModule`` methods of the same names."""

    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    gradient_divide_factor: float | None = None


class ParamGroup:
    """The parameters of one ``fully_shard`` call.

    Attributes:
        params: its parameters, in the order in which every rank gathers and reduces them.
        modules: the modules that were sharded together.
        fqn: fully qualified name of the modules from the root, for messages and profiles.
        phase: where in a backward it is.
        options: what a user may switch.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        modules: tuple[nn.Module, ...],
        mesh: DataMesh,
        precision: Precision,
        offload: Offload,
        reshard_after_forward: bool,
    ) -> None:
        self.params = list(params)
        self.modules = modules
        self.mesh = mesh
        self.fqn = ""
        self.phase = Phase.IDLE
        self.options = GroupOptions(reshard_after_forward=reshard_after_forward)
        self._precision = precision
        self._offload = offload
        self._memory: GroupMemory | None = None
        self._partial = Partial()
        self._state = GroupState.SHARDED

    @property
    def state(self) -> GroupState:
        """Where in its life the group is."""
        return self._state

    # -- forms ---------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start to gather. Does nothing if that has begun or is done."""
        if self._state is not GroupState.SHARDED:
            return
        with torch.no_grad(), torch.inference_mode(False):
            if self._memory is None:
                self._check_materialised()
                self._memory = GroupMemory(self.params, self.mesh, self._precision)
            self._move(GroupState.UNSHARDING)
            with naming("all-gather", self.fqn):
                self._memory.start()

    def wait_for_unshard(self) -> None:
        """Wait for the gather; then the modules hold full parameters.

        Raises:
            PeerLostError: a peer died or stalled; the message names this group.
        """
        if self._state is not GroupState.UNSHARDING:
            return
        assert self._memory is not None
        with torch.no_grad(), torch.inference_mode(False), naming("all-gather", self.fqn):
            self._memory.finish()
        for param in self.params:
            param.use_full()
        self._move(GroupState.UNSHARDED)

    def reshard(self) -> None:
        """Put the shards back into the modules and free the full parameters."""
        self.wait_for_unshard()
        if self._state is not GroupState.UNSHARDED:
            return
        assert self._memory is not None
        for param in self.params:
            param.use_sharded()
        self._memory.free()
        self._move(GroupState.SHARDED)

    def refresh(self) -> None:
        """Take over what ``to()``, ``to_empty()`` or a loaded state dict did to the shards."""
        changed = [param.refresh() for param in self.params]
        if any(changed):
            self._memory = None

    # -- gradients -----------------------------------------------------------------------------

    def reduce_grads(self) -> Reduction | None:
        """Take the full gradients and start to reduce them; reshards if it should.

        Returns:
            The reduction under way, or ``None`` if no parameter has a gradient, or if
            synchronisation is off: then gradients stay here, unreduced.
        """
        options = self.options
        if not options.requires_gradient_sync:
            for param in self.params:
                param.hold_grad(self._precision.reduce_dtype(param.dtype))
            self._reshard_after_backward()
            return None
        taken = [(param, param.take_grad()) for param in self.params]
        self._reshard_after_backward()
        params = [param for param, grad in taken if grad is not None]
        grads = [grad for _, grad in taken if grad is not None]
        taken.clear()
        if not params:
            return None
        return Reduction(
            self.fqn,
            params,
            grads,
            self.mesh,
            self._precision,
            divide_factor=options.gradient_divide_factor,
            all_reduce=options.requires_all_reduce,
            partial=self._partial,
        )

    def wait_for_offload(self) -> None:
        """Block until reduced gradients that are copied to the host have arrived."""
        self._offload.wait()

    def forget(self) -> None:
        """Drop gradients that are not yet reduced and go back to the shards."""
        self.reshard()
        self._partial.clear()
        for param in self.params:
            param.held_grad = None
            if param.full is not None:
                param.full.grad = None

    # -- inside --------------------------------------------------------------------------------

    def _reshard_after_backward(self) -> None:
        if self.options.reshard_after_backward:
            self.reshard()

    def _check_materialised(self) -> None:
        on_meta = [param.fqn for param in self.params if param.local.is_meta]
        if on_meta:
            raise RuntimeError(
                f"rank {dist.get_rank()}: parameters {', '.join(on_meta)} are on the meta device; "
                "materialise them first, with shardwise.materialize(model), or with "
                "model.to_empty(device=...) followed by an initialisation"
            )
        home = self._offload.home
        elsewhere = [param for param in self.params if param.local.device != home]
        if elsewhere:
            found = ", ".join(f"{param.fqn} on {param.local.device}" for param in elsewhere)
            raise RuntimeError(
                f"rank {dist.get_rank()}: expected shards on {home}, found {found}; move the model "
                "there, or shard it on a mesh of the device it is on"
            )

    def _move(self, to: GroupState) -> None:
        if (self._state, to) not in _MOVES:
            raise AssertionError(
                f"group {self.fqn!r} on rank {dist.get_rank()} cannot go from "
                f"{self._state.value} to {to.value}"
            )
        self._state = to

    def __repr__(self) -> str:
        return f"ParamGroup({self.fqn!r}, {len(self.params)} parameters, {self._state.value})"
