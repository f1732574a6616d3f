"""Ordinary process (or device) memory: full buffers, huge pages, and scratch.

Large host buffers are put on huge pages if the system lets a process ask for them. Memory that was
freed and is allocated again is new to the kernel, which clears and maps it one page at a time as it
is first written. With 4 KiB pages that costs several times the write itself. Measured on 2 cores of
an AMD EPYC, Linux 6.18, huge pages in ``madvise`` mode, one thread, time to allocate and fill one
tensor (median of 15, in milliseconds; resident memory is the same):

    MiB              32     64    128    256
    4 KiB pages    14.5   37.5   72.1    154
    huge pages      3.6    8.1   21.3     41
    memory reused   1.8    3.8    7.6     22

Below 4 MiB there was no difference: the C library keeps what small tensors released.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import torch

from shardwise.base import devices, observe
from shardwise.base.libc import DONT_NEED, HUGE_PAGE, libc
from shardwise.base.observe import Memory

#: Smaller storages are not put on huge pages.
LARGE_BYTES = 4 * 1024 * 1024
#: No larger block of scratch is kept: memory that is idle between reductions is missing elsewhere.
KEPT_BYTES = 32 * 1024 * 1024

#: The C library gives blocks that are larger than this back to the system when they are freed. So
#: they are new to the system anyway whenever they are allocated.
RETURNED_BYTES = 32 * 1024 * 1024

#: Tensors in a block begin at multiples of this many bytes.
ALIGNMENT = 64


class HeapBuffers:
    """Full buffers whose storages are resized: to full size to allocate, to zero to free.

    Autograd saves *views* of the full parameters for backward. A view holds the storage, not the
    bytes, so the storage object must live as long as the group does: only its size changes. The
    tensors keep their shapes throughout. Reading a freed one, or making a view of it, is a bug of
    the caller. Nothing here increments autograd's version counters.

    Args:
        numels: the number of elements of each tensor.
        dtypes: the dtype of each tensor.
        device: the device of all tensors.
    """

    @observe.allocates(Memory.FULL_PARAMETERS)
    def __init__(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        for numel, dtype in zip(numels, dtypes, strict=True):
            tensor = torch.empty(numel, dtype=dtype, device=device)
            tensor.untyped_storage().resize_(0)  # at once: never hold the whole group's memory
            self.tensors.append(tensor)
        self.nbytes = 0
        self._nbytes = [t.numel() * t.itemsize for t in self.tensors]

    def allocate(self) -> None:
        """Give every tensor its memory, with undefined contents, if it has none."""
        for tensor, nbytes in zip(self.tensors, self._nbytes, strict=True):
            storage = tensor.untyped_storage()
            if storage.size() != nbytes:
                storage.resize_(nbytes)
                prefer_huge_pages(storage)
        self.nbytes = sum(self._nbytes)

    def free(self) -> None:
        """Release the memory of every tensor."""
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            if storage.size() != 0:
                storage.resize_(0)
        self.nbytes = 0

    def retain(self) -> None:
        """Keep the memory: its address would change if it were freed."""

    def abandon(self) -> None:
        """Keep the memory: messages that are under way may still be written to it."""


def prefer_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask for huge pages under a newly allocated storage.

    The request covers whole pages inside the storage only, so no other memory is touched or grows.
    Does nothing for small storages, for devices, and on systems without such a request. A refusal
    is ignored: it costs nothing but time.
    """
    if libc() is None or storage.device.type != "cpu" or storage.nbytes() < LARGE_BYTES:
        return
    address, size = storage.data_ptr(), mmap.PAGESIZE
    start = (address + size - 1) // size * size
    end = (address + storage.nbytes()) // size * size
    libc().madvise(start, end - start, HUGE_PAGE)


def reported(tensor: torch.Tensor, name: str = "") -> torch.Tensor:
    """Report that a transport has allocated a tensor, for itself or a group; return the tensor."""
    observe.memory_of(Memory.TRANSPORT, name, tensor)
    return tensor


def pack_offsets(numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> tuple[list[int], int]:
    """Place tensors one after the other, aligned.

    Returns:
        Where each of them begins, and where the last one ends, in bytes.
    """
    offsets, end = [], 0
    for numel, dtype in zip(numels, dtypes, strict=True):
        offsets.append(end)
        end += -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


def is_returned(tensor: torch.Tensor) -> bool:
    """Whether the memory of a host tensor goes back to the system when it is freed."""
    storage = tensor.untyped_storage()
    return storage.device.type == "cpu" and storage.nbytes() > RETURNED_BYTES


def give_back(tensor: torch.Tensor, first: int, last: int) -> None:
    """Give the memory of some elements back to the system; what they hold is lost.

    They must not be needed: neither through this tensor nor through another one in the same memory.

    Args:
        tensor: 1-D, contiguous, for which :func:`is_returned`.
        first: the first element.
        last: the one after the last. Pages that are shared with other elements stay.
    """
    if libc() is None:
        return
    size = mmap.PAGESIZE
    start = (tensor.data_ptr() + first * tensor.itemsize + size - 1) // size * size
    end = (tensor.data_ptr() + last * tensor.itemsize) // size * size
    if start < end:
        libc().madvise(start, end - start, DONT_NEED)


class Scratch:
    """One block of host memory that reductions receive into, lent to one of them at a time.

    New memory costs page faults, which take longer than copying as many bytes. So a block as large
    as the largest need so far is kept, up to :data:`KEPT_BYTES`. A borrower that needs more, or
    that comes while the block is lent, gets new memory.

    Attributes:
        block: what is kept.
    """

    def __init__(self) -> None:
        self.block = _block(0)

    def borrow(self) -> Loan:
        """Lend the block."""
        block, self.block = self.block, _block(0)
        return Loan(self, block)


class Loan:
    """Tensors cut from a borrowed block."""

    def __init__(self, scratch: Scratch, block: torch.Tensor) -> None:
        self._scratch = scratch
        self._block = block
        self._taken = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor with undefined contents, in new memory if the block is full."""
        start = self._taken
        end = start + numel * dtype.itemsize
        self._taken = (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        if end > self._block.numel():
            return reported(torch.empty(numel, dtype=dtype))
        return self._block[start:end].view(dtype)

    def end(self) -> None:
        """Return the block. Nothing may read or write the tensors any more.

        A block that was too small is replaced by one that would have been large enough.
        """
        replace = self._block.numel() < self._taken <= KEPT_BYTES
        block, self._block = _block(self._taken) if replace else self._block, _block(0)
        if self._scratch.block.numel() < block.numel() <= KEPT_BYTES:
            self._scratch.block = block


def _block(nbytes: int, device: torch.device = devices.CPU) -> torch.Tensor:
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    prefer_huge_pages(block.untyped_storage())
    return reported(block)


class Blocks:
    """Blocks of memory for calls of any thread, which are used again if they have the same size.

    Args:
        device: of the memory. Torch keeps that of accelerators itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []
        self._changing = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return uint8 memory with undefined contents."""
        with self._changing:
            for i, block in enumerate(self._free):
                if block.numel() == nbytes:
                    return self._free.pop(i)
        return _block(nbytes, self._device)

    def take_for(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return a block, and 1-D tensors in it with undefined contents."""
        starts, end = pack_offsets(numels, dtypes)
        block = self.take(end)
        return block, [
            block[start : start + numel * dtype.itemsize].view(dtype)
            for start, numel, dtype in zip(starts, numels, dtypes, strict=True)
        ]

    def give_back(self, block: torch.Tensor) -> None:
        """Keep a block, and drop those that were not used for the longest time."""
        if self._device.type != devices.CPU.type:
            return
        with self._changing:
            self._free.insert(0, block)
            while sum(each.numel() for each in self._free) > 2 * KEPT_BYTES:
                self._free.pop()
