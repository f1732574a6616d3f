"""A transport with a custom all-gather or reduce-scatter, which the user provides.

A custom collective works on one flat buffer for the whole group, as torch's does, and allocates the
buffer itself (from a memory pool, say). So its groups pay a copy in and a copy out. It is called as
torch calls it: by keywords, and synchronously. What overlaps is the stream that it is called on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.base import devices
from shardwise.transport.base import (
    Call,
    FinishedWork,
    FullBuffers,
    Kind,
    PendingWork,
    Reduce,
    Transport,
    Work,
)
from shardwise.transport.buckets import as_bytes, as_rows, copy_chunks, fill, unpack
from shardwise.transport.peers import Peers
from shardwise.transport.runner import Runner, Turn, wait_for_all
from shardwise.transport.waiter import Launched


class Comm(Protocol):
    """A custom collective, apart from its call."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate a buffer for the input or the output."""


class AllGather(Comm, Protocol):
    """A custom all-gather, as described by ``torch.distributed.fsdp``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather every rank's ``input_tensor`` (maybe a part of it) into ``output_tensor``."""


class ReduceScatter(Comm, Protocol):
    """A custom reduce-scatter, as described by ``torch.distributed.fsdp``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce chunk ``r`` of ``input_tensor`` into rank ``r``'s ``output_tensor``."""


class CustomTransport(Transport):
    """Another transport, with some of its collectives replaced by the user's.

    Args:
        inner: the transport for all other collectives.
        group: the process group to pass to the custom collectives.
        all_gather: the custom all-gather, if there is one.
        reduce_scatter: the custom reduce-scatter, if there is one.
    """

    name = "custom"

    def __init__(
        self,
        inner: Transport,
        group: dist.ProcessGroup,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
    ) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.overlaps_compute = inner.overlaps_compute
        self._inner = inner
        self._group = group
        self._gather = all_gather
        self._scatter = reduce_scatter
        provided = {Kind.ALL_GATHER: all_gather, Kind.REDUCE_SCATTER: reduce_scatter}
        self.replaced = frozenset(kind for kind, comm in provided.items() if comm is not None)
        self._runner = Runner(Turn.WAIT)
        self._backend: devices.Backend | None = None

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FullBuffers:
        """Reserve memory to gather into: plain memory if the all-gather is custom."""
        if self._gather is not None:
            return super().full_buffers(numels, dtypes, device)
        return self._inner.full_buffers(numels, dtypes, device)

    def _all_gather(self, call: Call) -> Work:
        """Gather with one call; as bytes if the dtypes differ."""
        shards, fulls, gather = call.inputs, call.outputs, self._gather
        if gather is None:
            return self._inner.start(call)
        if not fulls:
            return FinishedWork()
        is_mixed = len({full.dtype for full in fulls}) > 1
        if is_mixed:
            dtypes = [full.dtype for full in fulls]
            fulls = [as_bytes(full) for full in fulls]
        device = fulls[0].device
        rows = [as_rows(full, self.world_size) for full in fulls]
        sizes = [row.shape[1] for row in rows]

        def start() -> tuple[torch.Tensor, dist.Work | None]:
            output = gather.allocate(
                (self.world_size * sum(sizes),), dtype=fulls[0].dtype, device=device
            )
            flat = as_rows(output, self.world_size)
            for i, chunk in enumerate(torch.split(flat[self.rank], sizes)):
                fill(chunk, as_bytes(shards[i].to(dtypes[i])) if is_mixed else shards[i])
            work = gather(
                output_tensor=output,
                input_tensor=flat[self.rank],
                group=self._group,
                async_op=False,
            )
            return flat, work

        def deliver(flat: torch.Tensor) -> None:
            for row, column in zip(rows, torch.split(flat, sizes, dim=1), strict=True):
                row.copy_(column)

        return self._beside(device, start, deliver)

    def _reduce_scatter(self, call: Call) -> Work:
        """Reduce with one call per dtype."""
        if self._scatter is None:
            return self._inner.start(call)
        fulls, shards = call.inputs, call.outputs
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, shard in enumerate(shards):
            by_dtype.setdefault(shard.dtype, []).append(i)
        return wait_for_all(
            [
                self._reduce_one([fulls[i] for i in indices], [shards[i] for i in indices], call.op)
                for indices in by_dtype.values()
            ]
        )

    def _all_reduce(self, call: Call) -> Work:
        """Reduce as the inner transport does."""
        return self._inner.start(call)

    def _beside(
        self,
        device: torch.device,
        start: Callable[[], tuple[torch.Tensor, dist.Work | None]],
        deliver: Callable[[torch.Tensor], None],
    ) -> Work:
        """Start a custom collective on a stream beside the computing one, if there are any.

        Args:
            device: of its buffers.
            start: allocates and fills them; returns what it writes to, and its work.
            deliver: reads what was written, once it has been waited for.
        """
        written: list[torch.Tensor] = []

        def steps() -> Iterator[Launched]:
            result, work = start()
            written.append(result)
            yield FinishedWork() if work is None else work

        queued = self._runner.queue(steps(), device)

        def finish() -> None:
            queued.wait()
            deliver(written[0])

        return PendingWork(finish)

    def _reduce_one(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], op: Reduce
    ) -> Work:
        assert self._scatter is not None
        comm, dtype, device = self._scatter, shards[0].dtype, shards[0].device
        sizes = [shard.numel() for shard in shards]
        if self._backend is None:
            self._backend = Peers(self._group).backend(device)
        averages = op is Reduce.AVG and self._backend.averages

        def start() -> tuple[torch.Tensor, dist.Work | None]:
            source = comm.allocate((self.world_size * sum(sizes),), dtype=dtype, device=device)
            result = comm.allocate((sum(sizes),), dtype=dtype, device=device)
            columns = torch.split(as_rows(source, self.world_size), sizes, dim=1)
            for full, column in zip(fulls, columns, strict=True):
                copy_chunks(full, column)
            work = comm(
                output_tensor=result,
                input_tensor=source,
                group=self._group,
                op=dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM,
                async_op=False,
            )
            return result, work

        def deliver(result: torch.Tensor) -> None:
            if op is Reduce.AVG and not averages:
                result.div_(self.world_size)
            unpack(result, shards)

        return self._beside(device, start, deliver)
