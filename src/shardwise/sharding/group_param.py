"""A parameter in its group: its sharded form, its full form, and the way between them.

A parameter has two forms, and its modules hold one of them at a time:

- *sharded*: a ``DTensor`` parameter whose local tensor is this rank's shard. Optimizers, state
  dicts and users see this form. It is the only one between steps.
- *full*: a parameter of the original shape in the compute dtype; a ``DTensor`` if tensor
  parallelism made it one. Forward and backward see this form. The object is made once. Its memory
  is allocated and freed many times.

Autograd saves the full parameter, or views of it, for backward, while its memory is freed in
between. So the storage *object* that the views share must survive: its memory is resized, and it
is never exchanged for another storage. The full parameter has a version counter of its own, so
that gathering into its memory does not look like an in-place modification to autograd.

A parameter that is tied across groups has one sharded form, and one full form for each group. The
gradients of all groups are added in the sharded form.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import autograd, dtensor
from shardwise._torch.fsdp import ParamOwner
from shardwise.base import observe
from shardwise.base.errors import MisuseError
from shardwise.sharding import attributes
from shardwise.sharding.layout import Layout
from shardwise.sharding.param import ShardedParam, copy_owners
from shardwise.sharding.policy import Precision

observe.ALLOCATES[__file__] = observe.Memory.FULL_PARAMETERS


class GroupParam:
    """A parameter in one group. The modules change only with :meth:`install`.

    Attributes:
        form: the sharded form, shared with the other groups that the parameter is tied to.
        owners: the modules of the group that hold it; more than one if it is tied.
        precision: the dtypes to compute and to reduce in.
        full: the full parameter; ``None`` until it is first unsharded.
        memory: the tensor that it was made of, whose memory autograd and the group expect.
        accumulated_grad: the unreduced gradient of earlier backwards, in the reduction dtype.
    """

    def __init__(self, form: ShardedParam, owners: list[ParamOwner], precision: Precision) -> None:
        self.form = form
        self.owners = owners
        self.precision = precision
        self.full: nn.Parameter | None = None
        self.memory: torch.Tensor | None = None
        self.accumulated_grad: torch.Tensor | None = None
        # As it was when the full parameter, or its post-forward shard, was put into the modules.
        self._requires_grad = False

    def install(self) -> None:
        """Replace the original parameter by the sharded form in every module."""
        self.form.add_owners(self.owners)

    def __deepcopy__(self, memo: dict[Any, Any]) -> GroupParam:
        """Copy for copied modules, which hold a copied sharded form."""
        made = copy.copy(self)
        memo[id(self)] = made
        made.form = copy.deepcopy(self.form, memo)
        made.owners = copy_owners(self.owners, memo)
        made.full = made.accumulated_grad = made.memory = None
        return made

    # -- the sharded form ----------------------------------------------------------------------

    @property
    def fqn(self) -> str:
        """The fully qualified name, from the sharded module or, once it is known, from the root."""
        return self.form.fqn

    @property
    def layout(self) -> Layout:
        """How the parameter is cut."""
        return self.form.layout

    @property
    def sharded(self) -> nn.Parameter:
        """The ``DTensor`` parameter."""
        return self.form.parameter

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return dtensor.local_of(self.form.parameter)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the shard, which the optimizer updates."""
        return self.form.parameter.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the full parameter."""
        return self.precision.compute_dtype(self.dtype)

    @staticmethod
    def leave_all(params: Sequence[GroupParam]) -> None:
        """Prepare to take full forms out of the modules. A frozen one freezes the shard."""
        for param in params:
            full = param.full
            if full is None or full.requires_grad == param._requires_grad:
                continue
            if param.owners[0].holds(full):
                param.follow_requires_grad(full)

    def is_in(self, module: nn.Module | None) -> bool:
        """Whether a module of the group holds the parameter; any does if ``None``."""
        return module is None or any(owner.module is module for owner in self.owners)

    def refresh(self) -> None:
        """Adopt the parameter that the modules hold after ``to()``, ``to_empty()`` or a state dict.

        Raises:
            ValueError: the module holds something other than a ``DTensor`` of the same global
                shape and placements.
        """
        if self.owners[0] == self.form.owners[0]:
            self.form.take_over(self.owners[0])

    def look(self) -> tuple[object, ...]:
        """The properties of the shard that the full form depends on."""
        form = self.form
        local = form.local
        pointer = local.untyped_storage().data_ptr() if dtensor.has_memory(local) else 0
        return id(form.parameter), id(form.spec), local.dtype, local.device, pointer

    # -- the full form -------------------------------------------------------------------------

    def make_full(self, memory: torch.Tensor) -> None:
        """Make the full parameter in ``memory`` (1-D, at least ``layout.numel`` elements)."""
        full = torch.empty(0, dtype=memory.dtype, device=memory.device)
        storage = memory.untyped_storage()
        size = storage.size()
        # set_() shares the storage but not the version counter; see the docstring of this module.
        # It needs the memory to be allocated, and does not touch it.
        offset = int(memory.storage_offset())
        if size == 0:
            storage.resize_((offset + memory.numel()) * memory.itemsize)
        full.set_(storage, offset, self.layout.shape, self.layout.strides)
        if size == 0:
            storage.resize_(0)
        self.adopt_full(full)

    def adopt_full(self, full: torch.Tensor) -> None:
        """Make ``full`` (of shape ``layout.shape``) the full parameter."""
        origin = self.form.origin
        if origin is not None:
            full = dtensor.wrap_local(full, dtensor.with_dtype(origin, full.dtype))
        self.accumulated_grad = self.take_grad()  # of the full parameter that this replaces
        self.memory = full
        self.full = nn.Parameter(full, requires_grad=self.sharded.requires_grad)
        attributes.share(self.full, self.form.attributes)

    @property
    def full_data(self) -> torch.Tensor:
        """The full parameter as a plain tensor without autograd history."""
        assert self.full is not None
        return dtensor.plain(self.full).data

    def take_over_writes(self, *, is_shard_written: bool) -> None:
        """Copy to the shard what was written to this rank's rows of the full parameter.

        Only elements that changed are copied, since a full parameter of lower precision would
        round the others.

        Args:
            is_shard_written: whether the shard was written to since it was gathered.

        Raises:
            MisuseError: the shard was written to as well, or the full parameter got data of
                another shape.
        """
        full, shard = self.full, self.local
        assert full is not None
        where = f"{self.fqn} on rank {dist.get_rank()}"
        if full.shape != self.layout.shape and self.form.origin is None:
            raise MisuseError(
                f"{where}: its full parameter was given data of shape {tuple(full.shape)}, "
                f"expected {tuple(self.layout.shape)}"
            )
        if is_shard_written:
            raise MisuseError(
                f"{where}: both its full parameter, which its module holds while it runs, and its "
                "shard were written to since it was gathered. Write to one of them, or call "
                "reshard() on the module in between"
            )
        rows = self.layout.cut(self.full_data, self.form.mesh.shard.rank).to(shard.device)
        with autograd.no_grad():
            written = rows != self._as_gathered(shard, rows.dtype)
            shard.copy_(torch.where(written, rows.to(shard.dtype), shard))
        assert self.memory is not None
        if type(full) is nn.Parameter and full.data_ptr() != self.memory.data_ptr():
            full.data = self.memory  # the next gather goes there

    def _as_gathered(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.layout.dim is None:
            return shard.to(dtype)
        gathered = self.form.mesh.shard.as_gathered(shard.reshape(-1), dtype)
        return gathered.to(shard.device).view(shard.shape)

    def follow_requires_grad(self, parameter: nn.Parameter) -> None:
        """Apply a ``requires_grad_()`` call on ``parameter``, in the modules, to the shard."""
        if parameter.requires_grad != self._requires_grad:
            self._requires_grad = parameter.requires_grad
            self.sharded.requires_grad_(parameter.requires_grad)

    def register(self, parameter: nn.Parameter) -> None:
        """Put ``parameter`` into the modules."""
        for owner in self.owners:
            owner.register(parameter)

    # -- gradients -----------------------------------------------------------------------------

    @staticmethod
    def freeze_or_unfreeze_all(params: Sequence[GroupParam]) -> list[GroupParam]:
        """Make shards and full parameters agree on ``requires_grad``.

        Returns:
            The parameters whose shards have frozen the full ones.
        """
        frozen = []
        for param in params:
            full, shard = param.full, param.form.parameter
            if full is None or full.requires_grad == param._requires_grad == shard.requires_grad:
                continue
            if param.owners[0].holds(full):
                param.follow_requires_grad(full)  # users see this one
            if full.requires_grad != shard.requires_grad:
                full.requires_grad_(shard.requires_grad)
                if not shard.requires_grad:
                    frozen.append(param)
            param._requires_grad = full.requires_grad
        return frozen

    @observe.allocates(observe.Memory.GRADIENTS)
    def accumulate_grad(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Keep the gradient of this backward for a later reduction, in ``dtype``.

        Gradients are added in the reduction dtype, so that accumulation does not round.

        Returns:
            The unreduced gradient so far.
        """
        full = self.full
        if full is None or full.grad is None:
            return self.accumulated_grad
        if self.accumulated_grad is not None:
            self.accumulated_grad += self._plain(full.grad)
        elif full.grad.dtype != dtype:
            self.accumulated_grad = self._plain(full.grad).to(dtype)
        else:
            return full.grad
        full.grad = None
        return self.accumulated_grad

    def take_grad(self) -> torch.Tensor | None:
        """Take the unreduced gradient of the full parameter. The caller owns it from now on."""
        full, grad = self.full, self.accumulated_grad
        self.accumulated_grad = None
        if full is not None and (found := full.grad) is not None:
            new = self._plain(found)
            full.grad = None
            grad = new if grad is None else grad.add_(new)
        return grad

    def drop_grad(self) -> None:
        """Drop the unreduced gradient."""
        self.accumulated_grad = None
        if self.full is not None:
            self.full.grad = None

    @property
    def holds_grad(self) -> bool:
        """Whether there is an unreduced gradient."""
        full = self.full
        return self.accumulated_grad is not None or (full is not None and full.grad is not None)

    @observe.allocates(observe.Memory.GRADIENTS)
    def zeros_for_grad(self) -> torch.Tensor | None:
        """Make a gradient of zeros; ``None`` if the parameter was never unsharded."""
        if self.full is None:
            return None
        # The memory of the full parameter may be freed; only its metadata is read.
        return torch.zeros(self.layout.shape, dtype=self.full.dtype, device=self.full.device)

    @observe.allocates(observe.Memory.GRADIENTS)  # tensor parallel ranks', added
    def _plain(self, grad: torch.Tensor) -> torch.Tensor:
        """The part of a gradient that this rank reduces, as a plain dense tensor.

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
        # Leave the data parallel dimensions alone: they are reduced later.
        pairs = enumerate(zip(grad.placements, origin.placements, strict=True))
        wanted = tuple(
            found if i in mesh.own_dims else placement for i, (found, placement) in pairs
        )
        if wanted != grad.placements:
            grad = grad.redistribute(placements=wanted)
        local = dtensor.wait_tensor(dtensor.local_of(grad))
        observe.memory_of(observe.Memory.GRADIENTS, self.fqn, local)  # beside what autograd made
        return local

    def __repr__(self) -> str:
        return f"GroupParam({self.fqn}, {tuple(self.layout.shape)}, dim={self.layout.dim})"
