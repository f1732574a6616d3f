"""What stays of full parameters between forward and backward, on fewer ranks than they have.

``reshard_after_forward=k`` cuts the full parameters anew, over every k ranks that follow each other
(say those of one host), so that backward gathers among those only:

    sharded over 4      rank 0: a   rank 1: b   rank 2: c   rank 3: d
    full                abcd        abcd        abcd        abcd
    kept over 2         ab          cd          ab          cd
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import autograd, dtensor
from shardwise.sharding.extension import has_extension
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.unrecorded import unrecorded
from shardwise.transport.base import Transport


def check_can_keep(param: nn.Parameter, fqn: str) -> None:
    """Check that a parameter that is to be sharded can be kept on fewer ranks.

    Raises:
        NotImplementedError: it is a ``DTensor`` of tensor parallelism, or a tensor subclass with an
            all-gather of its own.
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


class KeptShards:
    """The shards of one group over the smaller mesh.

    Args:
        params: the parameters of the group.
        mesh: ``(replicate, shard)``, as :meth:`DataMesh.of_groups_of` makes it.

    Attributes:
        mesh: the smaller mesh.
    """

    def __init__(self, params: Sequence[ShardedParam], mesh: DataMesh) -> None:
        self.mesh = mesh
        self._layouts: dict[ShardedParam, Layout] = {}
        self._shards: dict[ShardedParam, torch.Tensor] = {}
        self._registered: dict[ShardedParam, tuple[nn.Parameter, int]] = {}
        self._uncut = [param for param in params if param.layout.dim is None]
        for param in params:
            if param.layout.dim is not None:
                self._layouts[param] = Layout(
                    param.layout.shape, param.layout.dim, mesh.shard.world_size
                )

    @property
    def transport(self) -> Transport:
        """What gathers them."""
        return self.mesh.shard

    def keep(self) -> None:
        """Copy this rank's shards out of the full parameters, and put them into the modules."""
        for param in self._uncut:
            param.use_sharded()  # every rank has the whole of it
        with unrecorded():
            for param, layout in self._layouts.items():
                rows = layout.cut(param.full_data, self.mesh.shard.rank)
                shard = rows.clone(memory_format=torch.contiguous_format)
                spec = dtensor.make_spec(
                    self.mesh.mesh,
                    self.mesh.placements(layout.dim),
                    layout.shape,
                    layout.strides,
                    shard.dtype,
                )
                assert param.full is not None
                param.follow_requires_grad(param.full)
                kept = nn.Parameter(
                    dtensor.wrap_local(shard, spec), requires_grad=param.sharded.requires_grad
                )
                param.register(kept)
                self._registered[param] = kept, autograd.version_with_local(kept)
                self._shards[param] = shard.view(-1)

    def release(self) -> None:
        """Let the shards go."""
        for param, (kept, _) in self._registered.items():
            param.follow_requires_grad(kept)
        self._registered.clear()
        self._shards.clear()

    @property
    def written(self) -> list[ShardedParam]:
        """The parameters whose kept shards were written to, which nothing else would learn of."""
        return [
            p
            for p, (kept, before) in self._registered.items()
            if autograd.version_with_local(kept) != before
        ]

    def shard_of(self, param: ShardedParam) -> torch.Tensor:
        """The shard that is kept of ``param``, 1-D."""
        return self._shards[param]

    def layout_of(self, param: ShardedParam) -> Layout:
        """How ``param`` is cut over the smaller mesh."""
        return self._layouts[param]
