"""Plain ``torch.distributed`` collectives: any backend, any device.

One all-gather per call (of bytes, if dtypes differ), one reduce-scatter or all-reduce per call and
dtype: the tensors of a call are packed into one flat buffer (a copy in, a copy out), but for a
tensor that is alone. That is the number and the size of torch's FSDP2's own collectives. The
functions are looked up on ``torch.distributed`` at every call, so that monitors and profilers
which replace or count them see each one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.transport.base import NO_LABEL, Label, Reduce, Work
from shardwise.transport.calls import Call, CallLog
from shardwise.transport.flat import (
    as_bytes,
    as_carried,
    as_real,
    as_rows,
    contributions,
    fill,
    flat_rows,
)
from shardwise.transport.memory import OwnMemory
from shardwise.transport.parcels import Parcel, pack, parcels, unpack
from shardwise.transport.peers import naming_lost_peer
from shardwise.transport.waiting import Launched, Waiter
from shardwise.transport.work import FinishedWork, PendingWork

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
    runs_behind = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        alone_bytes: int = sys.maxsize,
        log: CallLog | None = None,
    ) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.group = group
        self._has_average = backend in _AVERAGING_BACKENDS
        self._alone_bytes = alone_bytes
        self._packs_all = alone_bytes == sys.maxsize
        self._log = CallLog(group) if log is None else log
        self._waiter = Waiter(group, self._log) if backend == "gloo" else None

    def all_gather(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], label: Label = NO_LABEL
    ) -> Work:
        """Gather with one collective per parcel."""
        gather = _function("all_gather_single", "all_gather_into_tensor")
        noted = self._log.note("all-gather", fulls, label)
        if self._packs_all and len({full.dtype for full in fulls}) > 1:
            shards = [
                as_bytes(shard.to(full.dtype)) for shard, full in zip(shards, fulls, strict=True)
            ]
            fulls = [as_bytes(full) for full in fulls]
        rows = [as_rows(full, self.world_size) for full in fulls]
        chunks = [row.shape[1] for row in rows]
        flats: list[tuple[Parcel, torch.Tensor]] = []
        for parcel in self._parcels(fulls, self.world_size):
            first = rows[parcel.indices[0]]
            sizes = [chunks[i] for i in parcel.indices]
            flat = flat_rows(first, self.world_size, sizes) if parcel.packed else first
            own = torch.split(flat[self.rank], sizes)
            for i, chunk in zip(parcel.indices, own, strict=True):
                fill(chunk, shards[i])
            flats.append((parcel, flat))

        def finish() -> None:
            for parcel, flat in flats:
                if parcel.packed:
                    columns = torch.split(flat, [chunks[i] for i in parcel.indices], dim=1)
                    for i, column in zip(parcel.indices, columns, strict=True):
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
        """Reduce with one collective per parcel."""
        scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")
        calls: list[Collective] = []
        sums: list[tuple[Parcel, torch.Tensor]] = []
        for parcel in self._parcels(shards):
            outs = [shards[i] for i in parcel.indices]
            flat = contributions([fulls[i] for i in parcel.indices], outs, self.world_size)
            result = torch.empty_like(flat[0]) if parcel.packed else outs[0]
            sums.append((parcel, result))
            out, all_chunks = as_real(result), as_real(flat)
            calls.append(Collective.of(scatter, out, all_chunks, op=self._op(op), group=self.group))
        finish = functools.partial(self._deliver, sums, shards, op)
        return self._start(self._log.note("reduce-scatter", shards, label), calls, finish)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Reduce, label: Label = NO_LABEL
    ) -> Work:
        """Reduce with one collective per parcel."""
        sums = [
            (parcel, pack([tensors[i] for i in parcel.indices]))
            for parcel in self._parcels(tensors)
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
        sums: Sequence[tuple[Parcel, torch.Tensor]],
        results: Sequence[torch.Tensor],
        op: Reduce,
    ) -> None:
        for parcel, summed in sums:
            if op is Reduce.AVG and not self._has_average:
                summed.div_(self.world_size)
            if parcel.packed:
                unpack(summed, [results[i] for i in parcel.indices])

    def _parcels(self, tensors: Sequence[torch.Tensor], world_size: int = 1) -> list[Parcel]:
        nbytes = [tensor.nbytes // world_size for tensor in tensors]
        return parcels(nbytes, [tensor.dtype for tensor in tensors], self._alone_bytes)

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
