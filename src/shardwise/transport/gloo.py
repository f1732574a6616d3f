"""CPU tensors on gloo: batched point-to-point messages instead of gloo's own collectives.

Gloo's collectives pass the data through one flat buffer on each side and, for the reductions,
through fresh memory. Messages go from where the data lies to where it belongs. The figures are in
``docs/benchmarks.md``, under "Transport on gloo".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.transport.base import NO_LABEL, Label, Reduce, Work
from shardwise.transport.calls import Call, CallLog
from shardwise.transport.collectives import CollectivesTransport
from shardwise.transport.flat import as_rows
from shardwise.transport.memory import OwnMemory
from shardwise.transport.messages import MAX_TAG, Exchange, Message
from shardwise.transport.parcels import Parcel, pack, parcels, unpack
from shardwise.transport.reduction import Reduction
from shardwise.transport.scratch import Scratch
from shardwise.transport.waiting import Waiter
from shardwise.transport.work import PendingWork

#: Chunks of fewer bytes travel packed together, larger ones from where they lie.
SMALL_BYTES = 256 * 1024
#: The same for whole tensors that are all-reduced.
SMALL_ALL_REDUCE_BYTES = 2 * 1024 * 1024


class GlooTransport(OwnMemory):
    """The ranks of one gloo process group, tensors on the CPU.

    Args:
        group: a process group whose CPU backend is gloo.
    """

    name = "gloo"
    runs_behind = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self._group = group
        # Each rank starts with its next neighbour, so that not all of them write to rank 0 first.
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self._log = CallLog(group)
        self._waiter = Waiter(group, self._log)
        self._scratch = Scratch()
        self._under_way: list[tuple[weakref.ref[PendingWork], Exchange]] = []
        self._collectives = CollectivesTransport(group, "gloo", SMALL_ALL_REDUCE_BYTES, self._log)

    def all_gather(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], label: Label = NO_LABEL
    ) -> Work:
        """Send every shard to all peers; receive theirs in place.

        What is sent is the copy in this rank's own row: the shard may be written to meanwhile.
        """
        rows = [as_rows(full, self.world_size) for full in fulls]
        chunks = [row.shape[1] for row in rows]
        cut = parcels(
            [chunk * full.itemsize for chunk, full in zip(chunks, fulls, strict=True)],
            [full.dtype for full in fulls],
            SMALL_BYTES,
        )
        exchange = self._exchange(self._log.note("all-gather", fulls, label))

        arrivals: list[tuple[Parcel, Message]] = []
        for number, parcel in enumerate(cut):
            leaving = []
            for i in parcel.indices:
                own, shard = rows[i][self.rank], shards[i]
                own[: shard.numel()].copy_(shard)
                leaving.append(own)
            packed = pack(leaving)
            first = rows[parcel.indices[0]]
            for peer in self._peers:
                exchange.send(packed, peer, number)
                landing = torch.empty_like(packed) if parcel.packed else first[peer]
                arrivals.append((parcel, exchange.recv(landing, peer, number)))
        exchange.start()

        def finish() -> None:
            exchange.wait()
            for parcel, arrival in arrivals:
                if parcel.packed:
                    unpack(arrival.tensor, [rows[i][arrival.peer] for i in parcel.indices])

        return self._pending(exchange, finish)

    def reduce_scatter(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        op: Reduce,
        label: Label = NO_LABEL,
    ) -> Work:
        """Send every peer its chunks; add up, in the order of ranks, what arrives for this one."""
        cut = parcels(
            [shard.nbytes for shard in shards],
            [(full.dtype, shard.dtype) for full, shard in zip(fulls, shards, strict=True)],
            SMALL_BYTES,
        )
        exchange = self._exchange(self._log.note("reduce-scatter", shards, label))
        reduction = Reduction(
            self.rank, self._peers, cut, exchange, self._scratch, fulls, shards, op
        )
        return self._pending(exchange, reduction.finish)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Reduce, label: Label = NO_LABEL
    ) -> Work:
        """Reduce in place, with gloo's own collective: no composition of messages beat it."""
        return self._collectives.all_reduce(tensors, op, label)

    def _exchange(self, call: Call) -> Exchange:
        # Tags follow from the call, so that those of ranks that have diverged never meet: gloo
        # ends the process where a message is larger than the memory that waits for it. Messages
        # of one tag arrive in the order in which they were sent.
        return Exchange(self._group, self._waiter, call.text, call.mark % MAX_TAG)

    def _pending(self, exchange: Exchange, finish: Callable[[], None]) -> Work:
        """Make the work of a call, and see to it that its messages are received.

        A work that is dropped without a wait (after an exception, say) leaves messages that gloo
        cannot deliver, and then nothing that follows on that connection would arrive either. So
        the transport holds the messages itself until a later call has been waited for.
        """

        def finish_and_forget() -> None:
            finish()
            for entry in list(self._under_way):
                earlier, messages = entry
                if messages is exchange:
                    self._under_way.remove(entry)
                    break
                if earlier() is None:
                    messages.wait()
                    self._under_way.remove(entry)

        work = PendingWork(finish_and_forget)
        self._under_way.append((weakref.ref(work), exchange))
        return work
