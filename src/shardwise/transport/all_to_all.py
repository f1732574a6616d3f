"""An all-to-all of bytes that other work can overlap: a row for every rank, from every rank.

    rank 0 has rows 0 1 2        row r of rank p arrives        rank 0 gets row 0 of ranks 0 1 2
    rank 1 has rows 0 1 2        in row p of rank r             rank 1 gets row 1 of ranks 0 1 2

Averages of encoded values take two of these (see :mod:`shardwise.diloco`). On gloo, rows leave from
where they lie, as messages; elsewhere this is one ``all_to_all_single``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.transport.base import Label, PendingWork, Work
from shardwise.transport.collective_log import CollectiveLog
from shardwise.transport.gloo import MAX_TAG, Messages
from shardwise.transport.peers import Peers
from shardwise.transport.waiter import Waiter


class AllToAll:
    """An all-to-all over the ranks of one process group.

    Args:
        group: the process group.
        device: the device of the rows.

    Attributes:
        rank: this process's rank in the group.
        world_size: the number of ranks in the group.
        bytes_sent: the bytes that this rank has sent to others so far, without network headers.

    Raises:
        ValueError: the group has no backend for the device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.bytes_sent = 0
        self._group = group
        self._peers = Peers(group)
        self._log = CollectiveLog(self._peers)
        by_messages = self._peers.backend(device).sends_messages
        self._waiter = Waiter(self._peers, self._log.compare) if by_messages else None

    def start(self, rows: torch.Tensor, received: torch.Tensor, label: Label) -> Work:
        """Start to send row ``r`` of ``rows`` to rank ``r``, for every rank.

        Args:
            rows: uint8, ``(world_size, bytes)``, every row contiguous; rows may share memory.
            received: the same shape, contiguous: row ``r`` becomes what rank ``r`` sent here.
            label: the caller's name for it; equal on all ranks. Calls with different labels may
                start in any order.

        Returns:
            The work to wait for; leave both tensors alone until then.
        """
        call = self._log.add("all-to-all", [received], label)
        self.bytes_sent += (self.world_size - 1) * rows.shape[1]
        if self._waiter is None:
            rows = rows.contiguous()
            with self._peers.collective(call.text):
                work = dist.all_to_all_single(received, rows, group=self._group, async_op=True)

            def finish(rows: torch.Tensor = rows) -> None:  # holds the rows until they have left
                with self._peers.collective(call.text):
                    work.wait()

            return PendingWork(finish)
        messages = Messages(self._group, self._waiter, call.text, call.digest % MAX_TAG)
        # Each rank begins with its next neighbor, so that not all write to rank 0 first.
        for step in range(1, self.world_size):
            peer = (self.rank + step) % self.world_size
            messages.send(rows[peer], peer, 0)
            messages.recv(received[peer], peer, 0)
        messages.start()
        received[self.rank].copy_(rows[self.rank])
        held = messages.held
        under_way = self._peers.once(_under_way)
        under_way.append(held)

        def wait() -> None:
            messages.wait()
            under_way[:] = [each for each in under_way if each is not held]

        return PendingWork(wait)


def _under_way(peers: Peers) -> list[list[object]]:
    """List what gloo still reads or writes for a process group.

    An all-to-all that nobody waits for any more, after an exception say, has to keep its memory:
    without it nothing else would arrive on that connection.
    """
    return []
