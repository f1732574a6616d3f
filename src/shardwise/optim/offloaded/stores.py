"""What keeps the bytes of states, and the memory in which they are while a step needs them.

DiskStore     a file; computes on the CPU or on an accelerator
HostStore     memory of the host, pinned; computes on an accelerator
PlannedStore  nothing: a plan rehearses steps on tensors without memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shardwise.base import devices, observe
from shardwise.base.observe import Memory
from shardwise.base.scratch.file import ALIGNMENT, KeptPart, ScratchFile

observe.ALLOCATES[__file__] = Memory.OPTIMIZER

#: Waits until bytes have arrived: the host, or the current stream of a device.
Wait = Callable[[], None]


@dataclass(eq=False)
class StagingBlock:
    """A piece of staging memory.

    Attributes:
        memory: bytes, on the device that computes.
        host: bytes on the host that go to a disk: those of ``memory`` itself, on the CPU.
    """

    memory: torch.Tensor
    host: torch.Tensor

    def parts(self, parts: Sequence[KeptPart]) -> list[torch.Tensor]:
        """Return parts of ``memory``, each as large as what keeps it."""
        return [self.memory[at : at + kept.numel()] for at, kept in parts]


class StateStaging:
    """Blocks of memory, up to a limit.

    One block may be larger than the limit. Then it is the only one.

    Args:
        limit: bytes of all blocks.
        make: makes a block of a number of bytes.
    """

    def __init__(self, limit: int, make: Callable[[int], StagingBlock]) -> None:
        self._limit = limit
        self._make = make
        self._free: list[StagingBlock] = []
        self._used = 0  # bytes of blocks that are out
        self._largest = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self._used + sum(_size(block) for block in self._free)

    def acquire(self, nbytes: int) -> StagingBlock | None:
        """Return a block of at least ``nbytes`` bytes; ``None`` if others have to be released."""
        self._largest = max(self._largest, nbytes)
        for i, block in enumerate(self._free):
            if _size(block) >= nbytes:
                self._used += _size(block)
                return self._free.pop(i)
        # Blocks of one size can take each other's place.
        size = self._largest if self._used + self._largest <= self._limit else nbytes
        if self._used and self._used + size > self._limit:
            return None
        while self._free and self.nbytes + size > self._limit:
            self._free.pop()
        self._used += size
        block = self._make(size)
        observe.memory_of(Memory.OPTIMIZER, "", block.memory)
        return block

    def release(self, block: StagingBlock) -> None:
        """Take a block back, for others."""
        self._used -= _size(block)
        self._free.append(block)

    def clear(self) -> None:
        """Free the memory of all blocks, and forget how large they were.

        No block is out, but for those of a step that was interrupted before it could return them.
        """
        self._free.clear()
        self._largest = self._used = 0


class Store(Protocol):
    """What keeps bytes. Each part of a block goes with the memory that keeps it."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory to keep bytes in, which is free again when it is no longer held.

        The host can read and write it while none of them move.

        Raises:
            OffloadError: there is no room for them.
        """

    def make_block(self, nbytes: int) -> StagingBlock:
        """Make a block of staging memory."""

    def fetch(self, block: StagingBlock, parts: Sequence[KeptPart]) -> Wait:
        """Start to move kept bytes into a block.

        Returns:
            What waits for them. It raises ``OffloadError`` if they could not be read.
        """

    def put(self, block: StagingBlock, parts: Sequence[KeptPart]) -> Wait:
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

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Set bytes aside in the file."""
        return self._file.memory(nbytes)

    def make_block(self, nbytes: int) -> StagingBlock:
        """Make a block of staging memory."""
        host = aligned_memory(nbytes, self._device)
        if self._device.type == devices.CPU.type:
            return StagingBlock(host, host)
        return StagingBlock(torch.empty(nbytes, dtype=torch.uint8, device=self._device), host)

    def fetch(self, block: StagingBlock, parts: Sequence[KeptPart]) -> Wait:
        """Start to read."""
        reads = self._file.read(block.host, parts)

        def wait() -> None:
            _wait_for(reads)
            if block.host is not block.memory:
                for on_device, (at, kept) in zip(block.parts(parts), parts, strict=True):
                    here = block.host[at : at + kept.numel()]
                    on_device.copy_(here, non_blocking=devices.pins(self._device))

        return wait

    def put(self, block: StagingBlock, parts: Sequence[KeptPart]) -> Wait:
        """Start to write."""
        if block.host is not block.memory:
            # The host waits for the device here: threads write what has arrived.
            for on_device, (at, kept) in zip(block.parts(parts), parts, strict=True):
                block.host[at : at + kept.numel()].copy_(on_device)
        writes = self._file.write(block.host, parts)
        return lambda: _wait_for(writes)


class HostStore:
    """Pinned memory of the host, for an accelerator.

    Where memory is pinned, copies run on a stream of their own, beside what the device computes.

    Args:
        device: what computes: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = devices.new_stream(device) if devices.pins(device) else None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned memory."""
        return aligned_memory(nbytes, self._device)

    def make_block(self, nbytes: int) -> StagingBlock:
        """Make a block of memory on the device."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return StagingBlock(memory, memory)

    def fetch(self, block: StagingBlock, parts: Sequence[KeptPart]) -> Wait:
        """Start to copy to the device. The wait is for the current stream."""
        homes = (kept for _, kept in parts)
        copied = self._start(zip(block.parts(parts), homes, strict=True))

        def wait() -> None:
            if copied is not None:
                devices.current_stream(self._device).wait_event(copied)

        return wait

    def put(self, block: StagingBlock, parts: Sequence[KeptPart]) -> Wait:
        """Start to copy to the host. The wait is for the host, which may read it then."""
        homes = (kept for _, kept in parts)
        copied = self._start(zip(homes, block.parts(parts), strict=True))

        def wait() -> None:
            if copied is not None:
                copied.synchronize()

        return wait

    def _start(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Event | None:
        """Copy to the first of two tensors from the second, on the stream of copies.

        Returns:
            An event that was recorded after all of them; ``None`` if the host has waited.
        """
        if self._stream is None:
            for target, source in copies:
                target.copy_(source)
            return None
        computing = devices.current_stream(self._device)
        # What computed with the block, or with its memory before it was one, comes first.
        self._stream.wait_event(computing.record_event())
        with self._stream:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class PlannedStore:
    """Nothing: blocks are tensors without memory, and what is kept is on the meta device."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return bytes on the meta device."""
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def make_block(self, nbytes: int) -> StagingBlock:
        """Make a block without memory."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return StagingBlock(memory, memory)

    def fetch(self, block: StagingBlock, parts: Sequence[KeptPart]) -> Wait:
        """Do nothing."""
        return lambda: None

    put = fetch


def aligned_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate bytes on the host that begin where direct I/O can read and write.

    They are pinned if that makes copies from and to ``device`` faster.
    """
    memory = devices.host_memory(nbytes + ALIGNMENT, device)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + nbytes]


def _wait_for(transfers: Sequence[Future[None]]) -> None:
    """Wait for all, and then raise the first error."""
    for each in transfers:
        each.exception()
    for each in transfers:
        each.result()


def _size(block: StagingBlock) -> int:
    return block.memory.numel()
