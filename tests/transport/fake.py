"""A transport between simulated ranks that is stricter than a real one.

What a call will write holds no sensible value until the wait, and what a reduction reads must not
change before the wait. Ranks that allocate and free memory in different orders fail as soon as they
differ, as those that call different collectives do.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwise.base.errors import RanksDivergedError
from shardwise.simulated.group import Channel, SimulatedGroup
from shardwise.simulated.world import SimulatedTransport
from shardwise.transport.base import Call, Kind, Work
from shardwise.transport.memory import HeapBuffers

#: What each rank of a channel did to full buffers, in order, by the transport's name.
_memory: weakref.WeakKeyDictionary[Channel, dict[str, dict[int, list[str]]]] = (
    weakref.WeakKeyDictionary()
)


class FakeTransport(SimulatedTransport):
    """One rank of a simulated world.

    Args:
        group: a simulated process group.
        stands_for: the name of the transport that was asked for.

    Attributes:
        calls: the collectives of this rank, in order.
    """

    name = "fake"

    def __init__(self, group: dist.ProcessGroup, stands_for: str) -> None:
        super().__init__(group)
        assert isinstance(group, SimulatedGroup)
        self.overlaps_compute = stands_for in ("c10d", "collectives")
        self.calls: list[str] = []
        self._memory = _memory.setdefault(group.channel, {}).setdefault(stands_for, {})

    def start(self, call: Call) -> Work:
        """Start a collective on copies of its tensors."""
        kind = call.kind.value.replace("-", "_")
        op = "" if call.kind is Kind.ALL_GATHER else f"{call.op.name} "
        self.calls.append(f"{kind} {op}{call.label.name}".rstrip())
        reads = [] if call.kind is Kind.ALL_GATHER else list(call.inputs)
        copies = [each.detach().clone() for each in call.inputs]
        hidden = copies
        if call.kind is not Kind.ALL_REDUCE:
            hidden = [torch.empty_like(each) for each in call.outputs]
            for tensor in call.outputs:
                tensor.view(torch.uint8).fill_(0xFF)
        seen = [each.detach().clone() for each in reads]
        work = super().start(replace(call, inputs=copies, outputs=hidden))
        return FakeWork(work, list(zip(reads, seen, strict=True)), call.outputs, hidden)

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FakeBuffers:
        """Make (not yet allocated) memory to gather into."""
        return FakeBuffers(self, numels, dtypes, device)

    def note_memory(self, what: str) -> None:
        """Record what is done to full buffers, and compare it with the other ranks.

        Raises:
            RanksDivergedError: another rank did something else.
        """
        mine = self._memory.setdefault(self.rank, [])
        mine.append(what)
        for rank, theirs in self._memory.items():
            if len(theirs) >= len(mine) and theirs[len(mine) - 1] != what:
                raise RanksDivergedError(
                    f"rank {self.rank} had memory for {mine} and rank {rank} for {theirs}"
                )


class FakeBuffers(HeapBuffers):
    """Full tensors in private memory, filled with NaN at every allocation."""

    def __init__(
        self,
        transport: FakeTransport,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> None:
        super().__init__(numels, dtypes, device)
        self._transport = transport
        self._is_allocated = False

    def allocate(self) -> None:
        """Give every tensor its memory, with undefined contents; keep what is there already."""
        if not self._is_allocated:
            self._is_allocated = True
            self._transport.note_memory("allocate")
            super().allocate()
            for tensor in self.tensors:
                tensor.data.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype

    def free(self) -> None:
        """Give the memory of every tensor back."""
        if self._is_allocated:
            self._is_allocated = False
            self._transport.note_memory("free")
            super().free()


class FakeWork:
    """A collective whose results appear in :meth:`wait`."""

    def __init__(
        self,
        work: Work,
        reads: Sequence[tuple[torch.Tensor, torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        hidden: Sequence[torch.Tensor],
    ) -> None:
        self._work = work
        self._reads = reads
        self._writes = list(zip(outputs, hidden, strict=True))

    def wait(self) -> None:
        """Complete the collective, the first time.

        Raises:
            RanksDivergedError: another rank calls something else.
            PeerLostError: another rank never calls.
        """
        for tensor, copy in self._reads:
            same = torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
            assert same, "a tensor of a collective changed before the wait"
        self._work.wait()
        for output, hidden in self._writes:
            output.copy_(hidden)
        self._reads, self._writes = (), []
