"""A sharded parameter: the ``DTensor`` that optimizers and state dicts see.

A parameter that is tied across groups has one sharded form, which all its modules hold.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import autograd, dtensor
from shardwise._torch.fsdp import ParamOwner
from shardwise.base import observe
from shardwise.base.errors import MisuseError
from shardwise.base.observe import Activity, Memory
from shardwise.base.offload import Offload
from shardwise.sharding import attributes, drawing
from shardwise.sharding.placement import Place
from shardwise.sharding.steps import Steps, check_origin

observe.ALLOCATES[__file__] = Memory.GRADIENTS

#: The key under which the memo of a deepcopy holds the modules that are being copied.
COPIED = "shardwise: the modules being copied"


class _GradHook:
    """Brings gradients that autograd adds to a sharded parameter to its placements.

    Those of a model do not come this way: they are delivered from full parameters. Those of a
    penalty on the sharded parameter may be replicated, or pending a sum.
    """

    __torch_unserializable__ = True  # torch does not warn that pickles leave it out

    def __init__(self, form: ShardedParam) -> None:
        self._form = weakref.ref(form)

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        form = self._form()
        return form.place_grad(grad) if form is not None and isinstance(grad, DTensor) else None


class Growth(enum.Enum):
    """What backwards have added to the gradient of a tied parameter since one was completed.

    ``NONE``: nothing. ``NEW``: all of it. ``MORE``: a part.
    """

    NONE = "none"
    NEW = "new"
    MORE = "more"


class GradSource(enum.Enum):
    """What a gradient is of: of what the model computes, or of a penalty on the sharded parameter.

    Those of a model come from full parameters, and those of a penalty from autograd itself.
    """

    MODEL = "model"
    PENALTY = "penalty"


class ShardedParam:
    """This rank's shard of a parameter, as a ``DTensor`` parameter.

    Args:
        param: the original parameter: plain, or a ``DTensor`` made by tensor parallelism.
        fqn: its fully qualified name.
        place: the mesh that it is sharded over, and how it is cut.
        offload: where the shard is stored.

    Attributes:
        parameter: the ``DTensor`` parameter.
        attributes: what the program has set on the parameter; the ``__dict__`` of all its forms.
        mesh: the mesh that it is sharded over.
        spec: its mesh, placements and global shape.
        origin: the spec of the original parameter, if that was a ``DTensor``.
        layout: how this rank's part of the original is cut.
        owners: the modules, of all groups, that hold the parameter.
        is_tied: whether several groups have the parameter, each with its part of the gradient.
        groups: the groups that have the parameter.
        steps: the number of optimizer steps on the parameter so far.
        steps_in_backward: how many of them a :class:`~shardwise.sharding.stepping.Stepper` made.
        growth: what the running backward has added to the gradient, if the parameter is tied.
        hooked: the backward whose gradient post-accumulate-grad hooks got last, and its source.
        summoned: the full parameter that the user holds inside ``summon_full_params``, if any.
        offload: where the shard is stored.
        is_new: whether the shard was on the meta device when it got its memory.
        has_moved: whether it has taken another place, to which states of optimizers had to move.
        lost_by: what failed while the values were on their way; empty if they are not lost.
    """

    def __init__(self, param: nn.Parameter, fqn: str, place: Place, offload: Offload) -> None:
        self.fqn = fqn
        self.mesh = place.mesh
        self.owners: list[ParamOwner] = []
        self.groups: list[Any] = []
        self.is_tied = False
        self.steps = self.steps_in_backward = 0
        self.growth = Growth.NONE
        self.hooked: tuple[int | None, GradSource] = None, GradSource.MODEL
        self.summoned: nn.Parameter | None = None
        self.offload = offload
        self.is_new = self.has_moved = False
        self.lost_by = ""
        full = dtensor.local_of(param) if isinstance(param, DTensor) else param.detach()
        self.origin = dtensor.spec_of(param) if isinstance(param, DTensor) else None
        self.layout = place.layout
        self.spec = place.spec
        self.attributes = attributes.carried(param)
        with torch.no_grad():
            self.parameter = self._wrap(self._copy_of_shard(full), param)
        autograd.share_hooks(param, self.parameter)
        drawing.draw_whole(self.spec)
        self._watch()

    def _wrap(self, shard: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
        made = dtensor.make_parameter(shard, self.spec, requires_grad=like.requires_grad)
        attributes.share(made, self.attributes)
        return made

    def take_place_of(self, param: nn.Parameter) -> None:
        """Note that modules hold this parameter in place of another one."""
        attributes.leave(param)
        _steps.note_replaced(param, self)

    def copy_parameter(self, memo: dict[Any, Any]) -> None:
        """Put a copy of the parameter, on the same mesh and without gradient, into ``memo``."""
        if id(self.parameter) not in memo:
            with torch.no_grad():
                local, on_disk = self.local, self.offload.is_on_disk(self.local)
                copied = self.offload.copy(local, self.fqn) if on_disk else local.clone()
                memo[id(self.parameter)] = dtensor.make_parameter(
                    copied, self.spec, requires_grad=self.parameter.requires_grad
                )

    def __deepcopy__(self, memo: dict[Any, Any]) -> ShardedParam:
        """Copy for copied modules, which hold the copy of the parameter."""
        made = copy.copy(self)
        memo[id(self)] = made
        made.parameter = memo[id(self.parameter)]
        made.attributes = attributes.copies(self.attributes, memo)
        attributes.share(made.parameter, made.attributes)
        made.owners = copy_owners(self.owners, memo)
        made.groups = []
        made.offload = copy.deepcopy(self.offload, memo)
        made.summoned, made.growth = None, Growth.NONE
        made._watch()
        return made

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return dtensor.local_of(self.parameter)

    @property
    def version(self) -> Version:
        """What changes when the shard is written to."""
        return autograd.version_of_sharded(self.parameter), self.steps

    def add_owners(self, owners: Sequence[ParamOwner]) -> None:
        """Add the modules of one more group that hold the parameter, and register it there."""
        self.is_tied = bool(self.owners)
        self.owners += owners
        for owner in owners:
            owner.register(self.parameter)

    def take_over(self, owner: ParamOwner) -> None:
        """Adopt the parameter that ``owner`` holds after ``to()``, ``to_empty()`` or a state dict.

        Raises:
            MisuseError: it was deleted, or something else takes its place.
            ValueError: it is not a ``DTensor`` of the same global shape and placements. The old
                parameter is registered again.
        """
        if owner.holds(None):
            raise MisuseError(
                f"{self.fqn} on rank {dist.get_rank()}: the parameter {owner.name!r} of a "
                f"{type(owner.module).__name__} was deleted. Delete or parametrize parameters "
                "before fully_shard"
            )
        found = owner.registered
        if found is not self.parameter:
            owner.register(self.parameter)  # stays if the check raises
            self._check_replacement(found)
            if owner != self.owners[0]:
                raise ValueError(
                    f"{self.fqn} on rank {dist.get_rank()}: {owner.name!r} of a "
                    f"{type(owner.module).__name__} was tied to it, but is another parameter now, "
                    "as after load_state_dict(assign=True). Tie them again "
                    "(one.weight = other.weight), or load without assign"
                )
            owner.register(found)
            self.is_new = self.local.is_meta
            self.take_place_of(self.parameter)
            self.parameter = found  # the other modules that it is tied to have to follow
        self._watch()  # also of the same parameter, if to() has swapped what is in it
        attributes.share(self.parameter, self.attributes)
        with autograd.no_grad():  # a forward of inference mode may be the first one that sees it
            local = self.offload.place(self.local, self.fqn)
            if not (dtensor.is_wrapper(local) or local.is_meta or local.is_contiguous()):
                # It has another memory format. Collectives send rows one after the other.
                local = local.contiguous()
            if local is not self.local:
                dtensor.set_local_memory(self.parameter, local)
        self.spec = dtensor.spec_of(self.parameter)
        self._report(self.local)

    def tie_again(self) -> None:
        """Tie modules again whose parameters have equal values after a state dict was loaded.

        A state dict holds a tied parameter once for each name.
        """
        for owner in self.owners[1:]:
            if not (owner.holds(self.parameter) or owner.holds(None)):
                found = owner.registered
                if isinstance(found, DTensor) and self._has_same_values(found):
                    owner.register(self.parameter)

    def _has_same_values(self, other: DTensor) -> bool:
        """Whether the shards have the same bits, or ``other`` is on the meta device, with none."""
        mine, theirs = self.local, dtensor.local_of(other)
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return False
        if not (dtensor.has_memory(mine) and dtensor.has_memory(theirs)):
            return theirs.is_meta and not mine.is_meta
        both = [each.detach().contiguous().view(-1) for each in (mine, theirs.to(mine.device))]
        return torch.equal(*(each.view(torch.uint8) for each in both))

    def empty_full(self, device: torch.device) -> nn.Parameter:
        """Make an uninitialized parameter like the original one, on ``device``."""
        dtype = self.parameter.dtype
        full = torch.empty(self.layout.shape, dtype=dtype, device=device)
        if self.origin is not None:
            full = dtensor.wrap_local(full, dtensor.with_dtype(self.origin, dtype))
        made = nn.Parameter(full, requires_grad=self.parameter.requires_grad)
        attributes.share(made, self.attributes)
        return made

    def materialize(self, full: torch.Tensor) -> None:
        """Replace a shard on the meta device by this rank's part of ``full``.

        Raises:
            MisuseError: the values were lost, so others would silently take their place.
        """
        self.check_not_lost()
        with torch.no_grad():
            local = dtensor.plain(full)
            made = self._wrap(self._copy_of_shard(local), self.parameter)
        self._register_everywhere(made)

    def allocate(self, device: torch.device) -> None:
        """Replace a shard on the meta device by uninitialized memory on ``device``, or offloaded.

        Only for tensors that are filled at once: nothing marks them as uninitialized.

        Raises:
            MisuseError: the values were lost, so others would silently take their place.
        """
        self.check_not_lost()
        with torch.no_grad():
            shard = self.offload.empty_like(self.local, device, self.fqn)
            self._report(shard)
            made = self._wrap(shard, self.parameter)
        self.is_new = True
        self._register_everywhere(made)

    @property
    def has_memory(self) -> bool:
        """Whether the shard has memory: it is not on the meta device, nor moved elsewhere."""
        return not self.local.is_meta and 0 not in self.local.stride()

    def let_go(self) -> None:
        """Drop the memory of the shard, which the caller has. The values here are NaN then."""
        if not self.local.is_meta:
            nothing = dtensor.without_memory(self.local, self.local.shape)
            dtensor.move_local(self.parameter, nothing, self.spec)

    def leave(self) -> None:
        """Move to the meta device. The parameter stays the same object."""
        self._exchange(torch.empty(self.local.shape, dtype=self.local.dtype, device="meta"))

    def lose(self, doing: str) -> None:
        """Note that the values are lost, and move to the meta device if nothing holds on to them.

        Args:
            doing: what has failed.
        """
        self.lost_by = doing
        with contextlib.suppress(RuntimeError):  # of weak references; whoever uses it is told
            self.leave()

    def check_not_lost(self) -> None:
        """Check that the values were not lost on their way to another layout.

        Raises:
            MisuseError: they were.
        """
        if self.lost_by:
            raise MisuseError(
                f"{self.fqn} on rank {dist.get_rank()}: its values were lost when {self.lost_by} "
                "failed; build the model and the optimizer again, and load a checkpoint"
            )

    def take_place(self, place: Place) -> None:
        """Take another place, still without memory. The parameter stays the same object."""
        self.mesh, self.layout, self.spec = place.mesh, place.layout, place.spec
        self.has_moved = True
        _steps.note_moves()
        drawing.draw_whole(self.spec)
        shape = self.layout.shard_shape(self.mesh.shard.rank)
        dtensor.move_local(self.parameter, dtensor.without_memory(self.local, shape), place.spec)

    def fill_place(self) -> None:
        """Take memory, which the caller fills. The parameter stays the same object."""
        shard = self.offload.empty_like(self.local, self.mesh.device, self.fqn)
        self._report(shard)
        if self.parameter.is_meta:
            self._exchange(shard)
        else:
            dtensor.move_local(self.parameter, shard, self.spec)

    def _exchange(self, shard: torch.Tensor) -> None:
        """Exchange the shard for one on another device, which a ``DTensor`` cannot change."""
        made = self._wrap(shard, self.parameter)
        torch.utils.swap_tensors(self.parameter, made)  # type: ignore[no-untyped-call]
        self._watch()

    def check_exchange(self, doing: str) -> None:
        """Check that nothing would lose the parameter if it went from or to the meta device.

        Raises:
            MisuseError: it has hooks, weak references, or a place in a graph of autograd.
        """
        param = self.parameter
        hooks = autograd.has_post_accumulate_hooks(param) or autograd.grad_hooks(param)
        if hooks or autograd.is_in_graph(param) or weakref.getweakrefs(param):
            raise MisuseError(
                f"{doing}: {self.fqn} on rank {dist.get_rank()} has hooks, or weak references or a "
                "graph of autograd lead to it, and it is to move from or to the meta device; "
                "remove them first, and drop what was computed from it"
            )

    def _watch(self) -> None:
        """Have steps on the parameter counted, and gradients of penalties placed."""
        _steps.watch(self)
        autograd.set_first_grad_hook(self.parameter, _GradHook(self))

    def place_grad(self, grad: DTensor) -> DTensor:
        """Return a gradient that autograd is about to add, with the placements of the parameter.

        Raises:
            NotImplementedError: post-accumulate-grad hooks have had the model's in this backward.
        """
        if autograd.has_post_accumulate_hooks(self.parameter) and autograd.accumulates(
            self.parameter
        ):
            self._note_hooks(GradSource.PENALTY)
        self.offload.wait()  # the gradient that it is added to may be on its way to the host
        return dtensor.redistributed_as(grad, self.spec)

    def add_grad(self, shard: torch.Tensor) -> None:
        """Add a reduced gradient to the gradient of the parameter.

        Args:
            shard: the gradient of this rank's shard: of its shape, or 1-D with at least as many
                elements, of which the rest is padding. If its dtype is not the parameter's, the
                gradient of the parameter gets that dtype, too.
        """
        parameter = self.parameter
        own = dtensor.local_of(parameter)
        local = shard if shard.shape == own.shape else shard[: own.numel()].view(own.shape)
        if autograd.grad_hooks(parameter):
            local = self._through_hooks(local)
        grad = dtensor.placed_grad(parameter)
        if grad is None:
            if self.is_tied:
                self.growth = Growth.NEW
            if self.offload.enabled:
                with observe.during(Activity.COPY, self.fqn):
                    local = self.offload.grad_to_host(local, parameter)
            if observe.is_observed():
                observe.memory_of(Memory.GRADIENTS, self.fqn, local)
            spec = self.spec
            if local.dtype != own.dtype:
                spec = dtensor.with_dtype(spec, local.dtype)
                parameter.grad_dtype = local.dtype
            parameter.grad = dtensor.wrap_local(local, spec)
        else:
            if self.is_tied and self.growth is Growth.NONE:
                self.growth = Growth.MORE
            self.offload.wait()  # another group's part may still be on its way to the host
            into = dtensor.local_of(grad)
            into += local.to(into.device)

    def _through_hooks(self, local: torch.Tensor) -> torch.Tensor:
        """Pass a gradient through the hooks of ``Tensor.register_hook``.

        Raises:
            TypeError: a hook did not return a gradient with the placements of its argument.
        """
        grad: torch.Tensor = dtensor.wrap_local(local, dtensor.with_dtype(self.spec, local.dtype))
        for hook in autograd.grad_hooks(self.parameter):
            made = hook(grad)
            if made is None:
                continue
            if not isinstance(made, DTensor) or made.placements != self.spec.placements:
                raise TypeError(
                    f"{self.fqn} on rank {dist.get_rank()}: a hook on the gradient returned "
                    f"{type(made).__name__}, expected a DTensor with placements "
                    f"{self.spec.placements}, as it was given"
                )
            grad = made
        return dtensor.wait_tensor(dtensor.local_of(grad))

    def end_backward(self) -> None:
        """Complete the gradient of a tied parameter, to which several groups may have added.

        A tied parameter that was frozen during the backward gets none, as in unsharded training.
        """
        growth, self.growth = self.growth, Growth.NONE
        if growth is Growth.NEW and not self.parameter.requires_grad:
            self.parameter.grad = None
        if growth is not Growth.NONE:
            self.run_hooks()

    def run_hooks(self) -> None:
        """Run the user's post-accumulate-grad hooks, such as an optimizer in backward."""
        parameter = self.parameter
        if autograd.has_post_accumulate_hooks(parameter) and parameter.grad is not None:
            self._note_hooks(GradSource.MODEL)
            before = self.version
            autograd.run_post_accumulate_hooks(parameter)
            if self.version != before:  # it steps; one process refuses the old value, too
                for group in self.groups:
                    group.outdate(self)

    def _note_hooks(self, source: GradSource) -> None:
        """Note that post-accumulate-grad hooks get a gradient.

        Raises:
            NotImplementedError: they have had one of the other source in this backward. In one
                process they get both as one gradient.
        """
        backward, (before, last) = autograd.backward_id(), self.hooked
        if backward is not None and backward == before and source is not last:
            raise NotImplementedError(
                f"{self.fqn} on rank {dist.get_rank()}: its post-accumulate-grad hooks would run "
                "twice in one backward, for the gradient of the model and for that of a penalty on "
                "the sharded parameter. Call backward() of the penalty by itself"
            )
        self.hooked = backward, source

    def _copy_of_shard(self, full: torch.Tensor) -> torch.Tensor:
        rows = self.layout.cut(full.detach(), self.mesh.shard.rank)
        shard = self.offload.copy(rows, self.fqn)
        self._report(shard)
        return shard

    def _report(self, shard: torch.Tensor) -> None:
        if not self.offload.is_on_disk(shard):
            observe.memory_of(Memory.PARAMETERS, self.fqn, shard)

    def _register_everywhere(self, parameter: nn.Parameter) -> None:
        autograd.share_hooks(self.parameter, parameter)
        self.take_place_of(self.parameter)
        self.parameter = parameter
        self._watch()
        for owner in self.owners:
            owner.register(parameter)

    def _check_replacement(self, found: nn.Parameter) -> None:
        if not isinstance(found, DTensor):
            raise ValueError(
                f"{self.fqn} on rank {dist.get_rank()}: the sharded parameter was replaced by a "
                f"{type(found).__name__} of shape {tuple(found.shape)}; expected a DTensor with "
                f"placements {self.spec.placements}. Load with set_model_state_dict, or make the "
                "value a DTensor with distribute_tensor"
            )
        check_origin(self.fqn, found, self.parameter)
        if found.shape != self.spec.shape or found.placements != self.spec.placements:
            raise ValueError(
                f"{self.fqn} on rank {dist.get_rank()}: the sharded parameter was replaced by one "
                f"of shape {tuple(found.shape)} and placements {found.placements}; expected "
                f"{tuple(self.spec.shape)} and {self.spec.placements}"
            )


#: What changes when a shard is written to, or exchanged for another (by ``swap_tensors``): writes
#: that autograd has counted, to the ``DTensor`` or its local tensor, and the identity of that; and
#: steps of optimizers, some of which write what autograd does not count.
Version = tuple[tuple[int, int], int]


def copy_owners(owners: Sequence[ParamOwner], memo: dict[Any, Any]) -> list[ParamOwner]:
    """The owners among the copied modules; others are left out."""
    copied = memo[COPIED]
    return [
        ParamOwner(copy.deepcopy(owner.module, memo), owner.name)
        for owner in owners
        if owner.module in copied
    ]


_steps: Steps[ShardedParam] = Steps()


def forms_of(params: Iterable[torch.Tensor]) -> list[ShardedParam]:
    """Return the sharded forms of those of ``params`` that are sharded."""
    return _steps.forms_of(params)


def form_of(param: torch.Tensor) -> ShardedParam | None:
    """The sharded form of an original parameter that an earlier call has taken, if any.

    If it is tied, the modules of other calls still hold the original.
    """
    return _steps.form_of(param)
