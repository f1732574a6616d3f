"""Collectives whose buffers all lie in symmetric memory, which every rank maps.

NCCL has faster all-gathers for such memory: by copy engines within a host, or by kernels that read
peers directly. The full parameters of a group are slices of one allocation, and are gathered there
in place. What lies elsewhere is staged: small parameters, those gathered over fewer ranks or by a
tensor subclass, and the gradients of a reduce-scatter. Staging costs a copy in and a copy out.

Ranks have to allocate alike, since a piece of memory is mapped by all of them at once, the first
time that a collective uses it. They do: memory is allocated and freed with the collectives, whose
order is the same on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise._torch import dtensor, symmetric
from shardwise.devices import NCCL
from shardwise.transport.base import (
    NO_LABEL,
    FullBuffers,
    Label,
    PendingWork,
    Reduce,
    Transport,
    Work,
)
from shardwise.transport.buckets import as_rows, assign_buckets, copy_chunks, fill
from shardwise.transport.memory import reported
from shardwise.transport.peers import Peers

#: Chunks of fewer bytes are packed: a copy costs less than one more collective.
SMALL_BYTES = 16 * 1024

_ALIGNMENT = 256


class Memory(Protocol):
    """Memory for the buffers of collectives."""

    def allocating(self) -> AbstractContextManager[object]:
        """Allocate from this memory inside the block."""

    def register(self, tensor: torch.Tensor) -> None:
        """Prepare a whole allocation for a collective. Every rank calls this."""


class SymmetricMemory:
    """Torch's symmetric memory for one process group.

    Args:
        group: the process group.
        device: the device of the memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        Peers(group).once(_connect)

    def allocating(self) -> AbstractContextManager[object]:
        """Allocate from the pool of symmetric memory inside the block."""
        return symmetric.allocating_symmetric(self._device)

    def register(self, tensor: torch.Tensor) -> None:
        """Map the memory of ``tensor`` on all ranks."""
        symmetric.rendezvous(tensor, self._group)


def _connect(peers: Peers) -> None:
    """Make the communicator, which exists from the first collective on. Mapping memory needs it."""
    with peers.collective("the first barrier before symmetric memory"):
        dist.barrier(peers.group)


def check_available(group: dist.ProcessGroup, device: torch.device) -> None:
    """Choose NCCL to allocate symmetric memory, if the tensors of ``group`` can lie in it.

    Raises:
        RuntimeError: the process group, the device or this torch does not have symmetric memory.
    """
    where = f"symmetric memory on rank {dist.get_rank()}"
    carrier = Peers(group).backend(device)
    if carrier.symmetric is None:
        raise RuntimeError(
            f"{where}: expected a process group whose backend is {NCCL.name!r}, found "
            f"{carrier.name!r} for tensors on {device}. Shard over a mesh of GPUs, or do not ask "
            "for symmetric memory"
        )
    if not symmetric.has_pools(device):
        raise RuntimeError(
            f"{where}: expected a device with memory pools, found {device} in torch "
            f"{torch.__version__}; do not ask for symmetric memory on it"
        )
    try:
        symmetric.set_backend(carrier.symmetric)
    except RuntimeError as error:
        raise RuntimeError(
            f"{where}: torch {torch.__version__} cannot allocate it with {carrier.symmetric}: "
            f"{error}. Ask for it before anything else allocates symmetric memory, in a torch that "
            "was built with it"
        ) from error


class SymmetricBuffers:
    """Full buffers that are slices of one allocation of symmetric memory.

    See :class:`~shardwise.transport.base.FullBuffers` for the contract. The storage lives as long
    as the group, and is resized as in :class:`~shardwise.transport.memory.HeapBuffers`.

    Args:
        memory: where to allocate.
        numels: the number of elements of each tensor.
        dtypes: the dtype of each tensor.
        device: the device of all tensors.
    """

    def __init__(
        self,
        memory: Memory,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> None:
        self._memory = memory
        ends: list[int] = []
        starts: list[int] = []
        end = 0
        for numel, dtype in zip(numels, dtypes, strict=True):
            starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = starts[-1] + numel * dtype.itemsize
            ends.append(end)
        self.nbytes = 0
        self._nbytes = end
        # Views can only be made while there is memory.
        self.whole = torch.empty(end, dtype=torch.uint8, device=device)
        self.tensors = [
            self.whole[first:last].view(dtype)
            for first, last, dtype in zip(starts, ends, dtypes, strict=True)
        ]
        self.whole.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Give every tensor its memory, with undefined contents, if it has none."""
        storage = self.whole.untyped_storage()
        if storage.size() != self._nbytes:
            with self._memory.allocating():
                storage.resize_(self._nbytes)
        self.nbytes = self._nbytes

    def free(self) -> None:
        """Release the memory of every tensor."""
        self.whole.untyped_storage().resize_(0)
        self.nbytes = 0

    def retain(self) -> None:
        """Keep the memory: its address would change if it were freed."""

    def abandon(self) -> None:
        """Keep the memory: a collective that is under way may still write to it."""


class SymmetricTransport:
    """Another transport, all of whose gathers and sums use symmetric memory.

    An average is not done there, since NCCL can only add in symmetric memory
    (``set_force_sum_reduction_for_comms`` makes sums of averages), nor is an all-reduce.

    Args:
        inner: sends every tensor from where it lies, and packs none.
        memory: where to allocate.
    """

    name = "symmetric"

    def __init__(self, inner: Transport, memory: Memory) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self._inner = inner
        self._memory = memory
        self._buffers = weakref.WeakValueDictionary[int, SymmetricBuffers]()

    def overlaps_compute(self) -> bool:
        """Decide as the inner transport does."""
        return self._inner.overlaps_compute()

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FullBuffers:
        """Reserve symmetric memory to gather into. It is not yet allocated."""
        made = SymmetricBuffers(self._memory, numels, dtypes, device)
        storage = dtensor.storage_of(made.whole)
        assert storage is not None
        self._buffers[storage] = made
        return made

    def all_gather(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], label: Label = NO_LABEL
    ) -> Work:
        """Gather large fulls of :meth:`full_buffers` in place, and stage all others."""
        rows = [as_rows(full, self.world_size) for full in fulls]
        chunks = [row.shape[1] for row in rows]
        buckets = assign_buckets(
            [chunk * full.itemsize for chunk, full in zip(chunks, fulls, strict=True)],
            [full.dtype for full in fulls],
            SMALL_BYTES,
        )
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        used: dict[int, torch.Tensor] = {}
        staged: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for bucket in buckets:
            full = fulls[bucket.indices[0]]
            storage = dtensor.storage_of(full)
            home = None if storage is None else self._buffers.get(storage)
            if home is not None and storage is not None and not bucket.packed:
                sources.append(shards[bucket.indices[0]])
                targets.append(full)
                used[storage] = home.whole
                continue
            sizes = [chunks[i] for i in bucket.indices]
            flat = self._stage(self.world_size * sum(sizes), full)
            columns = as_rows(flat, self.world_size)
            for i, part in zip(bucket.indices, torch.split(columns[self.rank], sizes), strict=True):
                fill(part, shards[i])
            sources.append(columns[self.rank])
            targets.append(flat)
            staged.append(([rows[i] for i in bucket.indices], columns))
        for whole in used.values():
            self._memory.register(whole)
        work = self._inner.all_gather(sources, targets, label)

        def finish() -> None:
            work.wait()
            for into, columns in staged:
                parts = torch.split(columns, [row.shape[1] for row in into], dim=1)
                for row, column in zip(into, parts, strict=True):
                    row.copy_(column)

        return PendingWork(finish)

    def reduce_scatter(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        op: Reduce,
        label: Label = NO_LABEL,
    ) -> Work:
        """Add in symmetric memory, with one copy in and one out; average elsewhere."""
        if op is not Reduce.SUM:
            return self._inner.reduce_scatter(fulls, shards, op, label)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, shard in enumerate(shards):
            if shard.numel():
                by_dtype.setdefault(shard.dtype, []).append(i)
        sources: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for indices in by_dtype.values():
            sizes = [shards[i].numel() for i in indices]
            source = self._stage(self.world_size * sum(sizes), shards[indices[0]])
            columns = torch.split(as_rows(source, self.world_size), sizes, dim=1)
            for i, column in zip(indices, columns, strict=True):
                copy_chunks(fulls[i], column)
            sources.append(source)
            sums.append(self._stage(sum(sizes), source))
        work = self._inner.reduce_scatter(sources, sums, op, label)

        def finish() -> None:
            work.wait()
            for indices, summed in zip(by_dtype.values(), sums, strict=True):
                parts = torch.split(summed, [shards[i].numel() for i in indices])
                for i, part in zip(indices, parts, strict=True):
                    shards[i].copy_(part)

        return PendingWork(finish)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Reduce, label: Label = NO_LABEL
    ) -> Work:
        """Reduce as the inner transport does."""
        return self._inner.all_reduce(tensors, op, label)

    def _stage(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Allocate a 1-D buffer, and register it."""
        with self._memory.allocating():
            made = like.new_empty(numel)
        self._memory.register(made)
        return reported(made)
