"""Tensor subclasses with an all-gather of their own: ``fsdp_pre_all_gather`` and its counterpart.

Such a shard (a float8 weight, say) decides before every gather what to send, and afterwards what to
make of the result. The protocol is torch's; see ``torch.distributed.fsdp.fully_shard``:

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy])
        -> (tensors to gather along their first dimension, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype, *, out=None)
        -> (full tensor, tensors whose memory it uses); None if ``out`` is given
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch import autograd
from shardwise.base import observe
from shardwise.base.errors import MisuseError
from shardwise.base.observe import Memory
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.param import Version

observe.ALLOCATES[__file__] = Memory.FULL_PARAMETERS

_PRE = "fsdp_pre_all_gather"


class Extension:
    """The all-gather of one such parameter."""

    def __init__(self, param: GroupParam, mesh: DataMesh) -> None:
        self._param = param
        self._mesh = mesh
        self._policy = param.precision.policy
        self._dtype = param.compute_dtype
        self._sent: list[torch.Tensor] = []
        self._gathered: list[torch.Tensor] = []
        self._inner: list[torch.Tensor] = []
        self._metadata: Any = None
        self._made_of: Version | None = None  # the shard, as it was when last gathered
        self._group = ""  # its name, for reports
        self._reported = 0  # bytes

    def gathered(self, name: str, _: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that this rank sends, and those to gather into, each 1-D.

        Args:
            name: of the group, for reports.
        """
        self._group = name
        local: Any = self._param.local
        if local.device != self._mesh.device:
            local = local.to(self._mesh.device)
        pre = getattr(local, _PRE)
        count = len(inspect.signature(pre).parameters)
        if count not in (1, 5):
            raise MisuseError(
                f"{self._param.fqn}: expected {_PRE}(mesh) or {_PRE}(mesh, outer_size, "
                f"outer_stride, module, mp_policy), found {inspect.signature(pre)}"
            )
        layout = self._param.layout
        more = (layout.shape, layout.strides, self._param.owners[0].module, self._policy)
        sent, self._metadata = pre(self._mesh.shard_mesh, *(more if count == 5 else ()))
        self._check_sizes(sent)
        self._sent = list(sent)
        world_size = self._mesh.shard.world_size
        if not self._gathered:
            self._gathered = [
                torch.empty(world_size * sent.numel(), dtype=sent.dtype, device=sent.device)
                for sent in self._sent
            ]
        for tensor in self._gathered:
            _allocate(tensor)
        self._report()
        # With another version counter: autograd may have saved what the subclass made of them, and
        # a gather must not look like a modification.
        into = [tensor.data for tensor in self._gathered]
        return [tensor.reshape(-1) for tensor in self._sent], into

    def finish(self) -> None:
        """Let the subclass make the full parameter from the gathered tensors."""
        local: Any = self._param.local
        gathered = tuple(
            tensor.view(-1, *sent.shape[1:])
            for tensor, sent in zip(self._gathered, self._sent, strict=True)
        )
        self._sent = []
        metadata, self._metadata = self._metadata, None
        version, full = self._param.form.version, self._param.full
        if full is None or self._made_of is None:
            made, inner = local.fsdp_post_all_gather(gathered, metadata, self._dtype)
            self._inner = list(inner)
            layout = self._param.layout
            self._param.adopt_full(torch.as_strided(made, layout.shape, layout.strides, 0))
        else:
            for tensor in self._inner:
                _allocate(tensor)
            versions = autograd.versions_of([full])
            local.fsdp_post_all_gather(gathered, metadata, self._dtype, out=full)
            if version == self._made_of:  # what autograd has saved gets the same values again
                autograd.set_versions([full], versions)
        self._made_of = version
        self._report()

    def free(self) -> None:
        """Free the memory of the full parameter."""
        for tensor in (*self._gathered, *self._inner):
            tensor.untyped_storage().resize_(0)
        self._report()

    def _report(self) -> None:
        storages = (tensor.untyped_storage() for tensor in (*self._gathered, *self._inner))
        held = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        observe.memory(Memory.FULL_PARAMETERS, self._group, held - self._reported)
        self._reported = held

    def _check_sizes(self, sent: tuple[torch.Tensor, ...]) -> None:
        layout = self._param.layout
        if layout.dim is None or layout.shape[layout.dim] % layout.world_size == 0:
            return
        rows = layout.chunk_rows
        wrong = [
            tuple(each.shape) for each in sent if each.shape[layout.dim : layout.dim + 1] != (rows,)
        ]
        if wrong:
            raise MisuseError(
                f"{self._param.fqn} of shape {tuple(layout.shape)} is cut unevenly over "
                f"{layout.world_size} ranks (this is rank {dist.get_rank()}): expected {_PRE} to "
                f"return tensors padded to {rows} in dimension {layout.dim}, found {wrong}"
            )


def _allocate(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    nbytes = tensor.numel() * tensor.itemsize
    if storage.size() != nbytes:
        storage.resize_(nbytes)
