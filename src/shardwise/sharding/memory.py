"""What full parameters of a group are made of: memory, and the way that shards reach it.

Each parameter goes one of four ways, decided once:

=========  =======================================  ============================================
way        when                                     cost of an unshard
=========  =======================================  ============================================
aliased    the shard is the whole, in the compute   none: full and shard share memory
           dtype (one rank; scalars)
copied     the shard is the whole, in another       one conversion
           dtype or on another device
direct     cut along dimension 0                    the gather: the gathered buffer *is* the
                                                    parameter, no copy in, none out
staged     cut along another dimension              the gather, then one copy that interleaves
                                                    the ranks' columns
=========  =======================================  ============================================
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.precision import Precision
from shardwise.transport.base import FullBuffers, Work
from shardwise.transport.memory import HeapBuffers


class GroupMemory:
    """The memory of the full parameters of one group, and the gather that fills it.

    Constructing one gives every parameter its full form, without memory yet.
    """

    def __init__(
        self, params: Sequence[ShardedParam], mesh: DataMesh, precision: Precision
    ) -> None:
        self._transport = mesh.shard
        self._work: Work | None = None
        self._direct: list[ShardedParam] = []
        self._staged: list[ShardedParam] = []
        self._copied: list[ShardedParam] = []
        for param in params:
            whole_here = param.layout.dim is None or mesh.shard.world_size == 1
            same = precision.compute_dtype(param.dtype) == param.dtype
            if whole_here and same and param.local.device == mesh.device:
                param.make_full(param.local.detach().view(-1))
            elif whole_here:
                self._copied.append(param)
            elif param.layout.is_rank_major:
                self._direct.append(param)
            else:
                self._staged.append(param)
        # The transport owns what it gathers into; the rest is plain memory.
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

    def start(self) -> None:
        """Allocate, and start to gather. Shards must not change until :meth:`finish`."""
        self._owned.allocate()
        gathered = self._direct + self._staged
        if gathered:
            self._gathered.allocate()
            self._staging.allocate()
            self._work = self._transport.all_gather(
                [param.local.view(-1) for param in gathered],
                [*self._gathered.tensors, *self._staging.tensors],
            )

    def finish(self) -> None:
        """Wait for the gather; afterwards every full parameter holds its values.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        for param, chunks in zip(self._staged, self._staging.tensors, strict=True):
            assert param.full is not None
            param.layout.from_chunks(chunks, param.full.data)
        self._staging.free()
        for param in self._copied:
            assert param.full is not None
            param.full.data.copy_(param.local, non_blocking=True)

    def free(self) -> None:
        """Give back what is not shared with the shards."""
        self._gathered.free()
        self._owned.free()

    def _gather_buffers(
        self, params: Sequence[ShardedParam], mesh: DataMesh, precision: Precision
    ) -> FullBuffers:
        return self._transport.full_buffers(
            [param.layout.padded_numel for param in params],
            [precision.compute_dtype(param.dtype) for param in params],
            mesh.device,
        )
