"""An all-to-all that other work can overlap: a row for every rank, from every rank.

    rank 0 has rows 0 1 2        row r of rank p arrives        rank 0 gets row 0 of ranks 0 1 2
    rank 1 has rows 0 1 2        in row p of rank r             rank 1 gets row 1 of ranks 0 1 2

Sums of encoded values take two of these, with rows of equal length (see
:mod:`shardwise.transport.encoded`); matrices that ranks share out take two with rows of any
length (see :mod:`shardwise.optim`). On gloo, rows leave from where they lie, as messages; elsewhere
this is one collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.transport.base import Label
from shardwise.transport.carrier import Collective, carrier
from shardwise.transport.collective_log import CollectiveLog, LoggedCall
from shardwise.transport.collectives import all_gather_function
from shardwise.transport.gloo import Messages
from shardwise.transport.peers import Peers
from shardwise.transport.runner import Exchange
from shardwise.transport.waiter import Launched, Waiter


class AllToAll:
    """An all-to-all over the ranks of one process group.

    Args:
        group: the process group.
        device: the device of the rows.
        log: the log of a transport over the same ranks whose calls are in one order with these.

    Attributes:
        group: the process group.
        rank: this process's rank in the group.
        world_size: the number of ranks in the group.
        bytes_sent: the bytes that this rank has sent to others so far, without network headers.

    Raises:
        ValueError: the group has no backend for the device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        log: CollectiveLog | None = None,
    ) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.bytes_sent = 0
        self.group = group
        self._ends = carrier().ends(group)
        self._device = device
        self._peers = Peers(group)
        backend = carrier().backend(self._peers, device)
        self._log = CollectiveLog(self._peers, backend.name) if log is None else log
        self._counting = threading.Lock()
        self._waiter = Waiter(self._peers, self._log.compare) if backend.sends_messages else None

    def log(self, received: torch.Tensor, label: Label) -> LoggedCall:
        """Log a call of :meth:`share` that starts later. Ranks log their calls in the same order.

        Args:
            received: as there.
            label: as in :meth:`start`.

        Returns:
            The call, to start it.
        """
        return self._log.add("all-to-all", [received], label)

    def start(
        self,
        rows: torch.Tensor,
        received: torch.Tensor,
        label: Label,
        sizes: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Exchange:
        """Start to send row ``r`` of ``rows`` to rank ``r``, for every rank.

        Args:
            rows: ``(world_size, items)``, contiguous. With ``sizes``: 1-D, one row after the other.
            received: the same shape, contiguous, of the same dtype: row ``r`` becomes what rank
                ``r`` sent here.
            label: the caller's name for it; equal on all ranks. Calls with different labels may
                start in any order where rows are messages.
            sizes: of rows that are not equally long, the number of elements for each rank, and of
                those from each rank, which may be 0. The label's detail has to tell calls with
                other sizes apart.

        Returns:
            The work to wait for; leave both tensors alone until then.
        """
        if sizes is None:
            call = self.log(received, label)
            leaving, landing, cuts = rows.unbind(), received.unbind(), []
        else:
            call = self._log.add("all-to-all", [], label)
            cuts = [list(sizes[1]), list(sizes[0])]
            leaving, landing = torch.split(rows, cuts[1]), torch.split(received, cuts[0])
        if self._waiter is not None:
            return self._send(call, self._waiter, leaving, landing)
        exchange = Collective.of(dist.all_to_all_single, received, rows, *cuts, group=self.group)
        return self._collect(call, rows, rows.nbytes - leaving[self.rank].nbytes, exchange)

    def share(self, row: torch.Tensor, received: torch.Tensor, call: LoggedCall) -> Exchange:
        """Start to send the same row to every rank.

        Args:
            row: uint8, 1-D, contiguous.
            received: uint8, ``(world_size, bytes)``, contiguous, in other memory: row ``r`` becomes
                what rank ``r`` sent.
            call: what :meth:`log` returned.

        Returns:
            The work to wait for; leave both tensors alone until then.
        """
        if self._waiter is not None:
            return self._send(call, self._waiter, [row] * self.world_size, received.unbind())
        to_others = row.nbytes * (self.world_size - 1)
        gather = Collective.of(all_gather_function(), received.view(-1), row, group=self.group)
        return self._collect(call, row, to_others, gather)

    def wait_for(self, job: Launched, doing: str) -> None:
        """Wait for what another thread does with these ranks, and watch them meanwhile.

        Args:
            job: raises what the backend raised.
            doing: what it does, such as ``"the all-reduce of model.layers.3"``.

        Raises:
            PeerLostError: a peer is lost.
            RanksDivergedError: a peer has called something else.
        """
        if self._waiter is not None:
            self._waiter.wait([(job, None)], doing)
        else:
            job.wait()

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
        sent = torch.full((self.world_size, 1), mine, dtype=torch.int64, device=self._device)
        received = torch.empty_like(sent)
        self.start(sent, received, label).wait()
        return carrier().numbers(received.view(-1), mine)

    def abandon(self) -> None:
        """Let the others notice that this rank will not finish what it has begun with them.

        On gloo their waits end with ``PeerLostError`` at once, and the group is of no more use.
        """
        if self._waiter is not None:
            self._peers.hang_up()

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.bytes_sent += nbytes

    def _collect(
        self, call: LoggedCall, rows: torch.Tensor, nbytes: int, collective: Collective
    ) -> Exchange:
        """Launch one collective; ``nbytes`` of ``rows`` are for others."""
        self._count(nbytes)
        issued = self._log.issue(call, 1, lambda: nbytes)
        with self._peers.collective(call.text):
            work = carrier().launch([collective])

        def finish(rows: torch.Tensor = rows) -> None:  # holds the rows until they have left
            with issued, self._peers.collective(call.text):
                work.wait()
            issued.end()

        return Exchange(finish, finish)

    def _send(
        self,
        call: LoggedCall,
        waiter: Waiter,
        rows: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
    ) -> Exchange:
        """Send every row as a message."""
        nbytes = sum(row.nbytes for row in rows) - rows[self.rank].nbytes
        self._count(nbytes)
        messages = Messages(self._ends, waiter, self._log, call, lambda: nbytes)
        # Each rank begins with its next neighbor, so that not all write to rank 0 first.
        for step in range(1, self.world_size):
            peer = (self.rank + step) % self.world_size
            messages.send(rows[peer], peer, 0)
            messages.recv(received[peer], peer, 0)
        messages.start()
        received[self.rank].copy_(rows[self.rank])
        under_way = self._peers.once(_under_way)
        held = messages.held
        under_way[id(held)] = held  # threads may do so at the same time

        def wait(how: Callable[[], None]) -> None:
            how()
            under_way.pop(id(held), None)

        return Exchange(lambda: wait(messages.wait), lambda: wait(messages.land))


def _under_way(peers: Peers) -> dict[int, list[object]]:
    """List what gloo still reads or writes for a process group.

    An all-to-all that is no longer waited for, after an exception say, has to keep its memory:
    without it nothing else would arrive on that connection.
    """
    return {}
