"""Memory that one reduction after the other receives into."""

from __future__ import annotations

import torch

from shardwise.transport.hugepages import prefer_huge_pages

_ALIGN = 64


class Scratch:
    """One block of host memory, lent to one borrower at a time.

    Fresh memory costs a page fault for every 4 KiB, more than copying as much. So a block as
    large as the largest need so far is kept. A borrower that finds it lent gets fresh memory.
    """

    def __init__(self) -> None:
        self._block = _block(0)

    def borrow(self) -> Loan:
        """Lend the block."""
        block, self._block = self._block, _block(0)
        return Loan(self, block)

    def give_back(self, block: torch.Tensor) -> None:
        """Take a block back, and keep it if it is the largest."""
        if block.numel() > self._block.numel():
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
        enough = self._taken <= self._block.numel()
        self._scratch.give_back(self._block if enough else _block(self._taken))
        self._block = _block(0)


def _block(nbytes: int) -> torch.Tensor:
    block = torch.empty(nbytes, dtype=torch.uint8)
    prefer_huge_pages(block.untyped_storage())
    return block
