"""CPU tensors on gloo: point-to-point messages in place of gloo's own collectives.

Gloo's collectives pass the data through one flat buffer on each side and, for reductions, through
fresh memory. Messages go from where the data lies to where it belongs.

In an all-gather, every rank sends its chunks to all peers. In a reduce-scatter, it sends each peer
that peer's chunks, receives its own chunks from all of them, and adds:

    rank 0: g0 = | a0 b0 |     sends b0 to rank 1, receives a1     shard = (a0 + a1) / 2
    rank 1: g1 = | a1 b1 |     sends a1 to rank 0, receives b0     shard = (b0 + b1) / 2

One contribution arrives in the shard itself, where the sum is made: two ranks with one dtype need
no other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.base.devices import GLOO
from shardwise.transport.base import Call, Reduce, Transport, UnderWay, Work
from shardwise.transport.buckets import (
    Bucket,
    add_in_order,
    as_rows,
    assign_buckets,
    pack,
    scattered_bytes,
    unpack,
    wire_dtype,
)
from shardwise.transport.carrier import Ends, carrier
from shardwise.transport.collective_log import UNWATCHED, CollectiveLog, LoggedCall
from shardwise.transport.collectives import CollectivesTransport
from shardwise.transport.memory import Loan, Scratch, reported
from shardwise.transport.peers import PROBE_TAG, Peers
from shardwise.transport.waiter import Waiter

#: Chunks of fewer bytes are packed together; larger ones are sent from where they lie.
SMALL_BYTES = 256 * 1024
#: The same for full tensors that are all-reduced.
SMALL_ALL_REDUCE_BYTES = 2 * 1024 * 1024
#: Tags wrap here: gloo's are of type ``int`` in C.
MAX_TAG = PROBE_TAG


class GlooTransport(Transport):
    """Messages between the ranks of one gloo process group, for CPU tensors.

    Args:
        group: a process group whose CPU backend is gloo.

    Attributes:
        log: the collectives that were called through it.
    """

    name = GLOO.name
    sends_to_each = True
    overlaps_compute = True  # gloo's thread sends and receives messages by itself

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self._ends = carrier().ends(group)
        # Each rank starts with its next neighbor, so that not all of them write to rank 0 first.
        self._order = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        peers = Peers(group)
        self.log = CollectiveLog(peers, self.name)
        self._waiter = Waiter(peers, self.log.compare)
        self._scratch = Scratch()
        self._under_way = UnderWay()
        self._collectives = CollectivesTransport(group, GLOO, SMALL_ALL_REDUCE_BYTES, self.log)

    def _all_gather(self, call: Call) -> Work:
        """Send every shard to all peers; receive theirs in place.

        What is sent is the copy in this rank's own row: the shard may be written to meanwhile.
        """
        self._under_way.settle()
        shards, fulls = call.inputs, call.outputs
        rows = [as_rows(full, self.world_size) for full in fulls]
        chunks = [row.shape[1] for row in rows]
        buckets = assign_buckets(
            [chunk * full.itemsize for chunk, full in zip(chunks, fulls, strict=True)],
            [full.dtype for full in fulls],
            SMALL_BYTES,
        )
        messages = Messages(
            self._ends,
            self._waiter,
            self.log,
            self.log.add(call.kind.value, call.outputs, call.label),
            lambda: sum(full.nbytes for full in fulls),
        )

        arrivals: list[tuple[Bucket, Message]] = []
        for number, bucket in enumerate(buckets):
            leaving = []
            for i in bucket.indices:
                own, shard = rows[i][self.rank], shards[i]
                own[: shard.numel()].copy_(shard)
                leaving.append(own)
            packed = pack(leaving)
            first = rows[bucket.indices[0]]
            for peer in self._order:
                messages.send(packed, peer, number)
                landing = first[peer]
                if bucket.packed:
                    landing = reported(torch.empty_like(packed))
                arrivals.append((bucket, messages.recv(landing, peer, number)))
        messages.start()

        def finish() -> None:
            messages.wait()
            for bucket, arrival in arrivals:
                if bucket.packed:
                    unpack(arrival.tensor, [rows[i][arrival.peer] for i in bucket.indices])

        return self._under_way.add(messages.wait, finish)

    def _reduce_scatter(self, call: Call) -> Work:
        """Send every peer its chunks; add up, in the order of ranks, what arrives for this one."""
        self._under_way.settle()
        fulls, shards = call.inputs, call.outputs
        buckets = assign_buckets(
            [shard.nbytes for shard in shards],
            [(full.dtype, shard.dtype) for full, shard in zip(fulls, shards, strict=True)],
            SMALL_BYTES,
        )
        messages = Messages(
            self._ends,
            self._waiter,
            self.log,
            self.log.add(call.kind.value, call.outputs, call.label),
            lambda: scattered_bytes(fulls, shards, self.world_size),
        )
        loan = self._scratch.borrow()
        sums = [
            self._receive(call, number, bucket, messages, loan)
            for number, bucket in enumerate(buckets)
        ]
        for number, bucket in enumerate(buckets):
            self._contribute(call, number, bucket, messages, loan)
        messages.start()
        divisor, last = self.world_size if call.op is Reduce.AVG else None, len(buckets) - 1

        def finish() -> None:
            for number, (bucket, (out, arriving)) in enumerate(zip(buckets, sums, strict=True)):
                # Every wait costs time, so the last one is also for what leaves.
                messages.wait(arriving if number < last else None)
                parts = {message.peer: message.tensor for message in arriving}
                parts[self.rank] = pack([_piece(call, i, self.rank) for i in bucket.indices])
                add_in_order(out, [parts[rank] for rank in sorted(parts)], divisor)
                if bucket.packed:
                    unpack(out, [self._result(call, i) for i in bucket.indices])
            loan.end()

        return self._under_way.add(messages.wait, finish)

    def _receive(
        self, call: Call, number: int, bucket: Bucket, messages: Messages, loan: Loan
    ) -> tuple[torch.Tensor, list[Message]]:
        """Prepare the receives of a bucket; return where its sum goes, and the messages."""
        results = [self._result(call, i) for i in bucket.indices]
        numel = sum(result.numel() for result in results)
        out = loan.take(numel, results[0].dtype) if bucket.packed else results[0]
        wire = _wire(call, bucket)
        # The sum starts with rank 0's contribution (on rank 0 with rank 1's: a + b == b + a).
        starts = 0 if self.rank else 1
        arriving = []
        for peer in self._order:
            direct = peer == starts and wire == out.dtype
            arriving.append(messages.recv(out if direct else loan.take(numel, wire), peer, number))
        return out, arriving

    def _contribute(
        self, call: Call, number: int, bucket: Bucket, messages: Messages, loan: Loan
    ) -> None:
        """Prepare the sends of a bucket."""
        wire = _wire(call, bucket)
        for peer in self._order:
            pieces = [_piece(call, i, peer) for i in bucket.indices]
            leaving = pieces[0]
            if bucket.packed or leaving.dtype != wire:
                leaving = loan.take(sum(piece.numel() for piece in pieces), wire)
                leaving.copy_(pack(pieces))
            messages.send(leaving, peer, number)

    def _result(self, call: Call, i: int) -> torch.Tensor:
        return call.outputs[i][: _piece(call, i, self.rank).numel()]

    def _all_reduce(self, call: Call) -> Work:
        """Reduce in place, with gloo's own collective: no composition of messages beat it."""
        return self._collectives.start(call)


def _piece(call: Call, i: int, rank: int) -> torch.Tensor:
    """Return what a full holds of a rank's chunk: less, or nothing, if its tail is missing."""
    chunk = call.outputs[i].numel()
    return call.inputs[i][rank * chunk : (rank + 1) * chunk]


def _wire(call: Call, bucket: Bucket) -> torch.dtype:
    i = bucket.indices[0]
    return wire_dtype(call.inputs[i], call.outputs[i])


@dataclass(eq=False)
class Message:
    """One tensor on its way to or from one peer.

    Attributes:
        tensor: what is sent, or where it arrives. Gloo reads or writes it from a thread of its own
            until the message has been waited for.
        peer: the rank in the group of the peer at the other end.
        tag: the same at both ends. Messages with the same tag arrive in order.
        work: gloo's work; ``None`` before the message is posted and once it is over.
    """

    tensor: torch.Tensor
    peer: int
    tag: int
    work: dist.Work | None = None


class Messages:
    """The point-to-point messages of one call.

    Their tags follow from the call, so that messages of ranks that have diverged never meet: gloo
    ends the process if a message is larger than the memory that waits for it.

    Args:
        ends: where messages leave and arrive.
        waiter: waits for works of that process group.
        log: where the call was logged.
        call: what was logged.
        nbytes: computes what the call sends, for reports.
    """

    def __init__(
        self,
        ends: Ends,
        waiter: Waiter,
        log: CollectiveLog,
        call: LoggedCall,
        nbytes: Callable[[], int],
    ) -> None:
        self._ends = ends
        self._waiter = waiter
        self._log = log
        self._call = call
        self._nbytes = nbytes
        self._issued = UNWATCHED
        self._sends: list[Message] = []
        self._receives: list[Message] = []

    def send(self, tensor: torch.Tensor, peer: int, number: int) -> Message:
        """Prepare message ``number`` to ``peer``; an empty tensor is not sent."""
        self._sends.append(Message(tensor, peer, self._tag(number)))
        return self._sends[-1]

    def recv(self, tensor: torch.Tensor, peer: int, number: int) -> Message:
        """Prepare memory for message ``number`` from ``peer``; an empty one is not received."""
        self._receives.append(Message(tensor, peer, self._tag(number)))
        return self._receives[-1]

    def start(self) -> None:
        """Post all messages.

        A message moves when both of its ends are posted. Sends come first, and nothing comes
        between, so data arrives only after this thread is done with the connection. While this
        thread holds a connection that has data for gloo's own thread, that one does not sleep: it
        spins, and takes the processor from the rank that it waits for (3 ms at a time).

        Raises:
            PeerLostError: a peer is gone.
            RanksDivergedError: a peer has called something else.
        """
        launches = sum(1 for message in self._sends if message.tensor.numel())
        if launches:
            self._issued = self._log.issue(self._call, launches, self._nbytes)
        for post, messages in (
            (self._ends.send, self._sends),
            (self._ends.recv, self._receives),
        ):
            for message in messages:
                if message.tensor.numel():
                    try:
                        message.work = post([message.tensor], message.peer, message.tag)
                    except RuntimeError as error:
                        raise self._waiter.explain(error, self._call.text, message.peer) from error

    def wait(self, messages: Sequence[Message] | None = None) -> None:
        """Return once the messages (by default all) have arrived or left.

        Raises:
            PeerLostError: a peer died, or did not answer in time.
            RanksDivergedError: a peer has called something else.
        """
        every = [*self._receives, *self._sends] if messages is None else messages
        waiting = [(each.work, each.peer) for each in every if each.work is not None]
        if waiting:
            with self._issued:
                self._waiter.wait(waiting, self._call.text)
        for each in every:
            each.work = None
        if messages is None:
            self._issued.end()
            self._issued = UNWATCHED

    def land(self) -> None:
        """Wait for all messages in a thread besides that of the program, which watches the peers.

        A :meth:`wait` that follows returns at once.

        Raises:
            RuntimeError: a peer is lost, in gloo's words.
        """
        for each in (*self._receives, *self._sends):
            if each.work is not None:
                each.work.wait()
                each.work = None
        self._issued.end()
        self._issued = UNWATCHED

    @property
    def held(self) -> list[object]:
        """The memory and gloo's works, which must live until the messages have been waited for."""
        every = (*self._sends, *self._receives)
        return [part for each in every for part in (each.tensor, each.work)]

    def _tag(self, number: int) -> int:
        return (self._call.digest + number) % MAX_TAG
