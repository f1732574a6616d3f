"""An all-to-all that other work can overlap: a row for every rank, from every rank.

    rank 0 has rows 0 1 2        row r of rank p arrives        rank 0 gets row 0 of ranks 0 1 2
    rank 1 has rows 0 1 2        in row p of rank r             rank 1 gets row 1 of ranks 0 1 2

Averages of encoded values take two of these, with rows of equal length (see
:mod:`shardwise.diloco`); matrices that ranks share out take two with rows of any length (see
:mod:`shardwise.optim`). On gloo, rows leave from where they lie, as messages; elsewhere this is one
``all_to_all_single``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.devices import Backend
from shardwise.transport.base import Label, PendingWork, Work
from shardwise.transport.collective_log import Call, CollectiveLog
from shardwise.transport.gloo import MAX_TAG, Messages
from shardwise.transport.peers import Peers
from shardwise.transport.waiter import Launched, Waiter


class AllToAll:
    """An all-to-all over the ranks of one process group.

    Args:
        group: the process group.
        device: the device of the rows.
        backend: the backend for it; by default that of the group.

    Attributes:
        group: the process group.
        rank: this process's rank in the group.
        world_size: the number of ranks in the group.
        bytes_sent: the bytes that this rank has sent to others so far, without network headers.

    Raises:
        ValueError: the group has no backend for the device.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, backend: Backend | None = None
    ) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.bytes_sent = 0
        self.group = group
        self._device = device
        self._peers = Peers(group)
        backend = self._peers.backend(device) if backend is None else backend
        self._log = CollectiveLog(self._peers, backend.name)
        self._waiter = Waiter(self._peers, self._log.compare) if backend.sends_messages else None

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
        if self._waiter is not None:
            return self._send(call, self._waiter, rows.unbind(), received.unbind())
        rows = rows.contiguous()
        return self._collect(
            call, rows, rows.nbytes - rows[0].nbytes, lambda: self._launch(received, rows)
        )

    def start_uneven(
        self,
        sent: torch.Tensor,
        sizes: Sequence[int],
        received: torch.Tensor,
        their_sizes: Sequence[int],
        label: Label,
    ) -> Work:
        """Start to send the next ``sizes[r]`` elements of ``sent`` to rank ``r``, for every rank.

        Args:
            sent: 1-D, contiguous, ``sum(sizes)`` elements.
            sizes: the number of elements for each rank, which may be 0.
            received: 1-D, contiguous, ``sum(their_sizes)`` elements, of the same dtype: what the
                ranks sent here, in their order.
            their_sizes: the number of elements from each rank: what that rank gives as the size for
                this one.
            label: as in :meth:`start`. Its detail has to tell calls with other sizes apart.

        Returns:
            The work to wait for; leave both tensors alone until then.
        """
        call = self._log.add("all-to-all", [], label)
        rows, landing = torch.split(sent, list(sizes)), torch.split(received, list(their_sizes))
        if self._waiter is not None:
            return self._send(call, self._waiter, rows, landing)
        to_others = sent.nbytes - rows[self.rank].nbytes
        return self._collect(
            call, sent, to_others, lambda: self._launch(received, sent, their_sizes, sizes)
        )

    def exchange_numbers(self, mine: int, label: Label) -> list[int]:
        """Gather a number from every rank, and wait for them.

        Args:
            mine: this rank's number, in 63 bits.
            label: as in :meth:`start`.

        Returns:
            The numbers in rank order.

        Raises:
            PeerLostError: a peer is lost.
        """
        sent = torch.full((self.world_size,), mine, dtype=torch.int64, device=self._device)
        received = torch.empty_like(sent)
        ones = [1] * self.world_size
        self.start_uneven(sent, ones, received, ones, label).wait()
        return self._values(received)

    def abandon(self) -> None:
        """Let the others notice that this rank will not finish what it has begun with them.

        On gloo their waits end with ``PeerLostError`` at once, and the group is of no more use.
        """
        if self._waiter is not None:
            self._peers.hang_up()

    # A rehearsal sends nothing, and has others here.

    def _values(self, numbers: torch.Tensor) -> list[int]:
        return [int(number) for number in numbers.tolist()]

    @property
    def _messages_type(self) -> type[Messages]:
        return Messages

    def _launch(
        self,
        received: torch.Tensor,
        rows: torch.Tensor,
        their_sizes: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Launched:
        work: Launched = dist.all_to_all_single(
            received,
            rows,
            None if their_sizes is None else list(their_sizes),
            None if sizes is None else list(sizes),
            group=self.group,
            async_op=True,
        )
        return work

    def _collect(
        self, call: Call, rows: torch.Tensor, nbytes: int, launch: Callable[[], Launched]
    ) -> Work:
        """Launch one collective; ``nbytes`` of ``rows`` are for others."""
        self.bytes_sent += nbytes
        issued = self._log.issue(call, 1, lambda: nbytes)
        with self._peers.collective(call.text):
            work = launch()

        def finish(rows: torch.Tensor = rows) -> None:  # holds the rows until they have left
            with issued, self._peers.collective(call.text):
                work.wait()
            issued.end()

        return PendingWork(finish)

    def _send(
        self,
        call: Call,
        waiter: Waiter,
        rows: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
    ) -> Work:
        """Send every row as a message."""
        nbytes = sum(row.nbytes for row in rows) - rows[self.rank].nbytes
        self.bytes_sent += nbytes
        messages = self._messages_type(
            self.group,
            waiter,
            call.text,
            call.digest % MAX_TAG,
            lambda launches: self._log.issue(call, launches, lambda: nbytes),
        )
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
