"""Full buffers in ordinary process (or device) memory.

Large host buffers on huge pages, where the system lets a process ask for them.

Memory that was freed and is allocated again is new to the kernel, which clears and maps it one
page at a time as it is first written. With 4 KiB pages that costs several times the write itself.
Measured on 2 cores of an AMD EPYC, Linux 6.18, huge pages in ``madvise`` mode, one thread, time to
allocate and fill one tensor (median of 15, milliseconds; resident memory is the same):

    MiB             32     64    128    256
    4 KiB pages   14.5   37.5   72.1    154
    huge pages     3.6    8.1   21.3     41
    kept memory    1.8    3.8    7.6     22

Below 4 MiB there was no difference: the C library keeps what small tensors gave back.

Memory that one reduction after the other receives into.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence

import torch

from shardwise.transport.base import FullBuffers


class HeapBuffers:
    """One-dimensional tensors whose storages are grown to allocate and emptied to free.

    Autograd saves *views* of the full parameters for backward. A view holds the storage, not the
    bytes, so the storage object must live as long as the group does: only its size changes. The
    tensors keep their shapes throughout; reading one, or making a view of it, while it is freed is
    a bug of the caller's. Nothing here bumps autograd's version counters.
    """

    def __init__(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        for numel, dtype in zip(numels, dtypes, strict=True):
            tensor = torch.empty(numel, dtype=dtype, device=device)
            tensor.untyped_storage().resize_(0)  # at once: never hold the whole group's memory
            self.tensors.append(tensor)
        self._nbytes = [t.numel() * t.itemsize for t in self.tensors]

    def allocate(self) -> None:
        """Give every tensor its memory, with undefined contents; keep what is there already."""
        for tensor, nbytes in zip(self.tensors, self._nbytes, strict=True):
            storage = tensor.untyped_storage()
            if storage.size() != nbytes:
                storage.resize_(nbytes)
                prefer_huge_pages(storage)

    def free(self) -> None:
        """Give the memory of every tensor back."""
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            if storage.size() != 0:
                storage.resize_(0)

    def abandon(self) -> None:
        """Keep the memory: messages on their way may still be written to it."""


class OwnMemory:
    """What transports have in common that gather into memory of each rank's own."""

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FullBuffers:
        """Make (not yet allocated) memory to gather into."""
        return HeapBuffers(numels, dtypes, device)


#: Storages of fewer bytes are left alone.
LARGE_BYTES = 4 * 1024 * 1024


def prefer_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask for huge pages under a newly allocated storage.

    Only whole pages inside the storage are named, so that no other memory is touched or grows.
    Does nothing for small storages, for devices, and where the system knows no such request; a
    refusal is ignored, as it costs nothing but time.
    """
    madvise = _madvise()
    if madvise is None or storage.device.type != "cpu" or storage.nbytes() < LARGE_BYTES:
        return
    address, size = storage.data_ptr(), mmap.PAGESIZE
    start = (address + size - 1) // size * size
    end = (address + storage.nbytes()) // size * size
    madvise(start, end - start, mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


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

    def borrow(self) -> SummonOptions:
        """Lend the block."""
        block, self._block = self._block, _block(0)
        return SummonOptions(self, block)

    def give_back(self, block: torch.Tensor) -> None:
        """Take a block back, and keep it if it is the largest that may be kept."""
        if self._block.numel() < block.numel() <= KEPT_BYTES:
            self._block = block


class SummonOptions:
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
