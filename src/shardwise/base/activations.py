"""Where what autograd saves for backward is kept, other than on the device that computes.

Hooks around a forward get every tensor that autograd saves in it. The memory of a tensor, with all
views of it, is kept once, and comes back as it was: the same strides, views of the same memory. If
the program itself still has that memory when backward asks, backward gets it as it is.

Forwards follow each other as *spans*. Backward visits them in the opposite order, so when it comes
to one, what the one before it has kept begins to come back.

What stays where it is: parameters and buffers, whose memory the sharding runtime frees and fills
again, and their views; small tensors; tensor subclasses other than ``DTensor``. Autograd does not
check versions of what hooks return, so this checks them.

``torch.autograd.graph.save_on_cpu`` copies parameters too, and every view of a tensor by itself. It
copies on the stream that computes, checks no versions, and knows no disk.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardwise._torch import autograd, dtensor, fake
from shardwise._torch.saved import base_of, hooks_saved_tensors
from shardwise.base import devices, observe
from shardwise.base.errors import OffloadError
from shardwise.base.observe import Memory
from shardwise.base.offload import DiskOffloadPolicy
from shardwise.base.scratch.file import ScratchFile, file_in

observe.ALLOCATES[__file__] = Memory.ACTIVATIONS

#: What :meth:`ActivationStore.takes` may take: no subclasses.
_PLAIN = (torch.Tensor, nn.Parameter, fake.FakeTensor)


class Kept:
    """The memory of a tensor and its views, kept elsewhere for as long as a graph needs it.

    Args:
        source: all of it, as one row.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self.device, self.nbytes = source.device, source.nbytes
        is_fake = isinstance(
            source, fake.FakeTensor
        )  # those hold a storage that is given to set_()
        self._origin = _never if is_fake else weakref.ref(source.untyped_storage())

    def memory(self) -> torch.Tensor:
        """Return it on the device, as one row: the program's own, if that is still there.

        Raises:
            OffloadError: it cannot be read.
        """
        origin = self._alive()
        if origin is None:
            return self._load()
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(origin)

    def read_ahead(self) -> None:
        """Start to bring it back."""
        if self._alive() is None:
            self._start()

    def _alive(self) -> torch.UntypedStorage | None:
        origin = self._origin()
        return origin if origin is not None and origin.nbytes() == self.nbytes else None

    def settle(self) -> None:
        """Free what the copy to elsewhere needs on the device, once that is over."""

    def let_go(self) -> None:
        """Free what was brought back. It stays kept."""

    def _start(self) -> None:
        """Start to bring it back."""

    def _load(self) -> torch.Tensor:
        """Bring it back."""
        raise NotImplementedError


class _OnDisk(Kept):
    """Memory in a file. On the CPU, what comes back is a part of the file."""

    def __init__(self, file: ScratchFile, source: torch.Tensor) -> None:
        super().__init__(source)
        self._file = file
        try:
            home = file.memory(source.nbytes)
        except OffloadError as error:
            raise OffloadError(
                f"activations: {error}; make room, take another folder, or offload fewer blocks"
            ) from error
        self._home = home.view(source.dtype).copy_(source)
        file.let_go(self._home)

    def let_go(self) -> None:
        self._file.let_go(self._home)

    def _start(self) -> None:
        self._file.read_ahead(self._home)

    def _load(self) -> torch.Tensor:
        try:
            self._file.load(self._home)
        except OffloadError as error:
            raise OffloadError(
                f"activations: {error}. This backward cannot go on: drop its gradients, and run "
                "the step again with another folder"
            ) from error
        return self._home.to(self.device)


class _SideCopy:
    """A copy on a stream of its own, and the device memory that it reads or writes.

    When the memory is given up, the stream that it was taken on waits for the copy.
    """

    def __init__(self, memory: torch.Tensor, beside: torch.Stream, run: Callable[[], Any]) -> None:
        self.memory = memory
        self._stream = devices.current_stream(memory.device)
        # What wrote it, or used the memory before, comes first.
        beside.wait_event(self._stream.record_event())
        with beside:
            run()
        self._over = beside.record_event()

    def wait(self) -> None:
        """Let the current stream wait for the copy."""
        devices.current_stream(self.memory.device).wait_event(self._over)

    def __del__(self) -> None:
        if hasattr(self, "_over"):
            self._stream.wait_event(self._over)


class _InPinnedMemory(Kept):
    """Memory of an accelerator in pinned memory of its host, which torch reuses by itself."""

    def __init__(self, beside: torch.Stream, source: torch.Tensor) -> None:
        super().__init__(source)
        self._beside = beside
        self._arriving: _SideCopy | None = None
        home = devices.host_memory(source.nbytes, source.device)
        self._home = home.view(source.dtype)
        copy = functools.partial(self._home.copy_, source, non_blocking=True)
        self._leaving: _SideCopy | None = _SideCopy(source, beside, copy)

    def settle(self) -> None:
        self._leaving = None

    def let_go(self) -> None:
        self._arriving = None

    def _start(self) -> None:
        if self._arriving is None and self._leaving is None:
            memory = torch.empty_like(self._home, device=self.device)
            copy = functools.partial(memory.copy_, self._home, non_blocking=True)
            self._arriving = _SideCopy(memory, self._beside, copy)

    def _load(self) -> torch.Tensor:
        self._start()
        if self._arriving is None:
            assert self._leaving is not None
            return self._leaving.memory
        self._arriving.wait()
        return self._arriving.memory


class _InPageableMemory(Kept):
    """Memory of an accelerator in memory of its host that is not pinned: the host waits."""

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__(source)
        self._home = devices.copy_to_host(source, devices.Copy.PAGEABLE)

    def _load(self) -> torch.Tensor:
        return self._home.to(self.device)


class ForwardSpan:
    """One forward of a module.

    Args:
        before: the forward before it, if its graph is still there.
    """

    def __init__(self, before: ForwardSpan | None) -> None:
        self.before = _never if before is None else weakref.ref(before)
        self._kept: list[weakref.ref[Kept]] = []

    def add(self, kept: Kept) -> None:
        """Note what backward of this forward needs."""
        self._kept.append(weakref.ref(kept))

    def kept(self) -> list[Kept]:
        """All that some graph still needs."""
        return _living(self._kept)


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Saved:
    """A tensor that autograd has saved.

    Attributes:
        tensor: the tensor; if its memory is kept elsewhere, an empty one with the same version.
        version: at the time.
        kept: its memory; ``None``: it stays where it is.
        strides: its shape, strides and offset.
        wrap: makes a tensor subclass of the plain one.
        span: the forward.
    """

    tensor: torch.Tensor
    version: int
    kept: Kept | None = None
    strides: tuple[torch.Size, tuple[int, ...], int] | None = None
    wrap: Callable[[torch.Tensor], torch.Tensor] | None = None
    span: ForwardSpan | None = None

    def is_unwritten(self) -> bool:
        """Whether nothing was written to the tensor since, as far as autograd counts that."""
        return autograd.version_of(self.tensor) == self.version


class ActivationStore:
    """What keeps the tensors of all modules that go to one place.

    Args:
        takes: says for a plain tensor whether it can be kept there.
        keep: keeps memory there. It may raise ``OffloadError``.
    """

    def __init__(
        self, takes: Callable[[torch.Tensor], bool], keep: Callable[[torch.Tensor], Kept]
    ) -> None:
        self._takes = takes
        self._make = keep
        self._lock = threading.RLock()  # threads of autograd; finalizers run inside
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.ref[_Saved]] = (
            weakref.WeakKeyDictionary()
        )
        self._last: Callable[[], ForwardSpan | None] = _never
        self._here: Callable[[], ForwardSpan | None] = _never
        self._leaving: list[weakref.ref[Kept]] = []
        self._near: list[weakref.ref[Kept]] = []

    @autograd.disable_compile
    def around(self, module: nn.Module, smallest: int) -> AbstractContextManager[None]:
        """Keep what autograd saves in a forward of ``module``.

        Hooks that are around it, such as those of a checkpoint, get everything, as without this.

        Args:
            module: whose parameters and buffers stay.
            smallest: storages with fewer bytes stay, too.
        """
        if not torch.is_grad_enabled() or autograd.in_transform() or hooks_saved_tensors():
            return nullcontext()
        with self._lock:
            for each in _living(self._leaving):
                each.settle()
            self._leaving.clear()
            span = ForwardSpan(self._last())
            self._last = weakref.ref(span)
        return saved_tensors_hooks(
            functools.partial(self._pack, module, smallest, span), self._unpack
        )

    @autograd.disable_compile
    def _pack(
        self, module: nn.Module, smallest: int, span: ForwardSpan, tensor: torch.Tensor
    ) -> _Saved:
        with torch.no_grad(), self._lock:
            saved = _Saved(tensor.detach(), autograd.version_of(tensor))
            local = dtensor.plain(tensor)
            if not (type(local) in _PLAIN and self._takes(local) and _is_whole(local, smallest)):
                return saved
            kept = self._keep(module, local, saved)
            if kept is None:
                return saved
            span.add(kept)
            saved.span, saved.kept = span, kept
            saved.strides = local.shape, local.stride(), int(local.storage_offset())
            if tensor is not local:
                saved.wrap = functools.partial(dtensor.wrap_local, spec=dtensor.spec_of(tensor))
            # The version is still that of the tensor.
            mine = dtensor.plain(saved.tensor)
            mine.data = torch.empty(0, dtype=mine.dtype, device=mine.device)
            return saved

    def _keep(self, module: nn.Module, local: torch.Tensor, saved: _Saved) -> Kept | None:
        """Return what keeps the memory of a tensor; ``None`` if it stays."""
        storage = local.untyped_storage()
        known = self._known.get(storage, _never)()
        kept = known.kept if known is not None and known.is_unwritten() else None
        if kept is not None and kept.nbytes == storage.nbytes():
            return kept
        if _is_of(module, local):
            return None
        kept = self._make(local.as_strided((storage.nbytes() // local.itemsize,), (1,), 0))
        self._known[storage] = weakref.ref(saved)
        self._leaving.append(weakref.ref(kept))
        return kept

    @autograd.disable_compile
    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if not saved.is_unwritten():
            found = autograd.version_of(saved.tensor)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: it is at version {found}; expected version {saved.version} "
                "instead"
            )
        if saved.kept is None:
            return saved.tensor
        assert saved.strides is not None
        with torch.no_grad(), self._lock:
            self._come_to(saved.span)
            memory = saved.kept.memory().view(saved.tensor.dtype)
            made = memory.as_strided(*saved.strides)
            return made if saved.wrap is None else saved.wrap(made)

    def _come_to(self, span: ForwardSpan | None) -> None:
        """Bring back what a forward and the one before it have kept, and let go of the rest."""
        if span is None or span is self._here():
            return
        self._here = weakref.ref(span)
        before = span.before()
        wanted = [*span.kept(), *(() if before is None else before.kept())]
        for each in _living(self._near):
            if each not in wanted:
                each.let_go()
        for each in wanted:
            each.read_ahead()
        self._near = [weakref.ref(each) for each in wanted]


@dataclass
class StorePolicy(OffloadPolicy):
    """A policy that names its store: that of a plan."""

    store: ActivationStore


def store_of(policy: OffloadPolicy) -> ActivationStore:
    """Return what keeps tensors where a policy says. All modules with the same place share it.

    Raises:
        TypeError: no policy of torch's or ours says that.
        OffloadError: no file can be made in the folder.
    """
    if isinstance(policy, StorePolicy):
        return policy.store
    place: Path | bool
    if isinstance(policy, DiskOffloadPolicy):
        place = Path(policy.folder).expanduser().absolute()
    elif isinstance(policy, CPUOffloadPolicy):
        place = policy.pin_memory
    else:
        raise TypeError(
            f"offload_policy: found {policy!r}, expected CPUOffloadPolicy() for the host of an "
            "accelerator, or DiskOffloadPolicy(FOLDER)"
        )
    found = _stores.get(place)
    if found is None:
        made = _on_host(place) if isinstance(place, bool) else _on_disk(place)
        found = _stores[place] = made
    return found


_stores: weakref.WeakValueDictionary[Path | bool, ActivationStore] = weakref.WeakValueDictionary()


def _on_disk(folder: Path) -> ActivationStore:
    keep = functools.partial(_OnDisk, file_in(folder))
    return ActivationStore(
        lambda tensor: not (tensor.is_meta or isinstance(tensor, fake.FakeTensor)), keep
    )


def _on_host(pin: bool) -> ActivationStore:
    @functools.cache
    def beside(device: torch.device) -> torch.Stream | None:
        return devices.new_stream(device) if pin and devices.pins(device) else None

    def keep(source: torch.Tensor) -> Kept:
        stream = beside(source.device)
        return _InPageableMemory(source) if stream is None else _InPinnedMemory(stream, source)

    return ActivationStore(
        lambda tensor: tensor.device.type not in (devices.CPU.type, "meta"), keep
    )


def _is_of(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, a buffer of ``module``, or a view of one."""
    if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
        return True
    mine = dtensor.storage_of(tensor)
    own: Iterable[torch.Tensor] = (*module.parameters(), *module.buffers())
    return any(dtensor.storage_of(each) == mine for each in own)


def _is_whole(tensor: torch.Tensor, smallest: int) -> bool:
    """Whether the memory of a plain tensor is large enough, and not mostly that of others."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    nbytes = tensor.untyped_storage().nbytes()
    is_as_stored = not (tensor.is_conj() or tensor.is_neg() or nbytes % tensor.itemsize)
    return is_as_stored and smallest <= nbytes <= 4 * tensor.nbytes


def _living(references: Iterable[weakref.ref[Kept]]) -> list[Kept]:
    return [found for each in references if (found := each()) is not None]


def _never() -> Any:
    """A reference to nothing."""
    return None
