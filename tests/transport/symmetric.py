"""Symmetric memory in small: memory of the host that knows what was allocated in it.

No machine of the tests has symmetric memory. What can be known without it is that every buffer of
a collective was allocated there, was registered by all ranks in one order, and is freed.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.devices import GLOO
from shardwise.transport import select, symmetric
from shardwise.transport.base import NO_LABEL, Label, Reduce, Work
from shardwise.transport.collectives import NcclTransport


class HostMemory:
    """Stands in for symmetric memory; see :class:`shardwise.transport.symmetric.Memory`.

    Args:
        group: the process group whose ranks register memory together.
        device: the device of the memory.

    Attributes:
        registered: the size of every allocation that was registered, in order, in bytes.
    """

    #: Every memory that was made, in order.
    made: ClassVar[list[HostMemory]] = []

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.registered: list[int] = []
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._addresses: set[tuple[int, int]] = set()
        HostMemory.made.append(self)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Note what is allocated inside the block."""
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            self._note(storage)
            return result

        with patch.object(torch.UntypedStorage, "resize_", noted), _Factories(self):
            yield

    def register(self, tensor: torch.Tensor) -> None:
        """Note that ``tensor`` was registered."""
        storage = tensor.untyped_storage()
        assert self.holds(tensor), "only what was allocated here can be registered"
        assert tensor.data_ptr() == storage.data_ptr(), "an allocation is registered as a whole"
        self._addresses.add((storage._cdata, storage.data_ptr()))
        self.registered.append(storage.size())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of ``tensor`` was allocated here."""
        kept = self._storages.get(tensor.untyped_storage()._cdata)
        return kept is not None and kept() is not None

    def check(self, tensor: torch.Tensor) -> None:
        """Check that a collective may use ``tensor``."""
        storage = tensor.untyped_storage()
        assert self.holds(tensor), f"{tuple(tensor.shape)} is not in this memory"
        assert (storage._cdata, storage.data_ptr()) in self._addresses, "it was not registered"

    @property
    def nbytes(self) -> int:
        """The bytes that are allocated now."""
        alive = (kept() for kept in self._storages.values())
        return sum(storage.size() for storage in alive if storage is not None)

    def comes_to(self, nbytes: int) -> bool:
        """Wait until so many bytes are allocated: gloo's thread lets go of a call a bit later."""
        deadline = time.monotonic() + 10
        while gc.collect() >= 0 and self.nbytes != nbytes and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.nbytes == nbytes

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._storages[storage._cdata] = weakref.ref(storage)


class _Factories(TorchDispatchMode):
    def __init__(self, memory: HostMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self._memory._note(made.untyped_storage())
        return made


@contextlib.contextmanager
def host_memory() -> Iterator[list[str]]:
    """Let :func:`~shardwise.transport.select.symmetric_transport` use gloo and host memory.

    Yields:
        The kinds of the collectives that were checked: all gathers, and all reduce-scatters that
        add.
    """
    seen: list[str] = []
    gather, scatter = dist.all_gather_single, dist.reduce_scatter_single

    def memory_of(group: dist.ProcessGroup) -> HostMemory:
        return [each for each in HostMemory.made if each.group is group][-1]

    def checked_gather(out: torch.Tensor, own: torch.Tensor, **kwargs: Any) -> Any:
        for tensor in (out, own):
            memory_of(kwargs["group"]).check(tensor)
        assert own.untyped_storage()._cdata == out.untyped_storage()._cdata, "gathered in place"
        seen.append("all-gather")
        return gather(out, own, **kwargs)

    def checked_scatter(out: torch.Tensor, own: torch.Tensor, **kwargs: Any) -> Any:
        if _HostTransport.adds:
            for tensor in (out, own):
                memory_of(kwargs["group"]).check(tensor)
            seen.append("reduce-scatter")
        return scatter(out, own, **kwargs)

    with (
        patch.object(symmetric, "SMALL_BYTES", 64),  # so that some are small and some are not
        patch.object(select, "check_available", lambda group, device: None),
        patch.object(select, "SymmetricMemory", HostMemory),
        patch.object(select, "NcclTransport", _HostTransport),
        patch.object(dist, "all_gather_single", checked_gather),
        patch.object(dist, "reduce_scatter_single", checked_scatter),
    ):
        yield seen


class _HostTransport(NcclTransport):
    """NCCL's launches, on gloo. It averages by adding, where NCCL has a collective for it.

    Attributes:
        adds: whether the caller of the last reduce-scatter asked for a sum.
    """

    adds: ClassVar[bool] = False

    def __init__(self, group: dist.ProcessGroup, alone_bytes: int) -> None:
        super().__init__(group, GLOO, alone_bytes)

    def reduce_scatter(
        self,
        fulls: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        op: Reduce,
        label: Label = NO_LABEL,
    ) -> Work:
        _HostTransport.adds = op is Reduce.SUM
        return super().reduce_scatter(fulls, shards, op, label)
