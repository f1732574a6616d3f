"""What gloo makes of the tensors that it gets, for simulated ranks to do the same or refuse.

Observed on torch 2.13 and 2.15, and held by a test that runs both. Most of gloo's collectives take
the address of a tensor, and as many elements from there as it has. Where these are not its elements
in their order, values are wrong and neighbors are overwritten, without an error.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: What gloo takes on CPUs.
_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)
#: The most bytes that one message of a reduction has.
_SEGMENT = 2**20

#: Shape and strides of what lies in another order than its elements; ``()``: in theirs.
Order = tuple[tuple[int, ...], ...]


class MemoryFormat(enum.Enum):
    """Which layouts a collective takes."""

    ANY = "any"
    DENSE = "without gaps and overlaps, in the same memory order on all ranks"
    CONTIGUOUS = "contiguous"


def order_of(tensor: torch.Tensor) -> Order:
    """Return how a tensor lies in memory. Dimensions of one element do not matter."""
    if tensor.is_contiguous():
        return ()
    sizes, strides = zip(*_wide(tensor), strict=True)
    return sizes, strides


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither gaps nor elements that share memory."""
    expected = 1
    for size, stride in sorted(_wide(tensor), key=lambda each: each[1]):
        if stride != expected:
            return False
        expected *= size
    return True


def _wide(tensor: torch.Tensor) -> list[tuple[int, int]]:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride) for size, stride in pairs if size != 1] if tensor.numel() else []


def check(rank: int, name: str, tensors: Sequence[torch.Tensor], memory: MemoryFormat) -> None:
    """Check what a rank hands to a collective.

    Args:
        rank: in the world.
        name: of the collective.
        tensors: what it reads or writes.
        memory: which layouts it takes.

    Raises:
        TypeError: gloo does not have the dtype.
        ValueError: gloo would read or write other memory than that of the elements.
    """
    for tensor in tensors:
        if tensor.is_cpu and tensor.dtype not in _DTYPES:
            raise TypeError(
                f"rank {rank}, {name}: found {tensor.dtype}, which gloo does not take on CPUs. "
                "Send it as bytes: tensor.view(torch.uint8)"
            )
        if memory is not MemoryFormat.ANY and (tensor.is_neg() or tensor.is_conj()):
            raise ValueError(
                f"rank {rank}, {name}: found a view of negative or conjugate values, expected "
                "memory that holds them: gloo would use what the memory holds. Use "
                "tensor.resolve_neg().resolve_conj(), and copy the result back"
            )
        is_taken = (
            memory is MemoryFormat.ANY
            or tensor.is_contiguous()
            or (memory is MemoryFormat.DENSE and is_dense(tensor))
        )
        if not is_taken:
            raise ValueError(
                f"rank {rank}, {name}: found a tensor of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}, expected one that is {memory.value}. gloo would use as much "
                "memory from its first element on, whatever is there. Use tensor.contiguous(), and "
                "copy the result back"
            )


@dataclass(frozen=True)
class Extreme:
    """The minimum or maximum over ranks, with a NaN where gloo has one.

    Gloo passes each segment of a message through all ranks, down to the one that owns it, and each
    rank compares what comes with its own. Comparisons with a NaN are false. So the owner's NaN
    stays, and that of another rank is lost, with what it was compared with.

    Args:
        is_less: whether the first value gives way to the second one.
        chunk: which of the chunks of a message is reduced.
        chunks: how many a message has.
    """

    is_less: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    chunk: int = 0
    chunks: int = 1

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Reduce the tensors of all ranks."""
        first, size = parts[0], len(parts)
        numel = first.numel()
        values = torch.stack([each.as_strided((numel,), (1,)) for each in parts])
        owner = _owners(numel * self.chunks, size, first.itemsize)
        owner = owner[self.chunk * numel :][:numel].to(first.device)
        found = values.gather(0, (owner - 1)[None] % size)[0]
        for before in range(2, size + 1):
            mine = values.gather(0, (owner - before)[None] % size)[0]
            found = torch.where(self.is_less(mine, found), found, mine)
        result = torch.empty_like(first)
        result.as_strided((numel,), (1,)).copy_(found)
        return result


def _owners(numel: int, ranks: int, itemsize: int) -> torch.Tensor:
    """Return which rank owns each element of a message: each has as many segments."""
    nbytes = numel * itemsize
    segments = max(2, math.ceil(nbytes / (_SEGMENT * ranks)))
    segment = math.ceil(math.ceil(nbytes / (segments * ranks)) / itemsize)
    return torch.arange(numel) // max(1, segments * segment)
