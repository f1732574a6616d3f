"""The memory in which states are while a step needs them, in blocks that are used again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.base import devices, observe
from shardwise.base.observe import Memory
from shardwise.base.scratch.file import ALIGNMENT


@dataclass(eq=False)
class StagingBlock:
    """A piece of staging memory.

    Attributes:
        memory: bytes, on the device that computes.
        host: bytes on the host that go to a disk: those of ``memory`` itself, on the CPU.
    """

    memory: torch.Tensor
    host: torch.Tensor


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


def aligned(nbytes: int) -> int:
    """Round up to what direct I/O takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate bytes on the host that begin where direct I/O can read and write.

    They are pinned if that makes copies from and to ``device`` faster.
    """
    memory = devices.host_memory(nbytes + ALIGNMENT, device)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + nbytes]


def _size(block: StagingBlock) -> int:
    return block.memory.numel()
