"""The seam: what keeps the bytes of states, and moves them from and to staging memory.

DiskStore     a file; computes on the CPU or on an accelerator
HostStore     memory of the host, pinned; computes on an accelerator
PlannedStore  nothing: a plan rehearses steps on tensors without memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import torch

from shardwise.base import devices
from shardwise.base.scratch.file import Run, ScratchFile
from shardwise.optim.offloaded.staging import StagingBlock, aligned_memory

#: Waits until bytes have arrived: the host, or the current stream of a device.
Wait = Callable[[], None]


class Store(Protocol):
    """What keeps bytes. Offsets are its own."""

    @property
    def nbytes(self) -> int:
        """How many bytes are kept."""

    def allocate(self, nbytes: int) -> int:
        """Return the offset of bytes to keep.

        Raises:
            OffloadError: there is no room for them.
        """

    def free(self, offset: int, nbytes: int) -> None:
        """Keep some bytes no longer."""

    def home(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return kept bytes as memory that the host can read and write, while none of them move."""

    def make_block(self, nbytes: int) -> StagingBlock:
        """Make a block of staging memory."""

    def fetch(self, block: StagingBlock, runs: Sequence[Run]) -> Wait:
        """Start to move kept bytes into a block.

        Returns:
            What waits for them. It raises ``OffloadError`` if they could not be read.
        """

    def put(self, block: StagingBlock, runs: Sequence[Run]) -> Wait:
        """Start to move bytes from a block to where they are kept.

        Returns:
            What waits for them. It raises ``OffloadError`` if they could not be written.
        """


class DiskStore:
    """A file without a name. On an accelerator, bytes go through pinned memory.

    Args:
        folder: of the file.
        device: what computes.

    Raises:
        OffloadError: no file can be made there.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._file = ScratchFile(folder)
        self._device = device

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self._file.nbytes

    def allocate(self, nbytes: int) -> int:
        """Set bytes aside in the file."""
        return self._file.allocate(nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """Keep some bytes no longer."""
        self._file.free(offset, nbytes)

    def home(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a part of the file as memory."""
        return self._file.map(offset, nbytes)

    def make_block(self, nbytes: int) -> StagingBlock:
        """Make a block of staging memory."""
        host = aligned_memory(nbytes, self._device)
        if self._device.type == devices.CPU.type:
            return StagingBlock(host, host)
        return StagingBlock(torch.empty(nbytes, dtype=torch.uint8, device=self._device), host)

    def fetch(self, block: StagingBlock, runs: Sequence[Run]) -> Wait:
        """Start to read."""
        reads = self._file.read(block.host, runs)

        def wait() -> None:
            _wait_for(reads)
            if block.host is not block.memory:
                for run in runs:
                    part = slice(run.at, run.at + run.nbytes)
                    block.memory[part].copy_(
                        block.host[part], non_blocking=devices.pins(self._device)
                    )

        return wait

    def put(self, block: StagingBlock, runs: Sequence[Run]) -> Wait:
        """Start to write."""
        if block.host is not block.memory:
            # The host waits for the device here: threads write what has arrived.
            for run in runs:
                part = slice(run.at, run.at + run.nbytes)
                block.host[part].copy_(block.memory[part])
        writes = self._file.write(block.host, runs)
        return lambda: _wait_for(writes)


class HostStore:
    """Pinned memory of the host, for an accelerator.

    Where memory is pinned, copies run on a stream of their own, beside what the device computes.

    Args:
        device: what computes: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, torch.Tensor] = {}
        self._next = 0
        self._nbytes = 0
        self._stream = devices.new_stream(device) if devices.pins(device) else None

    @property
    def nbytes(self) -> int:
        """How many bytes of pinned memory are kept."""
        return self._nbytes

    def allocate(self, nbytes: int) -> int:
        """Allocate pinned memory."""
        offset = self._next
        self._kept[offset] = aligned_memory(nbytes, self._device)
        self._next += nbytes
        self._nbytes += nbytes
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Free pinned memory."""
        del self._kept[offset]
        self._nbytes -= nbytes

    def home(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return that memory."""
        return self._kept[offset]

    def make_block(self, nbytes: int) -> StagingBlock:
        """Make a block of memory on the device."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return StagingBlock(memory, memory)

    def fetch(self, block: StagingBlock, runs: Sequence[Run]) -> Wait:
        """Start to copy to the device. The wait is for the current stream."""
        copied = self._start(block, runs, self._to_device)

        def wait() -> None:
            if copied is not None:
                devices.current_stream(self._device).wait_event(copied)

        return wait

    def put(self, block: StagingBlock, runs: Sequence[Run]) -> Wait:
        """Start to copy to the host. The wait is for the host, which may read it then."""
        copied = self._start(block, runs, self._to_host)

        def wait() -> None:
            if copied is not None:
                copied.synchronize()

        return wait

    def _to_device(self, mine: torch.Tensor, kept: torch.Tensor) -> None:
        mine.copy_(kept, non_blocking=self._stream is not None)

    def _to_host(self, mine: torch.Tensor, kept: torch.Tensor) -> None:
        kept.copy_(mine, non_blocking=self._stream is not None)

    def _start(
        self,
        block: StagingBlock,
        runs: Sequence[Run],
        copy: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> torch.Event | None:
        """Copy on the stream of copies, and return an event that was recorded after it."""
        if self._stream is None:
            self._copy(block, runs, copy)
            return None
        computing = devices.current_stream(self._device)
        # What computed with the block, or with its memory before it was one, comes first.
        self._stream.wait_event(computing.record_event())
        with self._stream:
            self._copy(block, runs, copy)
        return self._stream.record_event()

    def _copy(
        self,
        block: StagingBlock,
        runs: Sequence[Run],
        copy: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        for run in runs:
            at = run.at
            for kept in self._pieces(run):
                copy(block.memory[at : at + kept.numel()], kept)
                at += kept.numel()

    def _pieces(self, run: Run) -> Iterator[torch.Tensor]:
        """What is kept of a run, tensor by tensor."""
        offset = run.offset
        while offset < run.offset + run.nbytes:
            yield self._kept[offset]
            offset += self._kept[offset].numel()


class PlannedStore:
    """Nothing but offsets: blocks are tensors without memory, and homes are on the meta device."""

    def __init__(self) -> None:
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """How many bytes would be kept."""
        return self._nbytes

    def allocate(self, nbytes: int) -> int:
        """Count bytes."""
        self._nbytes += nbytes
        return self._nbytes - nbytes

    def free(self, offset: int, nbytes: int) -> None:
        """Count fewer bytes."""
        self._nbytes -= nbytes

    def home(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes on the meta device."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def make_block(self, nbytes: int) -> StagingBlock:
        """Make a block without memory."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return StagingBlock(memory, memory)

    def fetch(self, block: StagingBlock, runs: Sequence[Run]) -> Wait:
        """Do nothing."""
        return lambda: None

    def put(self, block: StagingBlock, runs: Sequence[Run]) -> Wait:
        """Do nothing."""
        return lambda: None


def _wait_for(transfers: Sequence[Future[None]]) -> None:
    """Wait for all, and then raise the first error."""
    for each in transfers:
        each.exception()
    for each in transfers:
        each.result()
