"""One parameter of a group: its sharded form, its full form, and the way between them.

A parameter exists in two forms, of which its modules hold one at a time:

- *sharded*: a ``DTensor`` parameter whose local tensor is this rank's rows. Optimizers, state
  dicts and users see this form. It is the only one between steps.
- *full*: a parameter with the original shape, in the compute dtype: a plain one, or a ``DTensor``
  where tensor parallelism had made it one. Forward and backward see this form. The object is made
  once; its memory comes and goes.

Autograd saves the full parameter, or views of it, for backward, while its memory is freed in
between. What must survive is therefore the storage *object* that all those views share: memory is
given to it and taken from it, and never swapped for another storage. The full parameter has a
version counter of its own, so that gathering into the memory does not look like an in-place
modification to autograd.

A parameter that is tied across groups has one sharded form, and a full form in each group: what
each group finds as its gradient adds up in the sharded one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import autograd, dtensor
from shardwise.errors import MisuseError
from shardwise.sharding.layout import Layout
from shardwise.sharding.param import ParamOwner, ShardedParam, copy_owners
from shardwise.sharding.unrecorded import unrecorded

# More than a parameter is ever written to.
_SEALED = 1_000_000_000


class GroupParam:
    """A parameter as one group has it.

    Constructing one changes no module; :meth:`install` does.

    Attributes:
        form: the sharded form, shared with the groups that the parameter is tied to.
        owners: every place in the group where it is registered; more than one if it is tied.
        full: the full parameter, ``None`` until it is first unsharded.
        accumulated_grad: gradient of earlier backwards, not yet reduced, in the reduction dtype.
    """

    def __init__(self, form: ShardedParam, owners: list[ParamOwner]) -> None:
        self.form = form
        self.owners = owners
        self.full: nn.Parameter | None = None
        self.accumulated_grad: torch.Tensor | None = None
        # Versions of the full parameter and of the shard after the last gather, and where in
        # memory the full parameter was.
        self._version = self._full_version = self._shard_version = 0
        # As the full parameter, or what is kept of it, was put into the modules.
        self._requires_grad = False
        # Whether the full parameter, in memory of its own, holds values.
        self._is_filled = False
        self._address: int | None = None
        self._memory: torch.Tensor | None = None
        self._is_sealed = False
        # Whether there was no gradient yet when the backward of the group began.
        self._grad_is_new = False
        self._seen = self._look()

    def install(self) -> None:
        """Put the sharded form in the place of the original in every owner."""
        self.form.add_owners(self.owners)
        self.form.users.append(self)

    def __deepcopy__(self, memo: dict[Any, Any]) -> GroupParam:
        """Copy for copied modules, which hold a copy of the sharded form."""
        made = copy.copy(self)
        memo[id(self)] = made
        made.form = copy.deepcopy(self.form, memo)
        made.owners = copy_owners(self.owners, memo)
        made.full = made.accumulated_grad = made._memory = None
        made._is_sealed = made._is_filled = False
        made.form.users.append(made)
        made._seen = made._look()
        return made

    # -- the sharded form ----------------------------------------------------------------------

    @property
    def fqn(self) -> str:
        """Fully qualified name, from the module that was sharded, later from the root."""
        return self.form.fqn

    @property
    def layout(self) -> Layout:
        """How it is cut."""
        return self.form.layout

    @property
    def sharded(self) -> nn.Parameter:
        """The ``DTensor`` parameter."""
        return self.form.parameter

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        return self.form.local

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the shard: the one that the optimizer updates."""
        return self.form.parameter.dtype

    def use_sharded(self) -> None:
        """Put the sharded form into the modules."""
        if self.full is not None and self.owners[0].holds(self.full):
            self.follow_requires_grad(self.full)
        self.register(self.form.parameter)

    def refresh(self) -> bool:
        """Take over what the modules hold now, after ``to()``, ``to_empty()`` or a state dict.

        Returns:
            Whether dtype, device, object or memory changed, so that the full form must be made
            anew.

        Raises:
            ValueError: what is registered now is no ``DTensor`` of the same global shape and
                placements.
        """
        if self.owners[0] == self.form.owners[0]:
            self.form.take_over(self.owners[0])
        self.form.tie_again()
        before, self._seen = self._seen, self._look()
        return before != self._seen

    # -- the full form -------------------------------------------------------------------------

    def make_full(self, memory: torch.Tensor) -> None:
        """Make the full parameter on ``memory`` (1-D, at least ``layout.numel`` elements)."""
        whole = torch.empty(0, dtype=memory.dtype, device=memory.device)
        storage = memory.untyped_storage()
        size = storage.size()
        # set_() shares the storage but not the version counter: see the module's docstring. It
        # wants the memory to be there, untouched.
        offset = int(memory.storage_offset())
        if size == 0:
            storage.resize_((offset + memory.numel()) * memory.itemsize)
        whole.set_(storage, offset, self.layout.shape, self.layout.strides)
        if size == 0:
            storage.resize_(0)
        self.adopt_full(whole)

    def adopt_full(self, whole: torch.Tensor) -> None:
        """Make ``whole`` (shape ``layout.shape``) the full parameter."""
        origin = self.form.origin
        if origin is not None:
            whole = dtensor.wrap_local(whole, dtensor.with_dtype(origin, whole.dtype))
        self._accumulate_grad_of_former_full()
        self._memory = whole
        self.full = nn.Parameter(whole, requires_grad=self.sharded.requires_grad)
        self._is_sealed = self._is_filled = False
        self.note_gathered()

    @property
    def full_data(self) -> torch.Tensor:
        """The full parameter's values, as a plain tensor outside autograd's sight."""
        assert self.full is not None
        return dtensor.plain(self.full).data

    def use_full(self) -> None:
        """Put the full form into the modules. Its memory must be filled by now."""
        full = self.full
        assert full is not None
        self._freeze_or_unfreeze()
        self.register(full)

    def seal(self) -> None:
        """Have autograd refuse to use the full parameter: its memory is about to be freed.

        A backward that begins unseen (by way of a tensor that a module did not return, say) would
        compute with whatever is in that memory then. Autograd compares versions, and raises.

        What modules wrote to the full parameter (a clamped weight, say), the shard takes over.
        """
        if self._is_sealed or self.full is None:
            return
        self.take_over_writes()
        self._version = autograd.version_of(self.full)
        autograd.set_version(self.full, self._version + _SEALED)
        self._is_sealed, self._is_filled = True, False

    def unseal(self) -> None:
        """End what :meth:`seal` began: the full parameter has its values again."""
        if self._is_sealed and self.full is not None:
            autograd.set_version(self.full, self._version)
        self._is_sealed, self._is_filled = False, True
        self.note_gathered()

    def note_gathered(self) -> None:
        """Note the full parameter as it is, to know by its end whether it was written to."""
        assert self.full is not None
        self._full_version = self._version_of_full()
        self._shard_version = self.shard_version
        self._address = _address(self.full)
        self._requires_grad = self.full.requires_grad

    @property
    def shard_version(self) -> int:
        """A number that grows when the shard is written to, as ``DTensor`` or as what is in it."""
        return autograd.version_with_local(self.sharded) + self.form.steps

    @property
    def shares_memory(self) -> bool:
        """Whether the full parameter has the memory of the shard, also after the last swap."""
        if self._memory is None:
            return True
        return self.local.data_ptr() == dtensor.plain(self._memory).data_ptr()

    def take_back_data(self) -> None:
        """Have a full parameter that shares the shard's memory do so again.

        A module may have given it other data (``.data = ...``), which the shard takes over.
        """
        if self.full is not None and _address(self.full) != self._address:
            assert self._memory is not None
            self._memory.copy_(self.full_data)
            self.full.data = self._memory

    def take_over_writes(self) -> None:
        """Write to the shard what was written to this rank's rows of the full parameter.

        Other rows keep what a full parameter of lower precision would round.

        Raises:
            MisuseError: the shard was written to as well, or the full parameter was given data of
                another shape.
        """
        full = self.full
        if full is None:
            return
        replaced = _address(full) != self._address
        if not replaced and self._version_of_full() == self._full_version:
            return
        where = f"{self.fqn} on rank {dist.get_rank()}"
        if full.shape != self.layout.shape and self.form.origin is None:
            raise MisuseError(
                f"{where}: its full parameter was given data of shape {tuple(full.shape)}, "
                f"expected {tuple(self.layout.shape)}"
            )
        shard = self.local
        if self._shard_version != self.shard_version:
            raise MisuseError(
                f"{where}: both its full parameter, which its module holds while it runs, and its "
                "shard were written to since it was gathered. Write to one of them, or call "
                "reshard() on the module in between"
            )
        rows = self.layout.cut(self.full_data, self.form.mesh.shard.rank).to(shard.device)
        with unrecorded():
            written = rows != shard.to(rows.dtype)
            shard.copy_(torch.where(written, rows.to(shard.dtype), shard))
        self._tell_ties()
        if replaced:  # the next gather goes where autograd, and the group, expect it
            assert self._memory is not None
            full.data = self._memory

    def deliver_writes(self) -> None:
        """As :meth:`take_over_writes`, while the full parameter stays in use."""
        if self._is_filled:
            self.take_over_writes()
            self.note_gathered()

    def take_over_from_ties(self) -> None:
        """Have the shard, and the full parameter, hold what modules of other groups wrote to it."""
        for other in self.form.users:
            if other is not self:
                other.deliver_writes()

    def _tell_ties(self) -> None:
        """Give full parameters of other groups that are in use what was written to this one.

        Autograd sees it, as where there is one parameter for all.

        Raises:
            MisuseError: another one was written to as well.
        """
        for other in self.form.users:
            if other is self or not other._is_filled:
                continue
            assert self.full is not None
            assert other.full is not None
            if other._version_of_full() != other._full_version:
                raise MisuseError(
                    f"{self.fqn} on rank {dist.get_rank()}: it is tied, and its full parameters in "
                    "two groups were written to at once. Write to one of them"
                )
            with unrecorded():
                other.full.copy_(self.full)
            other._full_version = other._version_of_full()

    def _version_of_full(self) -> int:
        """A number that grows when it is written to, as ``DTensor`` or as what is in it."""
        assert self.full is not None
        return autograd.version_with_local(self.full)

    def follow_requires_grad(self, parameter: nn.Parameter) -> None:
        """Have the shard need a gradient, or none, as ``parameter`` was told in its place."""
        if parameter.requires_grad != self._requires_grad:
            self._requires_grad = parameter.requires_grad
            self.sharded.requires_grad_(parameter.requires_grad)

    @property
    def is_replaced(self) -> bool:
        """Whether a module holds something else in the place of the full parameter."""
        return not all(owner.holds(self.full) for owner in self.owners)

    def register(self, parameter: nn.Parameter) -> None:
        """Put ``parameter`` into the modules."""
        for owner in self.owners:
            owner.register(parameter)

    # -- gradients -----------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """A backward of the group begins: who froze the sharded form wants no gradient of it."""
        self._freeze_or_unfreeze()
        self._grad_is_new = self.full is not None and self.full.grad is None

    def _freeze_or_unfreeze(self) -> None:
        """Have the shard and the full parameter agree on whether a gradient is needed."""
        full = self.full
        if full is None:
            return
        if self.owners[0].holds(full):
            self.follow_requires_grad(full)  # which users see
        if full.requires_grad != self.sharded.requires_grad:
            full.requires_grad_(self.sharded.requires_grad)
        self._requires_grad = full.requires_grad

    def _drop_unwanted_grad(self) -> None:
        """Drop what this backward made of a parameter that a hook of it has frozen."""
        self._freeze_or_unfreeze()
        if self._grad_is_new and self.full is not None and not self.full.requires_grad:
            self.full.grad = None
        self._grad_is_new = False

    def accumulate_grad(self, dtype: torch.dtype | None) -> None:
        """Keep this backward's gradient for a later reduction, in ``dtype`` if given.

        Adding up happens in the reduction dtype, so that accumulation does not round.
        """
        self._drop_unwanted_grad()
        full = self.full
        if full is None or full.grad is None:
            return
        if self.accumulated_grad is not None:
            self.accumulated_grad += self._plain(full.grad)
            full.grad = None
        elif dtype is not None and full.grad.dtype != dtype:
            self.accumulated_grad, full.grad = self._plain(full.grad).to(dtype), None

    def _accumulate_grad_of_former_full(self) -> None:
        """Keep what was accumulated without synchronization: another full parameter comes."""
        self.accumulate_grad(None)
        if self.full is not None and self.full.grad is not None:
            self.accumulated_grad, self.full.grad = self._plain(self.full.grad), None

    def take_grad(self) -> torch.Tensor | None:
        """This rank's unreduced gradient of the full parameter; the caller owns it from now on."""
        self._drop_unwanted_grad()
        full = self.full
        if full is None:
            return None
        if self.accumulated_grad is not None:
            self.accumulate_grad(None)
            held, self.accumulated_grad = self.accumulated_grad, None
            return held
        grad, full.grad = full.grad, None
        return None if grad is None else self._plain(grad)

    def zero_grad(self, *, of_frozen: bool = False) -> torch.Tensor | None:
        """A gradient of zeros, as of a parameter that was not used; ``None`` for a frozen one."""
        if not (of_frozen or self.sharded.requires_grad) or self.full is None:
            return None
        # Only the shape of the full parameter is looked at: its memory may be freed.
        return torch.zeros(self.layout.shape, dtype=self.full.dtype, device=self.full.device)

    def _plain(self, grad: torch.Tensor) -> torch.Tensor:
        """The part of a gradient that this rank has to reduce, as a plain dense tensor.

        Raises:
            NotImplementedError: the gradient is sparse.
        """
        if grad.layout is not torch.strided:
            raise NotImplementedError(
                f"{self.fqn} on rank {dist.get_rank()}: expected a dense gradient, found "
                f"{grad.layout}; make the embedding with sparse=False, or leave it out by "
                "ignored_params"
            )
        if not isinstance(grad, DTensor):
            return grad
        origin, mesh = self.form.origin, self.form.mesh
        assert origin is not None
        # Over data parallel dimensions the gradient stays as it is: reducing it is our part.
        wanted = tuple(
            found if i in mesh.own_dims else placement
            for i, (found, placement) in enumerate(
                zip(grad.placements, origin.placements, strict=True)
            )
        )
        if wanted != grad.placements:
            grad = grad.redistribute(placements=wanted)
        return dtensor.wait_tensor(dtensor.local_of(grad))

    # -- inside --------------------------------------------------------------------------------

    def _look(self) -> tuple[object, ...]:
        """What the full form depends on."""
        form = self.form
        local = form.local
        pointer = local.untyped_storage().data_ptr() if dtensor.has_memory(local) else 0
        return id(form.parameter), id(form.spec), local.dtype, local.device, pointer

    def __repr__(self) -> str:
        return f"GroupParam({self.fqn}, {tuple(self.layout.shape)}, dim={self.layout.dim})"


def _address(full: nn.Parameter) -> int | None:
    """Where in memory a plain parameter is; ``None`` for one of a subclass."""
    return full.data_ptr() if type(full) is nn.Parameter else None
