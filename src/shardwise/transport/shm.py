"""Ranks on one host, tensors on the CPU: shared memory in place of messages.

    all-gather        the full parameters live once, where all ranks see them: a shard is a part of
                      them already, or is written (and converted) in place by its rank. Every rank
                      waits until all have come so far
    reduce-scatter    every rank lays out the chunks of its peers, waits until all have, and adds up
                      its own chunk over all ranks, in their order
    all-reduce        the same, with the whole tensor

Nothing is copied that a peer wrote, and nothing passes through the kernel. Ranks that wait sleep.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise import _torch
from shardwise.errors import RanksDivergedError
from shardwise.transport.arena import Window, ranges
from shardwise.transport.base import NO_LABEL, CommonFull, FullBuffers, Label, Reduce, Work
from shardwise.transport.calls import Call, CallLog
from shardwise.transport.common import SharedFull, is_worthwhile
from shardwise.transport.departures import Departures
from shardwise.transport.exchange import Exchange, Part, lay_out, tensors_in
from shardwise.transport.flat import as_rows
from shardwise.transport.meeting import Meeting
from shardwise.transport.pages import PageMap
from shardwise.transport.peers import peer_lost
from shardwise.transport.shared import Pool, SharedBuffers
from shardwise.transport.signals import MARKS, Count, Signals
from shardwise.transport.sums import add_in_order, exact_factor, wire_dtype
from shardwise.transport.work import PendingWork

_LOOK_SECONDS = 0.1
_COMPARE_SECONDS = 3.0


class ShmTransport:
    """The ranks of one process group that share memory.

    Args:
        group: the process group.
        meeting: of its ranks.
    """

    name = "shm"
    literal = False
    runs_behind = False

    def __init__(self, group: dist.ProcessGroup, meeting: Meeting) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self._group_ref = weakref.ref(group)  # which this lives as long as, and no longer
        self._meeting = meeting
        self._peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self._log = CallLog(group)
        common, *own = ranges(meeting.fd, 1 + self.world_size)
        self._signals = Signals(common, self.rank, self.world_size)
        self._departures = Departures(common, self.rank, self.world_size)
        self._pool = Pool(
            common,
            self._departures,
            lambda frees: self._signals.set(Count.FREED, frees),
            lambda frees: self._wait_for_all(
                Count.FREED, frees, f"the wait for memory that follows {self._log.last}"
            ),
        )
        self._pagemap = PageMap()
        self._exchange = Exchange(
            own[self.rank],
            lambda: min(self._signals.get(Count.DONE, peer) for peer in self._peers),
        )
        self._shared: weakref.WeakValueDictionary[int, SharedBuffers] = (
            weakref.WeakValueDictionary()
        )
        self._common: weakref.WeakValueDictionary[int, SharedFull] = weakref.WeakValueDictionary()
        self._posted = 0
        self._has_common = False
        self._settled = 0
        self._uses = 0
        self._open: set[int] = set()
        weakref.finalize(self, meeting.close).atexit = False

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FullBuffers:
        """Make (not yet allocated) memory to gather into, which all ranks have in common."""
        buffers = SharedBuffers(self._pool, self._pagemap, numels, dtypes)
        for tensor in buffers.tensors:
            if tensor.numel():
                self._shared[tensor.data_ptr()] = buffers
        return buffers

    def common_full(self, chunk_numel: int, dtype: torch.dtype) -> CommonFull | None:
        """Make a full parameter that all ranks have in common, unless it is small."""
        if not is_worthwhile(self.world_size * chunk_numel * dtype.itemsize):
            return None
        self._has_common = True
        made = SharedFull(
            self._pool.arena,
            self._departures,
            self._pagemap,
            self.rank,
            self.world_size,
            chunk_numel,
            dtype,
        )
        self._common[made.full.data_ptr()] = made
        return made

    def settle(self) -> None:
        """Wait until all ranks have come here as often."""
        if self._has_common:
            self._settled += 1
            self._signals.set(Count.SETTLED, self._settled)
            self._wait_for_all(
                Count.SETTLED, self._settled, f"the wait that follows {self._log.last}"
            )

    def all_gather(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], label: Label = NO_LABEL
    ) -> Work:
        """Write this rank's chunks where all see them."""
        call = self._log.note("all-gather", fulls, label)
        places, apart = self._write_in_place(shards, fulls, call)
        laid_out = self._lay_out(
            [fulls[i].numel() // self.world_size for i in apart], [fulls[i].dtype for i in apart]
        )
        for part, i in zip(laid_out.own, apart, strict=True):
            part[: shards[i].numel()].copy_(shards[i])
        number = self._post(call, laid_out, places)

        def finish() -> None:
            self._wait_for_post(number, call, places)
            for rank in range(self.world_size) if apart else ():
                for i, part in zip(apart, laid_out.of(rank, number), strict=True):
                    as_rows(fulls[i], self.world_size)[rank].copy_(part)

        return self._pending(finish, laid_out)

    def reduce_scatter(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        op: Reduce,
        label: Label = NO_LABEL,
    ) -> Work:
        """Lay out the chunks of the peers; add up, in the order of ranks, what they laid out."""
        call = self._log.note("reduce-scatter", shards, label)
        laid_out = self._lay_out(
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
        number = self._post(call, laid_out)

        def finish() -> None:
            self._wait_for_post(number, call)
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

        return self._pending(finish, laid_out)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: Reduce, label: Label = NO_LABEL
    ) -> Work:
        """Lay out the tensors; add up what all ranks laid out, in their order."""
        call = self._log.note("all-reduce", tensors, label)
        laid_out = self._lay_out(
            [tensor.numel() for tensor in tensors], [tensor.dtype for tensor in tensors]
        )
        for tensor, part in zip(tensors, laid_out.own, strict=True):
            part.copy_(tensor.view(-1))
        number = self._post(call, laid_out)
        divisor = self.world_size if op is Reduce.AVG else None

        def finish() -> None:
            self._wait_for_post(number, call)
            parts = [laid_out.of(rank, number) for rank in range(self.world_size)]
            for i, tensor in enumerate(tensors):
                if tensor.numel():
                    add_in_order(tensor.view(-1), [part[i] for part in parts], divisor)

        return self._pending(finish, laid_out)

    def see(self, rank: int, number: int, nbytes: int) -> Window:
        """The memory in which ``rank`` has laid out its tensors of collective ``number``."""
        place = self._signals.place(number, rank)
        self._check_room(number, rank)
        return self._exchange.see(rank, place, nbytes)

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise RuntimeError("the process group of this transport has been destroyed")
        return group

    # -- inside --------------------------------------------------------------------------------

    def _write_in_place(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], call: Call
    ) -> tuple[int, list[int]]:
        """Write this rank's chunks to those of ``fulls`` that all ranks see.

        Returns:
            A number that tells where those are, and which of ``fulls`` only this rank sees.
        """
        common = [self._common.get(full.data_ptr()) for full in fulls]
        shared = [self._shared.get(full.data_ptr()) for full in fulls]
        if any(buffers is not None and not buffers.is_fresh for buffers in shared):
            # Peers may still read what an earlier gather left there.
            self._wait_for_post(self._post(call), call)
            for each in shared:
                if each is not None:
                    each.forget_writes()
        places, apart = 0, []
        for i, (shard, full) in enumerate(zip(shards, fulls, strict=True)):
            own, buffers = common[i], shared[i]
            if own is not None:
                if own.chunk_address != shard.data_ptr():
                    own.chunk(shard.numel()).copy_(shard)
                places = _fold(places, own.at)
            elif buffers is not None:
                row = as_rows(buffers.for_all(full), self.world_size)[self.rank]
                row[: shard.numel()].copy_(shard)
                buffers.is_fresh = False
                places = _fold(places, buffers.at)
            elif full.numel():
                apart.append(i)
        return places, apart

    def _around(self, numel: int, chunk: int) -> list[tuple[int, int]]:
        """The ranges of a full that are not this rank's chunk."""
        first, last = self.rank * chunk, (self.rank + 1) * chunk
        return [(0, min(first, numel)), (min(last, numel), numel)]

    def _lay_out(self, numels: list[int], dtypes: list[torch.dtype]) -> _LaidOut:
        """Take memory in which this rank lays out tensors for its peers."""
        _, nbytes = lay_out(numels, dtypes)
        if nbytes == 0:
            return _LaidOut(self, numels, dtypes, 0, None)
        use = self._uses + 1
        self._open.add(use)
        self._uses = use
        return _LaidOut(self, numels, dtypes, nbytes, self._exchange.part(use, nbytes))

    def _pending(self, finish: Callable[[], None], laid_out: _LaidOut) -> Work:
        work = PendingWork(finish)
        part = laid_out.part
        if part is not None:
            # Over once it is finished, or dropped without a wait.
            over = weakref.finalize(work, self._finish_use, part.use, part)
            over.atexit = False
            work.then(over)
        return work

    def _finish_use(self, use: int, part: Part) -> None:
        """Note that this rank reads no more of a use; a garbage collector may call it any time."""
        part.is_open = False
        self._open.discard(use)
        self._signals.set(Count.DONE, min(self._open, default=self._uses + 1) - 1)

    def _post(self, call: Call, laid_out: _LaidOut | None = None, places: int = 0) -> int:
        """Tell that this rank has done its part of a collective; return its number."""
        self._posted += 1
        part = laid_out.part if laid_out is not None else None
        self._signals.describe(
            self._posted, _mark(call, places), part.at if part is not None else 0
        )
        self._signals.set(Count.POSTED, self._posted)
        return self._posted

    def _wait_for_post(self, number: int, call: Call, places: int = 0) -> None:
        mark = _mark(call, places)
        for peer in self._peers:
            self._wait_for(Count.POSTED, peer, number, call.text)
            if self._signals.mark(number, peer) != mark:
                self._check_room(number, peer)
                self._diverged(call)
            self._check_room(number, peer)

    def _check_room(self, number: int, peer: int) -> None:
        """Raise where ``peer`` may have overwritten what it told of collective ``number``."""
        behind = self._signals.get(Count.POSTED, peer) - number
        if behind >= MARKS - 1:  # the next one may be about to overwrite it
            raise RuntimeError(
                f"rank {self.rank} waits for a collective that is {behind} behind those of rank "
                f"{peer}; shared memory has room for {MARKS - 1} under way. Wait for them earlier, "
                "as with a smaller set_reduce_scatter_max_input_buffers"
            )

    def _wait_for_all(self, count: Count, value: int, doing: str) -> None:
        for peer in self._peers:
            self._wait_for(count, peer, value, doing)

    def _wait_for(self, count: Count, peer: int, value: int, doing: str) -> None:
        """Sleep until ``peer`` has come as far as ``value``.

        Raises:
            PeerLostError: it is gone, or did not come in the time of the process group.
            RanksDivergedError: it has called something else.
        """
        if self._signals.get(count, peer) >= value:
            return
        start = time.monotonic()
        compared = start
        while not self._signals.sleep(count, peer, value, _LOOK_SECONDS):
            now = time.monotonic()
            gone = self._meeting.gone()
            # Whoever is gone before it came so far never will; another may stay where it waits
            # for that one.
            if any(self._signals.get(count, each) < value for each in gone):
                self._log.compare_if_possible()
                cause = RuntimeError("its socket is closed")
                raise peer_lost(self._group, doing, cause, gone)
            if now - compared > _COMPARE_SECONDS:
                compared = now
                self._log.compare_if_possible()
            if now - start > _torch.timeout_of(self._group):
                cause = RuntimeError("timed out")
                raise peer_lost(self._group, doing, cause, [peer])

    def _diverged(self, call: Call) -> None:
        """Raise, with what the peer calls it if it says so in time."""
        deadline = time.monotonic() + 2 * _COMPARE_SECONDS
        while time.monotonic() < deadline:
            self._log.compare_if_possible()
            time.sleep(_LOOK_SECONDS)
        raise RanksDivergedError(f"ranks have diverged at {call.text}: not all of them called it")


class _LaidOut:
    """What the ranks lay out for each other in one collective."""

    def __init__(
        self,
        transport: ShmTransport,
        numels: list[int],
        dtypes: list[torch.dtype],
        nbytes: int,
        part: Part | None,
    ) -> None:
        self.part = part
        self._transport = transport
        self._sizes = numels, dtypes
        self._nbytes = nbytes
        self.own: list[torch.Tensor] = (
            [torch.empty(0, dtype=dtype) for dtype in dtypes]
            if part is None
            else tensors_in(part.window, numels, dtypes)
        )

    def of(self, rank: int, number: int) -> list[torch.Tensor]:
        """What ``rank`` has laid out in collective ``number``, which it has posted."""
        if self.part is None or rank == self._transport.rank:
            return self.own
        window = self._transport.see(rank, number, self._nbytes)
        return tensors_in(window, *self._sizes)


def _fold(places: int, at: int) -> int:
    page = at >> 12
    return (places * 31 + (page ^ page >> 32)) & 0xFFFFFFFF


def _mark(call: Call, places: int) -> int:
    """A 32-bit number that differs where ranks call, or have their full parameters, differently."""
    return (call.mark ^ places) & 0xFFFFFFFF
