"""Buckets: which tensors of a call are sent alone and which are packed; how to pack and add them.

A flat buffer holds the chunks of several tensors side by side, one row per rank:

    tensors a and b over 2 ranks:   | a0 b0 |
                                    | a1 b1 |
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from shardwise.base import observe
from shardwise.transport.memory import prefer_huge_pages, reported

#: Bytes of the result that are summed at a time, so that they stay in cache.
BLOCK_BYTES = 1024 * 1024
#: The dtypes that every backend sends; others are gathered as bytes.
_SENDABLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)


@dataclass(frozen=True)
class Bucket:
    """The tensors that are sent in one message per peer: one large one, or many small ones.

    Attributes:
        indices: the positions of the tensors in the call.
    """

    indices: tuple[int, ...]

    @property
    def packed(self) -> bool:
        """Whether the tensors are copied into one buffer, and not sent from where they lie."""
        return len(self.indices) > 1


def assign_buckets(nbytes: Sequence[int], kinds: Sequence[Hashable], small: int) -> list[Bucket]:
    """Divide the tensors of a call into buckets.

    Args:
        nbytes: the size of a chunk of each tensor, in bytes; the same on every rank.
        kinds: only tensors of equal kinds (dtypes, say) are packed together.
        small: chunks of fewer bytes are packed.

    Returns:
        Buckets in the order of their first tensor. Tensors of no bytes are in none.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (size, kind) in enumerate(zip(nbytes, kinds, strict=True)):
        if size:
            groups.setdefault((kind, None if size < small else i), []).append(i)
    return [Bucket(tuple(indices)) for indices in groups.values()]


def pack(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate pieces; return the piece itself if there is only one."""
    return pieces[0] if len(pieces) == 1 else reported(torch.cat(list(pieces)))


def unpack(packed: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy the parts of a packed tensor to ``pieces``."""
    parts = torch.split(packed, [piece.numel() for piece in pieces])
    for piece, part in zip(pieces, parts, strict=True):
        piece.copy_(part)


def as_rows(full: torch.Tensor, world_size: int) -> torch.Tensor:
    """View a 1-D full as ``(world_size, chunk)``: row ``r`` is chunk ``r``."""
    return full.view(world_size, full.numel() // world_size)


def flat_rows(like: torch.Tensor, world_size: int, chunks: Sequence[int]) -> torch.Tensor:
    """Make an uninitialized ``(world_size, sum of the chunks)`` buffer."""
    flat = like.new_empty(world_size, sum(chunks))
    prefer_huge_pages(flat.untyped_storage())
    return reported(flat)


def fill(chunk: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` to the beginning of a chunk, and zeros to the rest.

    Padding may hold anything, but zeros raise no alarm in tools that look for NaN on the wire.
    """
    count = values.numel()
    chunk[:count].copy_(values, non_blocking=True)
    if count < chunk.numel():
        chunk[count:].zero_()


def contributions(
    fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], world_size: int
) -> torch.Tensor:
    """Pack fulls as ``(world_size, sum of the chunks)``, in the dtype that all shards have.

    A full is not copied if it is alone, complete, and of that dtype.
    """
    full, shard = fulls[0], shards[0]
    complete = full.numel() == world_size * shard.numel()
    if len(fulls) == 1 and complete and full.dtype == shard.dtype:
        return as_rows(full, world_size)
    flat = flat_rows(shard, world_size, [each.numel() for each in shards])
    columns = torch.split(flat, [each.numel() for each in shards], dim=1)
    for each, column in zip(fulls, columns, strict=True):
        copy_chunks(each, column)
    return flat


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as one dimension of real numbers, which every backend can add."""
    tensor = tensor.view(-1)
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def is_sendable(dtype: torch.dtype) -> bool:
    """Whether collectives of torch on ``DTensor``s take a dtype, whatever the backend."""
    return dtype in _SENDABLE or dtype is torch.bool or dtype.is_complex


def as_sendable(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as one dimension of a dtype that every backend sends."""
    tensor = as_real(tensor)
    return tensor if tensor.dtype in _SENDABLE else tensor.view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as one dimension of bytes."""
    return as_real(tensor).view(torch.uint8)


def copy_chunks(full: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy a 1-D full of at most as many elements into ``rows``, one chunk per row."""
    chunk = rows.shape[1]
    if chunk == 0:
        return
    complete = full.numel() // chunk
    rows[:complete].copy_(full[: complete * chunk].view(complete, chunk))
    if complete < rows.shape[0]:
        fill(rows[complete], full[complete * chunk :])
        rows[complete + 1 :].zero_()


# -- the local sum of a reduction: one pass over memory, always in rank order ---------------------


@observe.allocates(observe.Memory.OTHER)
def add_in_order(
    out: torch.Tensor,
    parts: Sequence[torch.Tensor],
    divisor: int | None = None,
    *,
    unscaled: int | None = None,
    factor: float = 1.0,
) -> None:
    """Set ``out`` to ``((parts[0] + parts[1]) + parts[2]) + ...``, divided by ``divisor``.

    Args:
        out: 1-D; its dtype is the dtype of every addition.
        parts: 1-D, of the same length. ``out`` itself may be one of the first two.
        divisor: what to divide the sum by; ``None``: do not divide.
        unscaled: the index of the part that is multiplied by ``factor`` as it is added; only if
            there are at least two parts. ``None``: all parts are scaled already.
        factor: as described for ``unscaled``.
    """
    order = list(range(len(parts)))
    if len(parts) > 1 and (parts[1] is out or unscaled == 0):
        order[:2] = 1, 0  # a + b == b + a, bit for bit
    block = max(1, BLOCK_BYTES // out.itemsize)
    first, *rest = [(torch.split(parts[i], block), factor if i == unscaled else 1.0) for i in order]
    for i, total in enumerate(torch.split(out, block)):
        sum_ = first[0][i].to(out.dtype)
        for column, alpha in rest:
            sum_ = torch.add(sum_, column[i].to(out.dtype), alpha=alpha, out=total)
        if sum_ is not total:
            total.copy_(sum_)
        if divisor is not None:
            total.div_(divisor)


def exact_factor(world_size: int, dtype: torch.dtype) -> float | None:
    """Return the factor by which the parts of an average may be multiplied before they are added.

    Returns:
        ``1 / world_size`` if the result equals that of a division at the end, bit for bit (down to
        numbers below 1e-38); ``None`` if it does not.
    """
    has_range = dtype in (torch.float32, torch.float64, torch.bfloat16)
    return 1.0 / world_size if has_range and world_size.bit_count() == 1 else None


def wire_dtype(full: torch.Tensor, shard: torch.Tensor) -> torch.dtype:
    """Return the dtype of contributions on the wire: the stored one, if it is exact and smaller."""
    return full.dtype if full.dtype.itemsize < shard.dtype.itemsize else shard.dtype


def scattered_bytes(
    fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], world_size: int
) -> int:
    """Return the bytes of all contributions of a rank to a reduce-scatter, padding included."""
    return sum(
        world_size * shard.numel() * wire_dtype(full, shard).itemsize
        for full, shard in zip(fulls, shards, strict=True)
    )
