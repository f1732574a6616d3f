"""Rows to every rank of a group, at once: an all-to-all of bytes that other work can overlap.

    rank 0 has rows 0 1 2        row r of rank p arrives        rank 0 gets row 0 of ranks 0 1 2
    rank 1 has rows 0 1 2        in row p of rank r             rank 1 gets row 1 of ranks 0 1 2

Averages whose summands travel encoded are made of two of these (see :mod:`shardwise.diloco`). On
gloo, rows leave from where they lie as messages; elsewhere it is one ``all_to_all_single``.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from shardwise.transport.base import Label, PendingWork, Work
from shardwise.transport.collective_log import CollectiveLog
from shardwise.transport.gloo import MAX_TAG, Messages
from shardwise.transport.peers import Waiter, backend_name, naming_lost_peer

#: What gloo still reads or writes, by group. A swap that nobody waits for any more, after an
#: exception say, has to stay: with its memory gone nothing else would arrive on that connection.
_under_way: weakref.WeakKeyDictionary[dist.ProcessGroup, list[list[object]]] = (
    weakref.WeakKeyDictionary()
)


class AllToAll:
    """Swaps rows between the ranks of one process group.

    Args:
        group: the process group.
        device: where rows live.

    Attributes:
        rank: of this process in the group.
        world_size: number of ranks in the group.
        bytes_sent: what has left this rank for others so far, without the headers of the network.

    Raises:
        ValueError: the group has no backend for the device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.bytes_sent = 0
        self._group = group
        self._log = CollectiveLog(group)
        messages = backend_name(group, device) == "gloo" and device.type == "cpu"
        self._waiter = Waiter(group, self._log) if messages else None

    def start(self, rows: torch.Tensor, received: torch.Tensor, label: Label) -> Work:
        """Begin to send row ``r`` of ``rows`` to rank ``r``, for every rank.

        Args:
            rows: uint8, ``(world_size, bytes)``, every row contiguous; rows may be one memory.
            received: the same shape, contiguous: row ``r`` becomes what rank ``r`` sent here.
            label: what the caller calls it; equal on all ranks. Of two swaps with different labels
                either may be started first.

        Returns:
            The work to wait for; both tensors are left alone until then.
        """
        call = self._log.note("exchange", [received], label)
        self.bytes_sent += (self.world_size - 1) * rows.shape[1]
        if self._waiter is None:
            rows = rows.contiguous()
            with naming_lost_peer(self._group, call.text):
                work = dist.all_to_all_single(received, rows, group=self._group, async_op=True)

            def finish(rows: torch.Tensor = rows) -> None:  # held until it has left
                with naming_lost_peer(self._group, call.text):
                    work.wait()

            return PendingWork(finish)
        exchange = Messages(self._group, self._waiter, call.text, call.mark % MAX_TAG)
        # Each rank begins with its next neighbour, so that not all write to rank 0 first.
        for step in range(1, self.world_size):
            peer = (self.rank + step) % self.world_size
            exchange.send(rows[peer], peer, 0)
            exchange.recv(received[peer], peer, 0)
        exchange.start()
        received[self.rank].copy_(rows[self.rank])
        kept = exchange.held
        under_way = _under_way.setdefault(self._group, [])
        under_way.append(kept)

        def wait() -> None:
            exchange.wait()
            under_way[:] = [each for each in under_way if each is not kept]

        return PendingWork(wait)
