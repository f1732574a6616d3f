"""Tensors of a checkpoint that are read when something needs their elements."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise._torch import autograd, dtensor

Fill = Callable[[torch.Tensor], None]
"""Fills a tensor of the same shape, or this rank's part of a ``DTensor``."""

_CPU = torch.device("cpu")


def _functions(*found: Any) -> frozenset[Any]:
    """What torch calls methods and attributes where it asks a class to do their work."""
    attribute = types.GetSetDescriptorType
    return frozenset(each.__get__ if isinstance(each, attribute) else each for each in found)


#: What a tensor answers without elements. Reading for anything else would be right, but dear.
_WITHOUT_ELEMENTS = _functions(
    *(torch.Tensor.shape, torch.Tensor.dtype, torch.Tensor.ndim, torch.Tensor.size),
    *(torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__, torch.Tensor.is_floating_point),
)
# The tensor is on no device, so that torch lets nothing take over memory that it does not have.
_ANSWERS = {torch.Tensor.device.__get__: _CPU, torch.Tensor.is_meta.__get__: False}  # type: ignore[attr-defined]
#: What returns memory that may be written to without a change of version.
_HANDS_OUT_MEMORY = _functions(
    *(torch.Tensor.data, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr),
    *(torch.Tensor.storage, torch.Tensor.untyped_storage, torch.Tensor.__dlpack__),
)


def lacked_memory(error: RuntimeError) -> bool:
    """Whether an error is torch's of ``tensor.data = unread``."""
    return "incompatible tensor type" in str(error)


class Unread(torch.Tensor):
    """A tensor on the CPU whose elements are elsewhere.

    Copied into another tensor, it fills that tensor: of a ``DTensor``, this rank's part and no
    more. For any other operation, all of it is read, once. Made a parameter, it stays one of these,
    until :meth:`settled`.

    Args:
        shape: its shape.
        dtype: its dtype.
        fill: fills tensors of its shape.
        held: where it adds itself when all of it has been read.
        full: all of it, if that exists.
    """

    _fill: Fill
    _held: list[Unread] | None
    _full: torch.Tensor | None
    _settled: torch.Tensor | None
    _version_read: int

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        fill: Fill,
        held: list[Unread] | None = None,
        full: torch.Tensor | None = None,
    ) -> Unread:
        """Make one without memory."""
        made = cls._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("meta")
        )
        made._fill, made._held, made._full, made._settled = fill, held, full, None
        return made

    @classmethod
    def of(cls, full: torch.Tensor) -> Unread:
        """A tensor that exists in full."""

        def fill(into: torch.Tensor) -> None:
            raise AssertionError("it exists in full")

        return cls(full.shape, full.dtype, fill, full=full)

    def full(self) -> torch.Tensor:
        """All of it."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._full is None:
                full = torch.empty(self.shape, dtype=self.dtype, device=_CPU)
                self._fill(full)
                self._full, self._version_read = full, autograd.version_of(full)
                if self._held is not None:
                    self._held.append(self)
            return self._full

    def fill(self, into: torch.Tensor) -> None:
        """Fill a tensor of its shape, or this rank's part of a ``DTensor``."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._full is None:
                self._fill(into)
                return
            part = self._full
            for dim, (offset, size) in enumerate(zip(*dtensor.chunk_of(into), strict=True)):
                part = part.narrow(dim, offset, size)
            dtensor.plain(into).copy_(part)

    def settled(self) -> torch.Tensor:
        """All of it, as a tensor of torch's own, or as a parameter if it was made one."""
        full = self.full()
        with torch._C.DisableTorchFunctionSubclass():
            if self._settled is None:
                is_parameter = isinstance(self, nn.Parameter)
                self._settled = nn.Parameter(full, self.requires_grad) if is_parameter else full
            return self._settled

    def forget(self) -> None:
        """Drop what was read, unless it was written to. It is read again if it is needed."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._full is None:
                return
            if autograd.version_of(self._full) == self._version_read >= 0:
                self._full = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on what its arguments have been read into."""
        if func in _WITHOUT_ELEMENTS and args[0]._full is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.copy_ and isinstance(args[1], Unread):
            args[1].fill(args[0])
            return args[0]
        if func in _ANSWERS:
            return _ANSWERS[func]
        if func is torch.Tensor.detach:  # which Parameter(...) expects to return the same class
            return args[0]
        if func is torch.Tensor.requires_grad_:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        read = _read(args)
        if func in _HANDS_OUT_MEMORY:
            args[0]._version_read = -1
        return func(*read, **_read(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do the same below what Python sees of an operation."""
        return func(*_read(args), **_read(kwargs or {}))


def settle(modules: Iterable[nn.Module]) -> None:
    """Give modules tensors of torch's own in place of those that they took as they were."""
    for module in modules:
        tables: Any = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for name, value in [*table.items()]:
                if isinstance(value, Unread):
                    table[name] = value.settled()


def _read(tree: Any) -> Any:
    return pytree.tree_map_only(Unread, Unread.full, tree)
