"""A PrivateUse1 device with values, in pure Python: its memory is the host's.

:func:`register` makes it the accelerator of this process, which lasts. A tensor on it is a plain
``torch.Tensor`` with a storage on the device. Every operation runs on the CPU, on tensors that
share the memory of those on the device. Torch and the runtime see an accelerator: autograd runs its
backward in a thread of the device, and mixing devices is an error.

Torch takes operations apart in another way than for the CPU, so models give the same results as
there up to rounding. With each other, sharded and unsharded models on the device agree exactly.

What it lacks, as some devices do: pinned memory, events to wait for on the host, and
``torch.accelerator.synchronize``. Streams and events exist, and order nothing.

Memory that was freed by ``resize_(0)`` holds NaN, whoever reads it by mistake.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

#: The type of the device.
NAME = "pretend"
#: The number of devices that every process sees.
COUNT = 4

# Storages are larger than their memory, for C++, so that they can grow.
_ADDRESSES = 1 << 40
_CPU = torch.device("cpu")
_torch: Any = torch
_C: Any = torch._C
_HOST_KEYS = _C.DispatchKeySet(_C.DispatchKey.CPU)
_aten: Any = torch.ops.aten


class _Memory:
    """The memory behind a storage of the device.

    Attributes:
        host: holds the bytes.
        nbytes: how large the storage is.
    """

    def __init__(self, host: torch.UntypedStorage) -> None:
        self.host = host
        self.first = host  # the address of the storage stays taken
        self.nbytes = host.nbytes()
        figures.add(self.nbytes)
        weakref.finalize(self, figures.add_freed, box := [self.nbytes]).atexit = False
        self._box = box

    def resize(self, nbytes: int) -> None:
        """Free the memory, or allocate it again with undefined contents."""
        figures.add(nbytes - self.nbytes)
        self.nbytes = self._box[0] = nbytes
        if nbytes > self.host.nbytes():
            self.host = _torch.UntypedStorage(nbytes)
        bytes_of: Any = self.host
        bytes_of.fill_(0xFF)

    def grew(self) -> None:
        """Note that an operation has resized the memory itself."""
        figures.add(self.host.nbytes() - self.nbytes)
        self.nbytes = self._box[0] = self.host.nbytes()


class _Figures:
    """The memory of the device, in bytes."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self._lock = threading.RLock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.allocated += nbytes
            self.peak = max(self.peak, self.allocated)

    def add_freed(self, box: list[int]) -> None:
        self.add(-box[0])


figures = _Figures()


def _memory_of(storage: torch.UntypedStorage) -> _Memory:
    memory: _Memory = storage.pretended  # type: ignore[attr-defined]
    return memory


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor that shares the memory of one on the device; any other as it is."""
    if tensor.device.type != NAME:
        return tensor
    host = _memory_of(tensor.untyped_storage()).host
    view = torch.empty(0, dtype=tensor.dtype, device=_CPU)
    return view.set_(host, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_device(host: torch.Tensor) -> torch.Tensor:
    """A tensor on the device that takes over the memory of a CPU tensor."""
    storage = _C._construct_storage_from_data_pointer(
        host.untyped_storage().data_ptr() or id(host), torch.device(NAME, 0), _ADDRESSES
    )
    storage.pretended = _Memory(host.untyped_storage())
    made = _C._acc.create_empty_tensor((0,), host.dtype)
    return _set(made, storage, host)


def _set(tensor: torch.Tensor, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _aten.set_.source_Storage_storage_offset.redispatch(
        _HOST_KEYS, tensor, storage, like.storage_offset(), like.size(), like.stride()
    )
    return made


# -- operations -----------------------------------------------------------------------------------


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the CPU, and say that its results are on the device."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        view = host_view(tensor)
        if view is not tensor:
            pairs.append((tensor, view))
        return view

    to_cpu = kwargs.get("device") == _CPU
    if "device" in kwargs:
        kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
    with _C._AutoDispatchBelowAutograd():
        args, kwargs = tree_map_only(torch.Tensor, to_host, (args, kwargs))
        found = _draw(op, args, kwargs) if _is_random(op) else op(*args, **kwargs)
        for tensor, view in pairs:
            if tensor.size() != view.size():  # the operation has resized its output
                _memory_of(tensor.untyped_storage()).grew()
                _set(tensor, tensor.untyped_storage(), view)

        def from_host(host: torch.Tensor) -> torch.Tensor:
            if to_cpu:
                return host
            for tensor, view in pairs:
                if host is view:
                    return tensor
                if host.untyped_storage()._cdata == view.untyped_storage()._cdata:
                    again: torch.Tensor = _aten.as_strided.default.redispatch(
                        _HOST_KEYS, tensor, host.size(), host.stride(), host.storage_offset()
                    )
                    return again
            return _on_device(host)

        return tree_map_only(torch.Tensor, from_host, found)


def _copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy, where one of the two is on the device, or both are."""
    with _C._AutoDispatchBelowAutograd():
        host_view(to).copy_(host_view(source))
    return to


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with the random generator of the device."""
    before = torch.get_rng_state()
    torch.set_rng_state(_generator.get_state())
    try:
        return op(*args, **kwargs)
    finally:
        _generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


_generator = torch.Generator()


def _view(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(_HOST_KEYS, *args, **kwargs)

    return kernel


# -- what torch asks of a backend -----------------------------------------------------------------


class _Module:
    """What torch has as ``torch.<name of the device>``."""

    def __init__(self) -> None:
        self.index = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.index

    def set_device(self, device: Any) -> None:
        pass

    def device_count(self) -> int:
        return COUNT

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        _generator.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return _generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        _generator.set_state(state)

    def get_device_name(self, device: object = None) -> str:
        return "Pretend 1"

    def max_memory_allocated(self, device: object = None) -> int:
        return figures.peak


_library: list[Any] = []
_VIEWS = ("as_strided", "view", "_reshape_alias", "unfold")


def register() -> None:
    """Make the device the accelerator of this process."""
    if _library:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    everything = _torch.library.Library("_", "IMPL")
    everything.fallback(_compute, "PrivateUse1")
    aten = _torch.library.Library("aten", "IMPL")
    for name in _VIEWS:
        aten.impl(name, _view(getattr(_aten, name).default), "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    for overload in ("source_Storage", "source_Storage_storage_offset", "source_Tensor"):
        aten.impl(f"set_.{overload}", _view(getattr(_aten.set_, overload)), "PrivateUse1")
    _library.extend([everything, aten])
    _replace_methods_of_storages()


def _replace_methods_of_storages() -> None:
    """Let storages of the device be resized, which torch lets no backend do from Python."""
    kind: Any = torch.UntypedStorage
    resize, size, nbytes = kind.resize_, kind.size, kind.nbytes

    def resize_(storage: Any, new: int) -> Any:
        if not hasattr(storage, "pretended"):
            return resize(storage, new)
        storage.pretended.resize(new)
        return storage

    kind.resize_ = resize_
    kind.size = lambda self: self.pretended.nbytes if hasattr(self, "pretended") else size(self)
    kind.nbytes = lambda self: self.pretended.nbytes if hasattr(self, "pretended") else nbytes(self)
