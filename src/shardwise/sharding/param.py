"""The sharded form of a parameter: the ``DTensor`` that optimizers and state dicts see.

There is one for every parameter, also where the parameter is tied across groups: every place where
it is registered then holds the same object.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise._torch import autograd, dtensor, fsdp
from shardwise.sharding.placement import Place
from shardwise.sharding.policy import Offload

#: Under this key a deepcopy's memo holds the modules that are being copied.
COPIED = "shardwise: the modules being copied"


@dataclass(frozen=True)
class ParamOwner:
    """A place where a parameter is registered: ``module.<name>``."""

    module: nn.Module
    name: str

    @property
    def registered(self) -> nn.Parameter:
        """The parameter that is there now."""
        return fsdp.parameter_of(self.module, self.name)

    def holds(self, parameter: nn.Parameter | None) -> bool:
        """Whether ``parameter`` is the one that is there now."""
        return fsdp.holds_parameter(self.module, self.name, parameter)

    def register(self, parameter: nn.Parameter) -> None:
        """Put ``parameter`` there."""
        fsdp.register_parameter(self.module, self.name, parameter)


class _Steps:
    """Counts the steps of optimizers on sharded parameters.

    Some write to many tensors at once past autograd's sight, which counts other writes.
    """

    def __init__(self) -> None:
        self._forms: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()
        self._is_registered = False

    def watch(self, form: ShardedParam) -> None:
        """Count in ``form.steps`` the steps of optimizers that have its parameter."""
        self._forms[id(form.parameter)] = form
        if not self._is_registered:
            self._is_registered = True
            register_optimizer_step_post_hook(self._count)

    def _count(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                form = self._forms.get(id(param))
                if form is not None and form.parameter is param:
                    form.steps += 1


_steps = _Steps()


class ShardedParam:
    """This rank's rows of a parameter, as a ``DTensor`` parameter.

    Args:
        param: the original parameter: plain, or a ``DTensor`` that tensor parallelism left.
        fqn: its fully qualified name.
        place: over which mesh it is sharded, and how it is cut.
        offload: where the rows live.

    Attributes:
        parameter: the ``DTensor`` parameter.
        mesh: over which it is sharded.
        spec: its mesh, placements and global shape.
        origin: those of the original parameter, where that was a ``DTensor``.
        layout: how what this rank had of the original is cut.
        owners: every place, in any group, where the parameter is registered.
        users: a :class:`GroupParam` for each group that has the parameter.
        steps: of optimizers that have the parameter, so far.
        lent: the whole parameter that a user holds for now, if one does.
        offload: where the rows live; it knows which gradients are on their way there.
    """

    def __init__(self, param: nn.Parameter, fqn: str, place: Place, offload: Offload) -> None:
        self.fqn = fqn
        self.mesh = place.mesh
        self.owners: list[ParamOwner] = []
        self.users: list[Any] = []
        self._groups = 0
        self.steps = 0
        # Whether the gradient of a tied parameter is of the backward that now runs alone.
        self._grad_is_new = False
        self.summoned: nn.Parameter | None = None
        self.offload = offload
        whole = dtensor.local_of(param) if isinstance(param, DTensor) else param.detach()
        self.origin = dtensor.spec_of(param) if isinstance(param, DTensor) else None
        self.layout = place.layout
        self.spec = place.spec
        with torch.no_grad():
            self.parameter = nn.Parameter(
                dtensor.wrap_local(self._copy_of_shard(whole), self.spec),
                requires_grad=param.requires_grad,
            )
        _steps.watch(self)

    def copy_parameter(self, memo: dict[Any, Any]) -> None:
        """Enter a copy of the parameter, on the same mesh and without gradient, into ``memo``."""
        if id(self.parameter) not in memo:
            with torch.no_grad():
                copied = dtensor.wrap_local(self.local.clone(), self.spec)
                memo[id(self.parameter)] = nn.Parameter(
                    copied, requires_grad=self.parameter.requires_grad
                )

    def __deepcopy__(self, memo: dict[Any, Any]) -> ShardedParam:
        """Copy for copied modules, which hold the copy of the parameter."""
        made = copy.copy(self)
        memo[id(self)] = made
        made.parameter = memo[id(self.parameter)]
        made.owners = copy_owners(self.owners, memo)
        made.users = []
        made.offload = copy.deepcopy(self.offload, memo)
        made.summoned = None
        _steps.watch(made)
        return made

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        return dtensor.local_of(self.parameter)

    @property
    def is_tied(self) -> bool:
        """Whether several groups have the parameter, each with a part of its gradient."""
        return self._groups > 1

    def add_owners(self, owners: Sequence[ParamOwner]) -> None:
        """Note the places of the parameter in one more group, and put it there."""
        self._groups += 1
        self.owners += owners
        for owner in owners:
            owner.register(self.parameter)

    def take_over(self, owner: ParamOwner) -> None:
        """Take over what ``owner`` holds now, after ``to()``, ``to_empty()`` or a state dict.

        Raises:
            ValueError: it is no ``DTensor`` of the same global shape and placements. The
                parameter of before is registered again then.
        """
        found = owner.registered
        if found is not self.parameter:
            owner.register(self.parameter)  # what was refused shall not stay
            self._check_replacement(found)
            if owner != self.owners[0]:
                raise ValueError(
                    f"{self.fqn} on rank {dist.get_rank()}: {owner.name!r} of a "
                    f"{type(owner.module).__name__} was tied to it, and is another parameter now, "
                    "as after load_state_dict(assign=True). Tie them again "
                    "(one.weight = other.weight), or load without assign"
                )
            owner.register(found)
            self.parameter = found  # the other places where it is tied have to follow
            _steps.watch(self)
        local = self.offload.place(self.local)
        if not (dtensor.is_wrapper(local) or local.is_meta or local.is_contiguous()):
            # Put into another memory format. Rows travel one after the other.
            local = local.contiguous()
        if local is not self.local:
            with torch.no_grad():
                dtensor.set_local_memory(self.parameter, local)
        self.spec = dtensor.spec_of(self.parameter)

    def tie_again(self) -> None:
        """Put the parameter where another one in the same memory is, which a state dict left there.

        A state dict has a tied parameter once for each name.
        """
        for owner in self.owners[1:]:
            if not (owner.holds(self.parameter) or owner.holds(None)):
                found = owner.registered
                if isinstance(found, DTensor) and self._has_same_memory(found):
                    owner.register(self.parameter)

    def _has_same_memory(self, other: DTensor) -> bool:
        mine, theirs = self.local, dtensor.local_of(other)
        if not (dtensor.has_memory(mine) and dtensor.has_memory(theirs)):
            return False
        return mine.data_ptr() == theirs.data_ptr() and mine.shape == theirs.shape

    def empty_full(self, device: torch.device) -> nn.Parameter:
        """An uninitialized parameter such as the original was, on ``device``."""
        dtype = self.parameter.dtype
        whole = torch.empty(self.layout.shape, dtype=dtype, device=device)
        if self.origin is not None:
            whole = dtensor.wrap_local(whole, dtensor.with_dtype(self.origin, dtype))
        return nn.Parameter(whole, requires_grad=self.parameter.requires_grad)

    def materialize(self, whole: torch.Tensor) -> None:
        """Fill a shard that is on the meta device from ``whole``, as the original was."""
        with torch.no_grad():
            local = dtensor.plain(whole)
            shard = self._copy_of_shard(local)
            made = nn.Parameter(
                dtensor.wrap_local(shard, self.spec), requires_grad=self.parameter.requires_grad
            )
        self._register_everywhere(made)

    def add_grad(self, shard: torch.Tensor) -> None:
        """Add a reduced gradient (1-D, at least this rank's elements) to the parameter's.

        It may have another dtype than the parameter: then so has the parameter's gradient.
        """
        own = self.local
        local = (shard if shard.numel() == own.numel() else shard[: own.numel()]).view(own.shape)
        local = self._through_hooks(local)
        grad = self.parameter.grad
        if grad is None:
            self._grad_is_new = self.is_tied
            local = self.offload.grad_to_host(local, self.parameter)
            if local.dtype != self.parameter.dtype:
                autograd.set_grad_dtype(self.parameter, local.dtype)
            spec = dtensor.with_dtype(self.spec, local.dtype)
            self.parameter.grad = dtensor.wrap_local(local, spec)
        else:
            self.offload.wait()  # what another group made of it may be on its way there
            into = dtensor.local_of(grad)
            into += local.to(into.device)

    def _through_hooks(self, local: torch.Tensor) -> torch.Tensor:
        """What hooks of ``register_hook`` make of a gradient.

        Raises:
            TypeError: one returned something else than a gradient like the one that it was given.
        """
        hooks = autograd.grad_hooks(self.parameter)
        if not hooks:
            return local
        grad: torch.Tensor = dtensor.wrap_local(local, dtensor.with_dtype(self.spec, local.dtype))
        for hook in hooks:
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
        """Settle what several groups, or several passes of one, have made of the gradient.

        A tied parameter that was frozen in between gets none, as where it has one gradient.
        """
        if self._grad_is_new and not self.parameter.requires_grad:
            self.parameter.grad = None
        self._grad_is_new = False
        self.run_hooks()

    def run_hooks(self) -> None:
        """Run what a user registered to follow the gradient (an optimizer in backward, say)."""
        if self.parameter.grad is not None:
            autograd.run_post_accumulate_hooks(self.parameter)

    def _copy_of_shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows in memory of their own, so that the whole can be freed."""
        rows = self.layout.cut(whole.detach(), self.mesh.shard.rank)
        # Subclasses of others have this operator, seldom empty_like.
        shard = rows.clone(memory_format=torch.contiguous_format)
        return self.offload.place(shard)

    def _register_everywhere(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        _steps.watch(self)
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
        if found.shape != self.spec.shape or found.placements != self.spec.placements:
            raise ValueError(
                f"{self.fqn} on rank {dist.get_rank()}: the sharded parameter was replaced by one "
                f"of shape {tuple(found.shape)} and placements {found.placements}; expected "
                f"{tuple(self.spec.shape)} and {self.spec.placements}"
            )


def copy_owners(owners: Sequence[ParamOwner], memo: dict[Any, Any]) -> list[ParamOwner]:
    """The owners in a copied module; those outside of it stay behind."""
    copied = memo[COPIED]
    return [
        ParamOwner(copy.deepcopy(owner.module, memo), owner.name)
        for owner in owners
        if owner.module in copied
    ]
