"""Plain ``torch.distributed`` collectives, for any backend and device; and on NCCL, for CUDA.

:class:`CollectivesTransport` makes one all-gather per call (of bytes if the dtypes differ), and one
reduce-scatter or all-reduce per call and dtype. The tensors of a call are packed into one flat
buffer, with a copy in and a copy out, unless a tensor is alone. These are the number and the sizes
of the collectives of torch's FSDP2. The functions are looked up on ``torch.distributed`` at every
call, so that monitors and profilers that replace or count them see each one.

:class:`NcclTransport` makes one collective per parameter, in place. The gathered buffer of a
parameter that is sharded along its rows *is* the parameter. So this rank's shard is written into
its place (converted, if the dtypes differ), and the gather runs in place:

    full, rank 1 of 3   |  ...  | shard |  ...  |   ->   | rank 0 | shard | rank 2 |

Gradients are reduced from where autograd left them. Only uneven rows (the padding is missing) and
another dtype for the reduction cost a copy. All collectives of a call are launched together, as
NCCL does between ``ncclGroupStart`` and ``ncclGroupEnd``.

Streams: NCCL's own stream waits for what is on the current stream at the time of the call, and
``wait()`` makes the current stream wait for NCCL's. Until then the work keeps every tensor
referenced, so that no memory that NCCL still reads is reused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.base import devices
from shardwise.base.devices import Backend
from shardwise.transport.base import Call, FinishedWork, Reduce, Transport, UnderWay, Work
from shardwise.transport.buckets import (
    Bucket,
    as_bytes,
    as_real,
    as_rows,
    as_sendable,
    assign_buckets,
    contributions,
    fill,
    flat_rows,
    pack,
    unpack,
)
from shardwise.transport.carrier import Collective, carrier
from shardwise.transport.collective_log import CollectiveLog
from shardwise.transport.memory import reported
from shardwise.transport.peers import Peers
from shardwise.transport.waiter import Launched, Waiter

#: On NCCL, chunks of fewer bytes are packed: a copy costs less than one more collective.
SMALL_BYTES = 16 * 1024


class CollectivesTransport(Transport):
    """Public ``torch.distributed`` collectives over one process group.

    Args:
        group: the process group of the mesh dimension.
        backend: the backend that serves the tensors of this transport.
        alone_bytes: a tensor of which each rank sends at least this many bytes gets a collective of
            its own and is not packed.
        log: the log of the transport that this one is a part of, if it is.

    Attributes:
        log: the collectives that were called through it.
    """

    name = "collectives"

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: Backend,
        alone_bytes: int = sys.maxsize,
        log: CollectiveLog | None = None,
    ) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.overlaps_compute = backend.progresses
        self._backend = backend
        self._alone_bytes = alone_bytes
        self._packs_all = alone_bytes == sys.maxsize
        self._peers = Peers(group)
        self.log = CollectiveLog(self._peers, self.name) if log is None else log
        watches = carrier().watches(backend)
        self._waiter = Waiter(self._peers, self.log.compare) if watches else None
        self._under_way = UnderWay()
        #: The group, if its backend launches several collectives at once.
        self._coalescing: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which the transport does not keep alive."""
        return self._peers.group

    def _all_gather(self, call: Call) -> Work:
        """Gather with one collective per bucket."""
        self._under_way.settle()
        gather = all_gather_function()
        shards, fulls = call.inputs, call.outputs
        if self._packs_all and len({full.dtype for full in fulls}) > 1:
            shards = [
                as_bytes(shard if shard.dtype == full.dtype else reported(shard.to(full.dtype)))
                for shard, full in zip(shards, fulls, strict=True)
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

        calls = []
        for _, flat in flats:
            mine = as_sendable(flat[self.rank])
            if not self._backend.gathers_in_place:
                mine = reported(mine.clone())
            calls.append(Collective.of(gather, as_sendable(flat), mine, group=self.group))
        return self._start(call, calls, finish, lambda: sum(full.nbytes for full in call.outputs))

    def _reduce_scatter(self, call: Call) -> Work:
        """Reduce with one collective per bucket."""
        self._under_way.settle()
        fulls, shards, op = call.inputs, call.outputs, call.op
        scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")
        calls: list[Collective] = []
        sums: list[tuple[Bucket, torch.Tensor]] = []
        for bucket in self._buckets(shards):
            outs = [shards[i] for i in bucket.indices]
            flat = contributions([fulls[i] for i in bucket.indices], outs, self.world_size)
            result = reported(torch.empty_like(flat[0])) if bucket.packed else outs[0]
            sums.append((bucket, result))
            out, all_chunks = as_real(result), as_real(flat)
            calls.append(Collective.of(scatter, out, all_chunks, op=self._op(op), group=self.group))
        finish = functools.partial(self._deliver, sums, shards, op)
        return self._start(
            call, calls, finish, lambda: self.world_size * sum(shard.nbytes for shard in shards)
        )

    def _all_reduce(self, call: Call) -> Work:
        """Reduce with one collective per bucket."""
        self._under_way.settle()
        tensors, op = call.outputs, call.op
        sums = [
            (bucket, pack([tensors[i] for i in bucket.indices]))
            for bucket in self._buckets(tensors)
        ]
        calls = [
            Collective.of(dist.all_reduce, as_real(summed), op=self._op(op), group=self.group)
            for _, summed in sums
        ]
        finish = functools.partial(self._deliver, sums, tensors, op)
        return self._start(call, calls, finish, lambda: sum(tensor.nbytes for tensor in tensors))

    def _start(
        self,
        call: Call,
        calls: Sequence[Collective],
        finish: Callable[[], None],
        nbytes: Callable[[], int],
    ) -> Work:
        logged = self.log.add(call.kind.value, call.outputs, call.label)
        doing = logged.text
        if not calls:
            return FinishedWork()
        at_once: dict[object, list[Collective]] = {}
        for one in calls:
            key = id(one) if self._coalescing is None else one.tensor.dtype
            at_once.setdefault(key, []).append(one)
        issued = self.log.issue(logged, len(at_once), nbytes)
        launched: list[Launched] = []
        with self._peers.collective(doing):
            for each in at_once.values():
                launched.append(carrier().launch(each, self._coalescing))  # noqa: PERF401 - tests take it out
        on_host = calls[0].tensor.device.type == "cpu"

        def arrive(calls: object = calls) -> None:  # holds what the collectives read
            with issued:
                if self._waiter is not None and on_host:
                    self._waiter.wait([(each, None) for each in launched], doing)
                else:
                    with self._peers.collective(doing):
                        for each in launched:
                            each.wait()
            issued.end()

        def arrive_and_finish() -> None:
            arrive()
            finish()

        return self._under_way.add(arrive, arrive_and_finish)

    def _deliver(
        self,
        sums: Sequence[tuple[Bucket, torch.Tensor]],
        results: Sequence[torch.Tensor],
        op: Reduce,
    ) -> None:
        for bucket, summed in sums:
            if op is Reduce.AVG and not self._backend.averages:
                summed.div_(self.world_size)
            if bucket.packed:
                unpack(summed, [results[i] for i in bucket.indices])

    def _buckets(self, tensors: Sequence[torch.Tensor], world_size: int = 1) -> list[Bucket]:
        nbytes = [tensor.nbytes // world_size for tensor in tensors]
        return assign_buckets(nbytes, [tensor.dtype for tensor in tensors], self._alone_bytes)

    def _op(self, op: Reduce) -> dist.ReduceOp.RedOpType:
        average = op is Reduce.AVG and self._backend.averages
        return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


def all_gather_function() -> Callable[..., dist.Work]:
    """Look up the all-gather into one tensor on ``torch.distributed``."""
    return _function("all_gather_single", "all_gather_into_tensor")


def _function(name: str, older: str) -> Callable[..., dist.Work]:
    """Look up a collective on ``torch.distributed``.

    torch 2.13 renamed two collectives and deprecated their older names. Use the older name if torch
    does not have the newer one, or if a monitor has replaced the older one.
    """
    replaced = getattr(dist, older) is not getattr(dist.distributed_c10d, older)
    function: Callable[..., dist.Work] = getattr(
        dist, older if replaced or not hasattr(dist, name) else name
    )
    return function


class NcclTransport(CollectivesTransport):
    """Collectives in place, launched together, as NCCL does both.

    Args:
        group: a process group whose backend for the tensors does both.
        backend: that backend.
    """

    def __init__(self, group: dist.ProcessGroup, backend: Backend = devices.NCCL) -> None:
        self.name = backend.name
        super().__init__(group, backend, SMALL_BYTES)
        self._coalescing = group
