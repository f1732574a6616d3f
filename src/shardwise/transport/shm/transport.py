"""Ranks on one host, tensors on the CPU: shared memory in place of messages.

    all-gather        the full parameters live once, where all ranks see them: every rank copies
                      (and converts) its shard into its part of them, then waits until all have.
                      What is written to a shard afterwards does not reach them
    reduce-scatter    every rank lays out the chunks of its peers, waits until all have, and adds up
                      its own chunk over all ranks, in their order
    all-reduce        the same, with the whole tensor

Nothing is copied that a peer wrote, and nothing passes through the kernel. Ranks that wait sleep.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.transport.base import NO_LABEL, FullBuffers, Label, Reduce, Work
from shardwise.transport.buckets import as_rows
from shardwise.transport.collective_log import Call, CollectiveLog
from shardwise.transport.shm.arena import PageMap, ranges
from shardwise.transport.shm.full_params import Departures, Pool, SharedBuffers
from shardwise.transport.shm.handshake import Meeting
from shardwise.transport.shm.staging import Exchange
from shardwise.transport.shm.sync import Posts, Signals
from shardwise.transport.sums import add_in_order, exact_factor, wire_dtype


class ShmTransport:
    """The ranks of one process group that share memory.

    Args:
        group: the process group.
        meeting: of its ranks.
    """

    name = "shm"

    def __init__(self, group: dist.ProcessGroup, meeting: Meeting) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self._log = CollectiveLog(group)
        common, *own = ranges(meeting.fd, 1 + self.world_size)
        signals = Signals(common, self.rank, self.world_size)
        self._posts = posts = Posts(group, meeting, signals, self._log)
        self._departures = Departures(common, self.rank, self.world_size)
        self._pool = Pool(common, self._departures, posts)
        self._pagemap = PageMap()
        self._exchange = Exchange(own[self.rank], posts)
        self._shared: weakref.WeakValueDictionary[int, SharedBuffers] = (
            weakref.WeakValueDictionary()
        )

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FullBuffers:
        """Make (not yet allocated) memory to gather into, which all ranks have in common."""
        buffers = SharedBuffers(self._pool, self._pagemap, numels, dtypes)
        for tensor in buffers.tensors:
            if tensor.numel():
                self._shared[tensor.data_ptr()] = buffers
        return buffers

    def overlaps_compute(self) -> bool:
        """Return False: the thread that waits does the work."""
        return False

    def all_gather(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], label: Label = NO_LABEL
    ) -> Work:
        """Write this rank's chunks where all see them."""
        call = self._log.note("all-gather", fulls, label)
        places, apart = self._write_in_place(shards, fulls, call)
        laid_out = self._exchange.lay_out(
            [fulls[i].numel() // self.world_size for i in apart], [fulls[i].dtype for i in apart]
        )
        for part, i in zip(laid_out.own, apart, strict=True):
            part[: shards[i].numel()].copy_(shards[i])
        number = self._posts.post(call, laid_out.at, places)
        self._pool.note_gather(number)

        def finish() -> None:
            self._posts.wait(number, call, places)
            for rank in range(self.world_size) if apart else ():
                for i, part in zip(apart, laid_out.of(rank, number), strict=True):
                    as_rows(fulls[i], self.world_size)[rank].copy_(part)

        return laid_out.until(finish)

    def reduce_scatter(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        op: Reduce,
        label: Label = NO_LABEL,
    ) -> Work:
        """Lay out the chunks of the peers; add up, in the order of ranks, what they laid out."""
        call = self._log.note("reduce-scatter", shards, label)
        laid_out = self._exchange.lay_out(
            [self.world_size * shard.numel() for shard in shards],
            [wire_dtype(full, shard) for full, shard in zip(fulls, shards, strict=True)],
        )
        # An average costs no pass of its own where what is laid out can be divided already.
        factors = [
            exact_factor(self.world_size, part.dtype) if op is Reduce.AVG else None
            for part in laid_out.own
        ]
        for full, shard, part, factor in zip(fulls, shards, laid_out.own, factors, strict=True):
            for before, after in self._around(full.numel(), shard.numel()):
                if factor is None:
                    part[before:after].copy_(full[before:after])
                else:
                    torch.mul(full[before:after], factor, out=part[before:after])
        number = self._posts.post(call, laid_out.at)

        def finish() -> None:
            self._posts.wait(number, call)
            parts = [laid_out.of(rank, number) for rank in range(self.world_size)]
            for i, (full, shard) in enumerate(zip(fulls, shards, strict=True)):
                first = self.rank * shard.numel()
                last = min(first + shard.numel(), full.numel())
                if first < last:
                    every = [part[i][first:last] for part in parts]
                    every[self.rank] = full[first:last]
                    out, factor = shard[: last - first], factors[i]
                    if factor is None:
                        add_in_order(out, every, self.world_size if op is Reduce.AVG else None)
                    else:
                        add_in_order(out, every, unscaled=self.rank, factor=factor)

        return laid_out.until(finish)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Reduce, label: Label = NO_LABEL
    ) -> Work:
        """Lay out the tensors; add up what all ranks laid out, in their order."""
        call = self._log.note("all-reduce", tensors, label)
        laid_out = self._exchange.lay_out(
            [tensor.numel() for tensor in tensors], [tensor.dtype for tensor in tensors]
        )
        for tensor, part in zip(tensors, laid_out.own, strict=True):
            part.copy_(tensor.view(-1))
        number = self._posts.post(call, laid_out.at)
        divisor = self.world_size if op is Reduce.AVG else None

        def finish() -> None:
            self._posts.wait(number, call)
            parts = [laid_out.of(rank, number) for rank in range(self.world_size)]
            for i, tensor in enumerate(tensors):
                if tensor.numel():
                    add_in_order(tensor.view(-1), [part[i] for part in parts], divisor)

        return laid_out.until(finish)

    # -- inside --------------------------------------------------------------------------------

    def _write_in_place(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], call: Call
    ) -> tuple[int, list[int]]:
        """Write this rank's chunks to those of ``fulls`` that all ranks see.

        Returns:
            A number that tells where those are, and which of ``fulls`` only this rank sees.
        """
        shared = [self._shared.get(full.data_ptr()) for full in fulls]
        buffers = {id(each): each for each in shared if each is not None}
        self._pool.wait_for_last_gather(call)
        for each in buffers.values():
            each.take()
        if any(not each.is_fresh for each in buffers.values()):
            # Peers may still read what an earlier gather left there.
            self._posts.wait(self._posts.post(call), call)
            for each in buffers.values():
                each.forget_writes()
        for each in buffers.values():
            each.is_fresh = False
        places, apart = 0, []
        for i, (shard, full, its) in enumerate(zip(shards, fulls, shared, strict=True)):
            if its is not None:
                row = as_rows(its.for_all(full), self.world_size)[self.rank]
                row[: shard.numel()].copy_(shard)
                places = _fold(places, its.at)
            elif full.numel():
                apart.append(i)
        return places, apart

    def _around(self, numel: int, chunk: int) -> list[tuple[int, int]]:
        """The ranges of a full that are not this rank's chunk."""
        first, last = self.rank * chunk, (self.rank + 1) * chunk
        return [(0, min(first, numel)), (min(last, numel), numel)]


def _fold(places: int, at: int) -> int:
    page = at >> 12
    return (places * 31 + (page ^ page >> 32)) & 0xFFFFFFFF
