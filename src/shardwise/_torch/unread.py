"""Tensors of a checkpoint that are read when something needs their elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise._torch import autograd, dtensor

Fill = Callable[[torch.Tensor], None]
"""Fills a tensor of the same shape, or this rank's part of a ``DTensor``."""

#: What a tensor answers without elements. Reading for anything else would be right, but dear.
_WITHOUT_ELEMENTS = frozenset(
    getattr(each, "__get__", each)
    for each in (
        *(torch.Tensor.shape, torch.Tensor.dtype, torch.Tensor.device, torch.Tensor.ndim),
        *(torch.Tensor.is_meta, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel),
        *(torch.Tensor.__len__, torch.Tensor.is_floating_point),
    )
)


class Unread(torch.Tensor):
    """A tensor on the CPU whose elements are elsewhere.

    Copied into another tensor, it fills that tensor: of a ``DTensor``, this rank's part and no
    more. For any other operation, all of it is read, once.

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
            cls, tuple(shape), dtype=dtype, device=torch.device("cpu")
        )
        made._fill, made._held, made._full = fill, held, full
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
                full = torch.empty(self.shape, dtype=self.dtype)
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
        if func in _WITHOUT_ELEMENTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.copy_ and isinstance(args[1], Unread):
            args[1].fill(args[0])
            return args[0]
        return func(*_read(args), **_read(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do the same below what Python sees of an operation."""
        return func(*_read(args), **_read(kwargs or {}))


def _read(tree: Any) -> Any:
    return pytree.tree_map_only(Unread, Unread.full, tree)
