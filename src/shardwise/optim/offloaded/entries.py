"""Which tensors of a state are kept elsewhere, and what they look like."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from shardwise._torch import dtensor
from shardwise._torch.dtensor import DTensorSpec
from shardwise.base.scratch import file


@dataclass(frozen=True)
class EntryForm:
    """What a tensor looks like.

    Attributes:
        shape: of this rank's part.
        stride: of this rank's part.
        dtype: of both.
        spec: mesh and placements of a ``DTensor``.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    spec: DTensorSpec | None

    @classmethod
    def of(cls, value: object) -> EntryForm | None:
        """Return the form of a tensor that can be kept elsewhere, ``None`` of anything else.

        That is a tensor with at least ``file.SMALLEST`` bytes on this rank, which lie together.
        Tensors of subclasses other than ``DTensor`` stay where they are, and so do those that
        require gradients.
        """
        if not isinstance(value, torch.Tensor) or value.requires_grad:
            return None
        local = dtensor.plain(value)
        if local.layout is not torch.strided or local.is_meta or dtensor.is_wrapper(local):
            return None
        if local.ndim == 0 or local.nbytes < file.SMALLEST or not _is_dense(local):
            return None
        spec = None if local is value else dtensor.spec_of(value)
        return cls(tuple(local.shape), local.stride(), local.dtype, spec)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part, rounded up to what direct I/O takes."""
        return file.aligned(math.prod(self.shape) * self.dtype.itemsize)

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this form whose values are in ``memory``, from its beginning.

        Args:
            memory: bytes, of shape ``(nbytes,)``.
        """
        used = memory[: math.prod(self.shape) * self.dtype.itemsize].view(self.dtype)
        local = used.as_strided(self.shape, self.stride)
        return local if self.spec is None else dtensor.wrap_local(local, self.spec)


@dataclass(eq=False)
class Entry:
    """A tensor of a state that is kept elsewhere.

    Attributes:
        form: what it looks like.
        memory: the bytes that keep it.
        home: the tensor there, which others see between steps.
        shown: the tensor in the state now: ``home``, or one in staging memory.
    """

    form: EntryForm
    memory: torch.Tensor
    home: torch.Tensor
    shown: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.shown = self.home

    @property
    def address(self) -> int:
        """Where its bytes are, so that neighbors move together; 0 in a rehearsal."""
        return self.memory.untyped_storage().data_ptr()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills the memory that it spans, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda each: each[1]
    ):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
