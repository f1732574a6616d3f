"""What shards are gathered into: the memory of the full parameters of a group.

Each parameter is gathered in one of five ways, chosen once:

=========  =======================================  ============================================
way        when                                     cost of an unshard
=========  =======================================  ============================================
aliased    there is one rank, and its shard is in   none: full parameter and shard share memory
           the compute dtype
copied     the shard is the full parameter, but     one copy
           there are several ranks (a scalar), or
           another dtype or device
direct     cut along dimension 0                    the gather: the gathered buffer *is* the
                                                    parameter, without a copy
staged     cut along another dimension              the gather, then one copy that interleaves
                                                    the columns of the ranks
extended   the shard is a tensor subclass with      the gather of what the subclass sends, and
           ``fsdp_pre_all_gather``                  what it does with the result
=========  =======================================  ============================================

Under ``reshard_after_forward=k`` the full parameters are not freed after forward, but cut over
every k consecutive ranks (say those of one host). Backward gathers among those only:

    sharded over 4       rank 0: a   rank 1: b   rank 2: c   rank 3: d
    full                 abcd        abcd        abcd        abcd
    post-forward over 2  ab          cd          ab          cd
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import observe
from shardwise._torch import autograd, dtensor
from shardwise.observe import Activity, Memory
from shardwise.sharding.extension import Extension, has_extension, is_extended
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.policy import Precision
from shardwise.transport.base import FullBuffers, Label, Transport, Work
from shardwise.transport.memory import HeapBuffers


class FullParams:
    """The full parameters of one group, their memory, and the all-gather that fills it.

    The constructor makes the full form of every parameter, without memory.

    Args:
        params: the parameters.
        mesh: the ranks that they are sharded over.
        precision: the dtypes to compute in.
        post_forward: the shards between forward and backward, which are gathered over fewer ranks.

    Attributes:
        is_allocated: whether a gather has given the full parameters memory, or is about to.
        moves: whether a gather does anything at all: not if all parameters are aliased.
        storages: the storages whose memory :meth:`free` frees.
    """

    def __init__(
        self,
        params: Sequence[GroupParam],
        mesh: DataMesh,
        precision: Precision,
        post_forward: PostForwardShards | None = None,
    ) -> None:
        self._transport = mesh.shard
        self._post_forward = post_forward
        self._works: list[Work] = []
        self._name = ""  # of the group
        self.is_allocated = False
        self._source: PostForwardShards | None = None
        self._direct: list[GroupParam] = []
        self._staged: list[GroupParam] = []
        self._copied: list[GroupParam] = []
        self._aliased: list[GroupParam] = []
        self._extended: list[Extension] = []
        for param in params:
            alone = mesh.shard.world_size == 1
            same = precision.compute_dtype(param.dtype) == param.dtype
            if is_extended(param):
                self._extended.append(Extension(param, mesh, precision))
            elif alone and same and param.local.device == mesh.device:
                param.make_full(param.local.detach().view(-1))
                self._aliased.append(param)
            elif alone or param.layout.dim is None:
                self._copied.append(param)
            elif param.layout.is_rank_major:
                self._direct.append(param)
            else:
                self._staged.append(param)
        # The transport owns the buffers that it gathers into. The rest is plain memory.
        self._gathered = self._gather_buffers(self._direct, mesh, precision)
        self._staging = self._gather_buffers(self._staged, mesh, precision)
        owned = self._staged + self._copied
        self._owned = HeapBuffers(
            [param.layout.numel for param in owned],
            [precision.compute_dtype(param.dtype) for param in owned],
            mesh.device,
        )
        for param, buffer in zip(self._direct, self._gathered.tensors, strict=True):
            param.make_full(buffer)
        for param, buffer in zip(owned, self._owned.tensors, strict=True):
            param.make_full(buffer)
        self._buffers = [
            buffers for buffers in (self._owned, self._gathered, self._staging) if buffers.tensors
        ]
        self._reported = dict.fromkeys(self._buffers, 0)  # how much memory of each
        self._freed = self._direct + owned
        self.moves = bool(self._freed or self._extended)
        self.storages = frozenset(
            storage
            for tensor in (*self._gathered.tensors, *self._owned.tensors)
            if tensor.numel() and (storage := dtensor.storage_of(tensor)) is not None
        )

    @property
    def is_outdated(self) -> bool:
        """Whether an aliased full parameter no longer shares memory with its shard."""
        for param in self._aliased:
            if dtensor.local_of(param.form.parameter).data_ptr() != param.memory_address:
                return True
        return False

    def follow_shards(self) -> None:
        """Let autograd see what was written to shards that full parameters are aliased to."""
        for param in self._aliased:
            param.follow_shard()

    def start(self, label: Label, source: PostForwardShards | None = None) -> None:
        """Allocate memory, and start the all-gather. Shards must not change until :meth:`finish`.

        Not called, as :meth:`finish` is not, if nothing moves.

        Args:
            label: the label of the group.
            source: the post-forward shards to gather instead of the shards, if there are any.
        """
        self.is_allocated = True
        with autograd.no_grad():
            self._start(label, source)

    def _start(self, label: Label, source: PostForwardShards | None) -> None:
        self._source = source
        self._name = label.name
        for each in self._buffers:
            each.allocate()
            self._report(each)
        for param in self._copied:  # now, since later writes belong to the next gather
            param.full_data.copy_(param.local, non_blocking=True)
        gathered = self._direct + self._staged
        buffers = [*self._gathered.tensors, *self._staging.tensors]
        if source is None:
            shards = [param.local.view(-1) for param in gathered]
            for extension in self._extended:
                shards += extension.inputs()
                buffers += extension.outputs(label.name)
            transport = self._transport
        else:
            shards = [source.shard_of(param) for param in gathered]
            buffers = [
                buffer[: source.layout_of(param).padded_numel]
                for param, buffer in zip(gathered, buffers, strict=True)
            ]
            transport = source.transport
        if shards:
            self._works.append(transport.all_gather(shards, buffers, label))

    def finish(self) -> None:
        """Wait for the all-gather. Afterwards every full parameter holds its values.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        with autograd.no_grad():
            self._finish()

    def _finish(self) -> None:
        while self._works:
            self._works.pop().wait()
        if self._staged:
            with observe.during(Activity.COPY, self._name):
                self._interleave()
        for extension in self._extended:
            extension.finish()
        for param in self._freed:
            param.unseal()

    def _interleave(self) -> None:
        """Copy what was gathered of the staged parameters to where it belongs."""
        for param, chunks in zip(self._staged, self._staging.tensors, strict=True):
            layout = param.layout if self._source is None else self._source.layout_of(param)
            layout.from_chunks(chunks[: layout.padded_numel], param.full_data)
        self._staging.free()
        self._report(self._staging)

    def _report(self, buffers: FullBuffers) -> None:
        """Report the memory that ``buffers`` have now."""
        before, nbytes = self._reported[buffers], buffers.nbytes
        if nbytes != before:
            self._reported[buffers] = nbytes
            observe.memory(Memory.FULL_PARAMETERS, self._name, nbytes - before)

    def abandon(self) -> None:
        """Give up a gather that will not complete."""
        self._works.clear()
        self._gathered.abandon()
        self._staging.abandon()

    def free(self) -> None:
        """Free the memory that is not aliased. Autograd refuses it until the next gather."""
        if self._end_use():
            for each in self._buffers:
                each.free()
                self._report(each)
            for extension in self._extended:
                extension.free()

    def retain(self) -> None:
        """End the use of the memory as :meth:`free` does, but keep its addresses."""
        if self._end_use():
            for each in self._buffers:
                each.retain()

    def _end_use(self) -> bool:
        if self.moves and not self.is_allocated:
            return False
        self.is_allocated = False
        for param in self._freed:
            param.seal()
        for param in self._aliased:
            param.take_back_data()
        return True

    def _gather_buffers(
        self, params: Sequence[GroupParam], mesh: DataMesh, precision: Precision
    ) -> FullBuffers:
        make = self._transport.full_buffers if self._post_forward is None else HeapBuffers
        return make(
            [param.layout.padded_numel for param in params],
            [precision.compute_dtype(param.dtype) for param in params],
            mesh.device,
        )


def check_home(params: Sequence[GroupParam], home: torch.device) -> None:
    """Check that all shards are on the device ``home``.

    Raises:
        RuntimeError: a shard is on the meta device or on another one.
    """
    on_meta = [param.fqn for param in params if param.local.is_meta]
    if on_meta:
        raise RuntimeError(
            f"rank {dist.get_rank()}: parameters {', '.join(on_meta)} are on the meta device; "
            "materialize them first, with shardwise.materialize(model), or with "
            "model.to_empty(device=...) followed by an initialization"
        )
    elsewhere = [param for param in params if param.local.device != home]
    if elsewhere:
        found = ", ".join(f"{param.fqn} on {param.local.device}" for param in elsewhere)
        raise RuntimeError(
            f"rank {dist.get_rank()}: expected shards on {home}, found {found}; move the model "
            "there, or shard it on a mesh of the device it is on"
        )


def check_can_shard_post_forward(param: nn.Parameter, fqn: str) -> None:
    """Check that an integer ``reshard_after_forward`` is possible for a parameter.

    Raises:
        NotImplementedError: it is a ``DTensor`` made by tensor parallelism, or a tensor subclass
            with an all-gather of its own.
    """
    if isinstance(param, DTensor):
        found = f"a DTensor with placements {param.placements}"
    elif has_extension(param):
        found = f"a {type(param).__name__} with fsdp_pre_all_gather"
    else:
        return
    raise NotImplementedError(
        f"{fqn} on rank {dist.get_rank()}: an integer reshard_after_forward is not available for "
        f"DTensor parameters and for tensor subclasses with fsdp_pre_all_gather, found {found}; "
        "pass True or False"
    )


class PostForwardShards:
    """The shards of one group between forward and backward, over fewer ranks.

    Args:
        params: the parameters of the group.
        mesh: the mesh ``(replicate, shard)`` made by :meth:`DataMesh.of_groups_of`.

    Attributes:
        mesh: the same mesh.
    """

    def __init__(self, params: Sequence[GroupParam], mesh: DataMesh) -> None:
        self.mesh = mesh
        self._layouts: dict[GroupParam, Layout] = {}
        self._shards: dict[GroupParam, torch.Tensor] = {}
        self._registered: dict[GroupParam, tuple[nn.Parameter, int]] = {}
        self._uncut = [param for param in params if param.layout.dim is None]
        for param in params:
            if param.layout.dim is not None:
                self._layouts[param] = Layout(
                    param.layout.shape, param.layout.dim, mesh.shard.world_size
                )

    @property
    def transport(self) -> Transport:
        """The transport that gathers them."""
        return self.mesh.shard

    def keep(self, label: Label) -> None:
        """Copy the shards out of the full parameters, and put them into the modules.

        Args:
            label: the label of the group.
        """
        for param in self._uncut:
            param.use_sharded()  # every rank has all of it
        with autograd.no_grad():
            for param, layout in self._layouts.items():
                rows = layout.cut(param.full_data, self.mesh.shard.rank)
                shard = rows.clone(memory_format=torch.contiguous_format)
                observe.memory_of(Memory.FULL_PARAMETERS, label.name, shard)
                spec = dtensor.make_spec(
                    self.mesh.mesh,
                    self.mesh.placements(layout.dim),
                    layout.shape,
                    layout.strides,
                    shard.dtype,
                )
                assert param.full is not None
                param.follow_requires_grad(param.full)
                kept = dtensor.make_parameter(
                    shard, spec, requires_grad=param.sharded.requires_grad
                )
                param.register(kept)
                self._registered[param] = kept, autograd.version_with_local(kept)
                self._shards[param] = shard.view(-1)

    def release(self) -> None:
        """Free the shards."""
        for param, (kept, _) in self._registered.items():
            param.follow_requires_grad(kept)
        self._registered.clear()
        self._shards.clear()

    @property
    def written(self) -> list[GroupParam]:
        """The parameters whose post-forward shards were written to: those writes would be lost."""
        return [
            p
            for p, (kept, before) in self._registered.items()
            if autograd.version_with_local(kept) != before
        ]

    def shard_of(self, param: GroupParam) -> torch.Tensor:
        """The post-forward shard of ``param``, 1-D."""
        return self._shards[param]

    def layout_of(self, param: GroupParam) -> Layout:
        """How ``param`` is cut over the smaller mesh."""
        return self._layouts[param]
