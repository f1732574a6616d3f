"""Memory that one reduction after the other receives into."""

from __future__ import annotations

import torch

from shardwise.transport.hugepages import prefer_huge_pages

#: No larger block is kept: what lies idle between reductions is missing elsewhere.
KEPT_BYTES = 32 * 1024 * 1024

_ALIGN = 64


class Scratch:
    """One block of host memory, lent to one borrower at a time.

    Fresh memory costs page faults, which take longer than copying as much. So a block as large as
    the largest need so far is kept, up to :data:`KEPT_BYTES`. A borrower that needs more, or finds
    the block lent, gets fresh memory.
    """

    def __init__(self) -> None:
        self._block = _block(0)

    def borrow(self) -> Loan:
        """Lend the block."""
        block, self._block = self._block, _block(0)
        return Loan(self, block)

    def give_back(self, block: torch.Tensor) -> None:
        """Take a block back, and keep it if it is the largest that may be kept."""
        if self._block.numel() < block.numel() <= KEPT_BYTES:
            self._block = block


class Loan:
    """Tensors cut from a block."""

    def __init__(self, scratch: Scratch, block: torch.Tensor) -> None:
        self._scratch = scratch
        self._block = block
        self._taken = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of undefined contents, from fresh memory where the block is full."""
        start = self._taken
        end = start + numel * dtype.itemsize
        self._taken = (end + _ALIGN - 1) // _ALIGN * _ALIGN
        if end > self._block.numel():
            return torch.empty(numel, dtype=dtype)
        return self._block[start:end].view(dtype)

    def end(self) -> None:
        """Return the block, when nothing reads or writes the tensors any more.

        A block that was too small is replaced by one that would have sufficed.
        """
        replace = self._block.numel() < self._taken <= KEPT_BYTES
        self._scratch.give_back(_block(self._taken) if replace else self._block)
        self._block = _block(0)


def _block(nbytes: int) -> torch.Tensor:
    block = torch.empty(nbytes, dtype=torch.uint8)
    prefer_huge_pages(block.untyped_storage())
    return block
