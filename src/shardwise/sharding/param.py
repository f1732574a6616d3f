"""One parameter: its shard, its full tensor, and the way between them.

A parameter exists in two forms, of which its modules hold one at a time:

- *sharded*: a ``DTensor`` parameter whose local tensor is this rank's rows. Optimizers, state
  dicts and users see this form. It is the only one between steps.
- *full*: a plain parameter with the original shape, in the compute dtype. Forward and backward
  see this form. The object is made once; its memory comes and goes.

Autograd saves the full parameter, or views of it, for backward, while its memory is freed in
between. What must survive is therefore the storage *object* that all those views share: memory is
given to it and taken from it, and never swapped for another storage. The full parameter has a
version counter of its own, so that gathering into the memory does not look like an in-place
modification to autograd.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise import _torch
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.offload import Offload


@dataclass(frozen=True)
class ParamOwner:
    """A place where a parameter is registered: ``module.<name>``."""

    module: nn.Module
    name: str


class ShardedParam:
    """A parameter that is sharded over a :class:`DataMesh`.

    Constructing one replaces the original parameter by its shard in every owner.

    Attributes:
        fqn: fully qualified name, from the module that was sharded, later from the root.
        owners: every place where the parameter is registered; more than one if it is tied.
        layout: how it is cut.
        sharded: the ``DTensor`` parameter.
        full: the full parameter, ``None`` until it is first unsharded.
        held_grad: gradient of earlier backwards, not yet reduced, in the reduction dtype.
    """

    def __init__(
        self,
        param: nn.Parameter,
        fqn: str,
        owners: list[ParamOwner],
        mesh: DataMesh,
        placement: Shard | None,
        offload: Offload,
    ) -> None:
        self.fqn = fqn
        self.owners = owners
        self._mesh = mesh
        self._offload = offload
        self.layout = Layout(param.shape, self._shard_dim(param, placement), mesh.shard.world_size)
        self.full: nn.Parameter | None = None
        self.held_grad: torch.Tensor | None = None
        with torch.no_grad():
            shard = self._copy_of_shard(param)
            self.sharded = nn.Parameter(
                DTensor.from_local(
                    shard,
                    mesh.mesh,
                    mesh.placements(self.layout.dim),
                    run_check=False,
                    shape=param.shape,
                    stride=self.layout.strides,
                ),
                requires_grad=param.requires_grad,
            )
        self._spec = _torch.spec_of(self.sharded)
        self._register(self.sharded)

    # -- the sharded form ----------------------------------------------------------------------

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        return _torch.local_of(self.sharded)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the shard: the one that the optimizer updates."""
        return self.sharded.dtype

    def use_sharded(self) -> None:
        """Put the sharded form into the modules."""
        self._register(self.sharded)

    def refresh(self) -> bool:
        """Take over what the modules hold now, after ``to()``, ``to_empty()`` or a state dict.

        Returns:
            Whether dtype, device or object changed, so that the full form must be made anew.

        Raises:
            ValueError: what is registered now is no ``DTensor`` of the same global shape and
                placements.
        """
        first = self.owners[0]
        found = _torch.parameter_of(first.module, first.name)
        if found is not self.sharded:
            self._register(self.sharded)  # what was refused shall not stay
            self._check_replacement(found)
            self.sharded = found
            self._register(found)
        local = self._offload.place(self.local)
        if local is not self.local:
            with torch.no_grad():
                self.sharded.data = _torch.wrap_local(local, _torch.spec_of(self.sharded))
        changed = _torch.spec_of(self.sharded) is not self._spec
        self._spec = _torch.spec_of(self.sharded)
        return changed

    def materialise(self, whole: torch.Tensor) -> None:
        """Fill a shard that is on the meta device from ``whole`` (shape ``layout.shape``)."""
        with torch.no_grad():
            shard = self._copy_of_shard(whole)
            param = nn.Parameter(
                _torch.wrap_local(shard, self._spec), requires_grad=self.sharded.requires_grad
            )
        self.sharded = param
        self._register(param)

    # -- the full form -------------------------------------------------------------------------

    def make_full(self, memory: torch.Tensor) -> None:
        """Make the full parameter on ``memory`` (1-D, at least ``layout.numel`` elements)."""
        whole = torch.empty(0, dtype=memory.dtype, device=memory.device)
        storage = memory.untyped_storage()
        size = storage.size()
        # set_() shares the storage but not the version counter: see the module's docstring. It
        # wants the memory to be there, untouched.
        offset = int(memory.storage_offset())
        storage.resize_(max(size, (offset + memory.numel()) * memory.itemsize))
        whole.set_(storage, offset, self.layout.shape, self.layout.strides)
        if size == 0:
            storage.resize_(0)
        self.full = nn.Parameter(whole, requires_grad=self.sharded.requires_grad)

    def use_full(self) -> None:
        """Put the full form into the modules. Its memory must be filled by now."""
        full = self.full
        assert full is not None
        if full.requires_grad != self.sharded.requires_grad:
            full.requires_grad_(self.sharded.requires_grad)
        self._register(full)

    # -- gradients -----------------------------------------------------------------------------

    def hold_grad(self, dtype: torch.dtype | None) -> None:
        """Keep this backward's gradient for a later reduction, in ``dtype`` if given.

        Adding up happens in the reduction dtype, so that accumulation does not round.
        """
        full = self.full
        if full is None or full.grad is None:
            return
        if self.held_grad is not None:
            self.held_grad += full.grad
            full.grad = None
        elif dtype is not None and full.grad.dtype != dtype:
            self.held_grad, full.grad = full.grad.to(dtype), None

    def take_grad(self) -> torch.Tensor | None:
        """This rank's unreduced gradient of the full parameter; the caller owns it from now on."""
        full = self.full
        if full is None:
            return None
        if self.held_grad is not None:
            self.hold_grad(None)
            held, self.held_grad = self.held_grad, None
            return held
        grad, full.grad = full.grad, None
        return grad

    def add_sharded_grad(self, shard: torch.Tensor) -> None:
        """Add a reduced gradient (1-D, at least this rank's elements) to ``sharded.grad``."""
        rank = self._mesh.shard.rank
        shape = self.layout.shard_shape(rank)
        local = shard[: shape.numel()].view(shape)
        grad = self.sharded.grad
        if grad is None:
            local = self._offload.grad_to_host(local, self.sharded)
            self.sharded.grad = _torch.wrap_local(local, self._spec)
        else:
            into = _torch.local_of(grad)
            into += local.to(into.device)
        _torch.run_post_accumulate_hooks(self.sharded)

    # -- inside --------------------------------------------------------------------------------

    def _copy_of_shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows in memory of their own, so that the whole can be freed."""
        rows = self.layout.cut(whole.detach(), self._mesh.shard.rank)
        shard = torch.empty_like(rows, memory_format=torch.contiguous_format).copy_(rows)
        return self._offload.place(shard)

    def _shard_dim(self, param: nn.Parameter, placement: Shard | None) -> int | None:
        if param.ndim == 0:
            return None
        dim = 0 if placement is None else placement.dim
        return dim + param.ndim if dim < 0 else dim

    def _register(self, parameter: nn.Parameter) -> None:
        for owner in self.owners:
            _torch.register_parameter(owner.module, owner.name, parameter)

    def _check_replacement(self, found: nn.Parameter) -> None:
        if not isinstance(found, DTensor):
            raise ValueError(
                f"{self.fqn} on rank {dist.get_rank()}: the sharded parameter was replaced by a "
                f"{type(found).__name__} of shape {tuple(found.shape)}; expected a DTensor with "
                f"placements {self._spec.placements}. Load with set_model_state_dict, or make the "
                "value a DTensor with distribute_tensor"
            )
        if found.shape != self.layout.shape or found.placements != self._spec.placements:
            raise ValueError(
                f"{self.fqn} on rank {dist.get_rank()}: the sharded parameter was replaced by one "
                f"of shape {tuple(found.shape)} and placements {found.placements}; expected "
                f"{tuple(self.layout.shape)} and {self._spec.placements}"
            )

    def __repr__(self) -> str:
        return f"ShardedParam({self.fqn}, {tuple(self.layout.shape)}, dim={self.layout.dim})"
