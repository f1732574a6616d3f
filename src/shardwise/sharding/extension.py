"""Tensor subclasses that decide themselves what travels: ``fsdp_pre_all_gather`` and its pair.

A shard that is such a subclass (a float8 weight, say) is asked before every gather what to send,
and after it what to make of what arrived. The protocol is torch's, see
``torch.distributed.fsdp.fully_shard``:

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy])
        -> (tensors to gather along their first dimension, metadata)
    fsdp_post_all_gather(gathered, metadata, param_dtype, *, out=None)
        -> (full tensor, tensors whose memory it is made of); None where ``out`` is given
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import MisuseError
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.policy import Precision

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(param: GroupParam) -> bool:
    """Whether the shard is a tensor subclass with an all-gather of its own."""
    return has_extension(param.local)


def has_extension(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of a subclass with an all-gather of its own."""
    return hasattr(tensor, _PRE)


def check_extension(fqn: str, tensor: torch.Tensor) -> None:
    """Look whether what is to be sharded has an all-gather of its own, or none.

    Raises:
        MisuseError: it has only one of the two methods.
    """
    if hasattr(tensor, _PRE) != hasattr(tensor, _POST):
        raise MisuseError(
            f"{fqn}: {type(tensor).__name__} has only one of {_PRE} and {_POST}; define both"
        )


class Extension:
    """The gathers of one such parameter."""

    def __init__(self, param: GroupParam, mesh: DataMesh, precision: Precision) -> None:
        self._param = param
        self._mesh = mesh
        self._policy = precision.policy
        self._dtype = precision.compute_dtype(param.dtype)
        self._sent: list[torch.Tensor] = []
        self._gathered: list[torch.Tensor] = []
        self._inner: list[torch.Tensor] = []
        self._metadata: Any = None
        self._is_made = False

    def inputs(self) -> list[torch.Tensor]:
        """What this rank sends, 1-D each."""
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
        return [tensor.reshape(-1) for tensor in self._sent]

    def outputs(self) -> list[torch.Tensor]:
        """Memory for what arrives, 1-D each."""
        world_size = self._mesh.shard.world_size
        if not self._gathered:
            self._gathered = [
                torch.empty(world_size * sent.numel(), dtype=sent.dtype, device=sent.device)
                for sent in self._sent
            ]
        for tensor in self._gathered:
            _allocate(tensor)
        # Under another version counter: what the subclass makes of them may be saved by autograd,
        # to which a gather is not a modification.
        return [tensor.data for tensor in self._gathered]

    def finish(self) -> None:
        """Have the subclass make the full parameter of what has arrived."""
        local: Any = self._param.local
        gathered = tuple(
            tensor.view(-1, *sent.shape[1:])
            for tensor, sent in zip(self._gathered, self._sent, strict=True)
        )
        self._sent = []
        metadata, self._metadata = self._metadata, None
        if not self._is_made:
            whole, inner = local.fsdp_post_all_gather(gathered, metadata, self._dtype)
            self._inner = list(inner)
            layout = self._param.layout
            self._param.adopt_full(torch.as_strided(whole, layout.shape, layout.strides, 0))
            self._is_made = True
        else:
            for tensor in self._inner:
                _allocate(tensor)
            local.fsdp_post_all_gather(gathered, metadata, self._dtype, out=self._param.full)

    def free(self) -> None:
        """Give back the memory of the full parameter."""
        for tensor in (*self._gathered, *self._inner):
            tensor.untyped_storage().resize_(0)

    def _check_sizes(self, sent: tuple[torch.Tensor, ...]) -> None:
        layout = self._param.layout
        if layout.dim is None or layout.shape[layout.dim] % layout.world_size == 0:
            return
        padded = list(layout.shape)
        padded[layout.dim] = layout.chunk_rows
        wrong = [tuple(tensor.shape) for tensor in sent if list(tensor.shape) != padded]
        if wrong:
            raise MisuseError(
                f"{self._param.fqn} of shape {tuple(layout.shape)} is cut unevenly over "
                f"{layout.world_size} ranks (this is rank {dist.get_rank()}): expected {_PRE} to "
                f"return tensors padded to {tuple(padded)}, found {wrong}"
            )


def _allocate(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    nbytes = tensor.numel() * tensor.itemsize
    if storage.size() != nbytes:
        storage.resize_(nbytes)
