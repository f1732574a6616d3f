"""The transport of ranks on one host with tensors on the CPU: shared memory in place of messages.

    all-gather        full parameters exist once, where all ranks see them: every rank copies (and
                      converts) its shard into its part of them, then waits until all have. What is
                      written to a shard afterwards does not reach them
    reduce-scatter    every rank stages the chunks of its peers, waits until all have, and adds its
                      own chunk over all ranks, in rank order
    all-reduce        the same, with the full tensor

No byte passes through the kernel, and none that a peer wrote is copied. Ranks that wait sleep.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from shardwise._torch import dtensor
from shardwise.transport.base import Call, FullBuffers, Reduce, Transport, Work
from shardwise.transport.buckets import (
    add_in_order,
    as_rows,
    exact_factor,
    scattered_bytes,
    wire_dtype,
)
from shardwise.transport.collective_log import CollectiveLog, LoggedCall
from shardwise.transport.memory import give_back, is_returned
from shardwise.transport.peers import Peers
from shardwise.transport.shm.arena import Arena, PageMap
from shardwise.transport.shm.full_params import Pool, ReferenceCounts, SharedBuffers
from shardwise.transport.shm.handshake import Connections
from shardwise.transport.shm.staging import Keeps, Staging
from shardwise.transport.shm.sync import SequenceNumbers, Sync

#: Bytes of a tensor that is used up that are copied or added before their memory is given back.
_AT_ONCE = 4 * 1024 * 1024


class ShmTransport(Transport):
    """Collectives between the ranks of one process group that share memory.

    Args:
        peers: the ranks of the group.
        connections: to those ranks, from their handshake.
        arena: the kind of memory that they share.
        written: the ranks whose sequence numbers this process writes; see :class:`SequenceNumbers`.
        pagemap: as for :class:`SharedBuffers`.
    """

    name = "shm"
    overlaps_compute = False  # the thread that waits does the work
    leaves_host = False

    def __init__(
        self,
        peers: Peers,
        connections: Connections,
        arena: type[Arena],
        written: Sequence[int],
        pagemap: PageMap | None,
    ) -> None:
        self.rank = peers.rank
        self.world_size = peers.size
        self._log = CollectiveLog(peers, self.name)
        common, *own = arena.ranges(connections.fd, 1 + peers.size)
        numbers = SequenceNumbers(common, written, peers.size)
        self._sync = Sync(peers, connections, numbers, self._log)
        references = ReferenceCounts(common, peers.rank, peers.size)
        self._pool = Pool(common, references, self._sync)
        self._staging = Staging(own[peers.rank], self._sync)
        self._pagemap = pagemap
        self._buffers: weakref.WeakValueDictionary[tuple[int, int], SharedBuffers] = (
            weakref.WeakValueDictionary()
        )

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FullBuffers:
        """Reserve memory to gather into, which all ranks share."""
        buffers = SharedBuffers(self._pool, self._pagemap, numels, dtypes)
        for tensor in buffers.tensors:
            if tensor.numel():
                self._buffers[dtensor.place_of(tensor)] = buffers
        return buffers

    def _all_gather(self, call: Call) -> Work:
        """Write this rank's chunks where all ranks see them."""
        shards, fulls = call.inputs, call.outputs
        logged = self._log.add(call.kind.value, call.outputs, call.label)
        places, apart = self._write_in_place(shards, fulls, logged)
        staged = self._staging.stage(
            [fulls[i].numel() // self.world_size for i in apart], [fulls[i].dtype for i in apart]
        )
        for part, i in zip(staged.own, apart, strict=True):
            part[: shards[i].numel()].copy_(shards[i])
        staged.report(logged, lambda: ((at, 0, shards[i].numel()) for at, i in enumerate(apart)))
        issued = self._log.issue(logged, 1, lambda: sum(full.nbytes for full in fulls))
        number = self._sync.post(logged, staged.at, places)
        self._pool.last_gather = number

        def finish() -> None:
            with issued:
                self._sync.wait(number, logged, places)
            issued.end()
            for rank in range(self.world_size) if apart else ():
                for i, part in zip(apart, staged.of(rank, number), strict=True):
                    as_rows(fulls[i], self.world_size)[rank].copy_(part)

        return staged.until(finish)

    def _reduce_scatter(self, call: Call) -> Work:
        """Stage the chunks of the peers; add what they staged for this rank, in rank order.

        Give the memory of large fulls that are disposable back as they are staged and added.
        """
        fulls, shards, op = call.inputs, call.outputs, call.op
        used_up = [i in call.disposable and is_returned(full) for i, full in enumerate(fulls)]
        logged = self._log.add(call.kind.value, call.outputs, call.label)
        staged = self._staging.stage(
            [self.world_size * shard.numel() for shard in shards],
            [wire_dtype(full, shard) for full, shard in zip(fulls, shards, strict=True)],
        )
        # An average costs no pass of its own if what is staged can be divided already.
        factors = [
            exact_factor(self.world_size, part.dtype) if op is Reduce.AVG else None
            for part in staged.own
        ]
        for i, (full, shard, part) in enumerate(zip(fulls, shards, staged.own, strict=True)):
            factor = factors[i]
            for around in self._around(full.numel(), shard.numel()):
                for before, after in _cut(full, *around, used_up[i]):
                    if factor is None:
                        part[before:after].copy_(full[before:after])
                    else:
                        torch.mul(full[before:after], factor, out=part[before:after])
                    if used_up[i]:
                        give_back(full, before, after)
        staged.report(
            logged,
            lambda: (
                (i, before, after)
                for i, (full, shard) in enumerate(zip(fulls, shards, strict=True))
                for before, after in self._around(full.numel(), shard.numel())
            ),
        )
        issued = self._log.issue(logged, 1, lambda: scattered_bytes(fulls, shards, self.world_size))
        number = self._sync.post(logged, staged.at)

        def finish() -> None:
            with issued:
                self._sync.wait(number, logged)
            issued.end()
            if self._staging.keeps is not Keeps.ALL:
                self._pool.trim()
            parts = [staged.of(rank, number) for rank in range(self.world_size)]
            for i, (full, shard) in enumerate(zip(fulls, shards, strict=True)):
                start = self.rank * shard.numel()
                end = min(start + shard.numel(), full.numel())
                for first, last in _cut(full, start, end, used_up[i]):
                    every = [part[i][first:last] for part in parts]
                    every[self.rank] = full[first:last]
                    out, factor = shard[first - start : last - start], factors[i]
                    if factor is None:
                        add_in_order(out, every, self.world_size if op is Reduce.AVG else None)
                    else:
                        add_in_order(out, every, unscaled=self.rank, factor=factor)
                    if used_up[i]:
                        give_back(full, first, last)

        return staged.until(finish)

    def _all_reduce(self, call: Call) -> Work:
        """Stage the tensors; add what all ranks staged, in rank order."""
        tensors = call.outputs
        logged = self._log.add(call.kind.value, call.outputs, call.label)
        staged = self._staging.stage(
            [tensor.numel() for tensor in tensors], [tensor.dtype for tensor in tensors]
        )
        for tensor, part in zip(tensors, staged.own, strict=True):
            part.copy_(tensor.view(-1))
        staged.report(logged, lambda: ((i, 0, each.numel()) for i, each in enumerate(tensors)))
        issued = self._log.issue(logged, 1, lambda: sum(tensor.nbytes for tensor in tensors))
        number = self._sync.post(logged, staged.at)
        divisor = self.world_size if call.op is Reduce.AVG else None

        def finish() -> None:
            with issued:
                self._sync.wait(number, logged)
            issued.end()
            parts = [staged.of(rank, number) for rank in range(self.world_size)]
            for i, tensor in enumerate(tensors):
                if tensor.numel():
                    add_in_order(tensor.view(-1), [part[i] for part in parts], divisor)

        return staged.until(finish)

    def trim(self) -> None:
        """Give the buffers of reductions back, as soon as gathers show that no rank reads them."""
        self._staging.keeps = Keeps.NOTHING

    def _write_in_place(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], call: LoggedCall
    ) -> tuple[int, list[int]]:
        """Write this rank's chunks to those of ``fulls`` that all ranks see.

        Returns:
            A number that depends on where those are, and the indices of the ``fulls`` that only
            this rank sees.
        """
        found = list(map(dtensor.place_of, fulls))
        shared = list(map(self._buffers.get, found))
        buffers = {id(each): each for each in shared if each is not None}
        with self._log.waiting(call):
            self._sync.wait_until(self._pool.last_gather, call)
        self._staging.trim()
        for each in buffers.values():
            each.take(call)
        if buffers and self._staging.keeps is not Keeps.ALL:
            self._pool.trim_beside()
        if not all(each.is_fresh for each in buffers.values()):
            # Peers may still read what an earlier gather left there.
            with self._log.waiting(call):
                self._sync.wait(self._sync.post(call), call)
            for each in buffers.values():
                each.forget_writes()
        for each in buffers.values():
            each.is_fresh = False
        places, apart = 0, []
        for i, (shard, full, its) in enumerate(zip(shards, fulls, shared, strict=True)):
            if its is not None:
                row = as_rows(its.for_all(found[i]), self.world_size)[self.rank]
                row[: shard.numel()].copy_(shard)
                page = its.at >> 12  # into 32 bits with those before
                places = (places * 31 + (page ^ page >> 32)) & 0xFFFFFFFF
            elif full.numel():
                apart.append(i)
        return places, apart

    def _around(self, numel: int, chunk: int) -> list[tuple[int, int]]:
        """Return the ranges of a full that are not this rank's chunk."""
        first, last = self.rank * chunk, (self.rank + 1) * chunk
        return [(0, min(first, numel)), (min(last, numel), numel)]


def _cut(full: torch.Tensor, first: int, last: int, is_used_up: bool) -> list[tuple[int, int]]:
    """Return a range of elements: as it is, or in parts if memory is given back after each."""
    if first >= last or not is_used_up:
        return [(first, last)] if first < last else []
    step = _AT_ONCE // full.itemsize
    return [(start, min(start + step, last)) for start in range(first, last, step)]
