"""Plain ``torch.distributed`` collectives: any backend, any device.

One all-gather per call (of bytes, if dtypes differ), one reduce-scatter or all-reduce per call and
dtype: the tensors of a call are packed into one flat buffer (a copy in, a copy out), but for a
tensor that is alone. That is the number and the size of torch's FSDP2's own collectives. The
functions are looked up on ``torch.distributed`` at every call, so that monitors and profilers
which replace or count them see each one.

CUDA tensors on NCCL: one launch of a collective per parameter, from where the data lies.

The gathered buffer of a parameter that is cut along its rows *is* the parameter. So this rank's
shard is written into its place (converted, if the dtypes differ), and the gather runs in place:

    full, rank 1 of 3   |  ...  | shard |  ...  |   ->   | rank 0 | shard | rank 2 |

Gradients are reduced from where autograd left them. Only uneven rows (the padding is missing) and
another dtype for the reduction cost a copy. All collectives of a call are launched together, as
NCCL does between ``ncclGroupStart`` and ``ncclGroupEnd``.

Streams: NCCL's own stream waits for what the current stream holds at the call; ``wait()`` makes the
current stream wait for NCCL's. The work keeps every tensor referenced until then, so that no memory
is handed out again that NCCL still reads.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.c10d import coalesced
from shardwise.transport.base import NO_LABEL, FinishedWork, Label, PendingWork, Reduce, Work
from shardwise.transport.buckets import (
    Bucket,
    as_bytes,
    as_carried,
    as_real,
    as_rows,
    assign_buckets,
    contributions,
    fill,
    flat_rows,
    pack,
    unpack,
)
from shardwise.transport.collective_log import Call, CollectiveLog
from shardwise.transport.memory import OwnMemory
from shardwise.transport.peers import Launched, Waiter, naming_lost_peer

#: Backends known to implement ``ReduceOp.AVG``; elsewhere the sum is divided afterwards.
_AVERAGING_BACKENDS = frozenset({"nccl"})


@dataclass(frozen=True)
class Collective:
    """A collective that is ready to start.

    Attributes:
        tensor: what it writes to. The function's own arguments do not tell: a tool may have put
            a ``functools.partial`` in its place, with others before them.
        start: lacks its ``async_op`` only.
    """

    tensor: torch.Tensor
    start: Callable[..., dist.Work]

    @classmethod
    def of(
        cls, function: Callable[..., dist.Work], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Collective:
        """``function(tensor, *args, **kwargs)``, not yet called."""
        return cls(tensor, functools.partial(function, tensor, *args, **kwargs))


class CollectivesTransport(OwnMemory):
    """Public collectives of one process group.

    Args:
        group: the process group of the mesh dimension.
        backend: name of the backend that serves the tensors of this transport.
        alone_bytes: tensors whose part on the wire has at least so many bytes get a collective
            each and are not packed.
        log: where calls are noted, if another transport of the same group has one.
    """

    name = "collectives"

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        alone_bytes: int = sys.maxsize,
        log: CollectiveLog | None = None,
    ) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.group = group
        self._has_average = backend in _AVERAGING_BACKENDS
        self._alone_bytes = alone_bytes
        self._packs_all = alone_bytes == sys.maxsize
        self._log = CollectiveLog(group) if log is None else log
        self._waiter = Waiter(group, self._log) if backend == "gloo" else None

    def overlaps_compute(self) -> bool:
        """Return True: the backend moves bytes by itself."""
        return True

    def all_gather(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], label: Label = NO_LABEL
    ) -> Work:
        """Gather with one collective per bucket."""
        gather = _function("all_gather_single", "all_gather_into_tensor")
        noted = self._log.note("all-gather", fulls, label)
        if self._packs_all and len({full.dtype for full in fulls}) > 1:
            shards = [
                as_bytes(shard.to(full.dtype)) for shard, full in zip(shards, fulls, strict=True)
            ]
            fulls = [as_bytes(full) for full in fulls]
        rows = [as_rows(full, self.world_size) for full in fulls]
        chunks = [row.shape[1] for row in rows]
        flats: list[tuple[Bucket, torch.Tensor]] = []
        for bucket in self._buckets(fulls, self.world_size):
            first = rows[bucket.indices[0]]
            sizes = [chunks[i] for i in bucket.indices]
            flat = flat_rows(first, self.world_size, sizes) if bucket.packed else first
            own = torch.split(flat[self.rank], sizes)
            for i, chunk in zip(bucket.indices, own, strict=True):
                fill(chunk, shards[i])
            flats.append((bucket, flat))

        def finish() -> None:
            for bucket, flat in flats:
                if bucket.packed:
                    columns = torch.split(flat, [chunks[i] for i in bucket.indices], dim=1)
                    for i, column in zip(bucket.indices, columns, strict=True):
                        rows[i].copy_(column)

        calls = [
            Collective.of(gather, as_carried(flat), as_carried(flat[self.rank]), group=self.group)
            for _, flat in flats
        ]
        return self._start(noted, calls, finish)

    def reduce_scatter(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        op: Reduce,
        label: Label = NO_LABEL,
    ) -> Work:
        """Reduce with one collective per bucket."""
        scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")
        calls: list[Collective] = []
        sums: list[tuple[Bucket, torch.Tensor]] = []
        for bucket in self._buckets(shards):
            outs = [shards[i] for i in bucket.indices]
            flat = contributions([fulls[i] for i in bucket.indices], outs, self.world_size)
            result = torch.empty_like(flat[0]) if bucket.packed else outs[0]
            sums.append((bucket, result))
            out, all_chunks = as_real(result), as_real(flat)
            calls.append(Collective.of(scatter, out, all_chunks, op=self._op(op), group=self.group))
        finish = functools.partial(self._deliver, sums, shards, op)
        return self._start(self._log.note("reduce-scatter", shards, label), calls, finish)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Reduce, label: Label = NO_LABEL
    ) -> Work:
        """Reduce with one collective per bucket."""
        sums = [
            (bucket, pack([tensors[i] for i in bucket.indices]))
            for bucket in self._buckets(tensors)
        ]
        calls = [
            Collective.of(dist.all_reduce, as_real(summed), op=self._op(op), group=self.group)
            for _, summed in sums
        ]
        finish = functools.partial(self._deliver, sums, tensors, op)
        return self._start(self._log.note("all-reduce", tensors, label), calls, finish)

    def _launch(self, calls: Sequence[Collective]) -> list[Launched]:
        """Start collectives of one kind."""
        return [call.start(async_op=True) for call in calls]

    def _start(
        self,
        noted: Call,
        calls: Sequence[Collective],
        finish: Callable[[], None],
    ) -> Work:
        doing = noted.text
        if not calls:
            return FinishedWork()
        with naming_lost_peer(self.group, doing):
            launched = self._launch(calls)
        on_host = calls[0].tensor.device.type == "cpu"

        def wait_and_finish(calls: object = calls) -> None:  # the calls hold what is read
            if self._waiter is not None and on_host:
                self._waiter.wait([(each, None) for each in launched], doing)
            else:
                with naming_lost_peer(self.group, doing):
                    for each in launched:
                        each.wait()
            finish()

        return PendingWork(wait_and_finish)

    def _deliver(
        self,
        sums: Sequence[tuple[Bucket, torch.Tensor]],
        results: Sequence[torch.Tensor],
        op: Reduce,
    ) -> None:
        for bucket, summed in sums:
            if op is Reduce.AVG and not self._has_average:
                summed.div_(self.world_size)
            if bucket.packed:
                unpack(summed, [results[i] for i in bucket.indices])

    def _buckets(self, tensors: Sequence[torch.Tensor], world_size: int = 1) -> list[Bucket]:
        nbytes = [tensor.nbytes // world_size for tensor in tensors]
        return assign_buckets(nbytes, [tensor.dtype for tensor in tensors], self._alone_bytes)

    def _op(self, op: Reduce) -> dist.ReduceOp.RedOpType:
        average = op is Reduce.AVG and self._has_average
        return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


def _function(name: str, older: str) -> Callable[..., dist.Work]:
    """Look ``name`` up on ``torch.distributed``.

    torch 2.13 renamed two collectives and deprecated their older names. The older name is
    taken where torch does not have the newer one, or where a monitor has replaced the older.
    """
    replaced = getattr(dist, older) is not getattr(dist.distributed_c10d, older)
    function: Callable[..., dist.Work] = getattr(
        dist, older if replaced or not hasattr(dist, name) else name
    )
    return function


#: Chunks of fewer bytes are packed: below this a copy costs less than one more collective.
SMALL_BYTES = 16 * 1024


class NcclTransport(CollectivesTransport):
    """The ranks of one NCCL process group, tensors on CUDA devices.

    Args:
        group: a process group whose CUDA backend is NCCL.
        backend: stands in for NCCL where there is none: any with coalesced collectives.
    """

    name = "nccl"

    def __init__(self, group: dist.ProcessGroup, backend: str = "nccl") -> None:
        super().__init__(group, backend, SMALL_BYTES)

    def _launch(self, calls: Sequence[Collective]) -> list[Launched]:
        by_dtype: dict[torch.dtype, list[Collective]] = {}
        for call in calls:
            by_dtype.setdefault(call.tensor.dtype, []).append(call)
        launched: list[Launched] = []
        for together in by_dtype.values():
            with coalesced(self.group) as work:
                for call in together:
                    call.start(async_op=False)
            launched.append(work)
        return launched
