"""Full buffers in ordinary process (or device) memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.transport.base import FullBuffers
from shardwise.transport.hugepages import prefer_huge_pages


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
