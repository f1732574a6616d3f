"""Flat buffers: the chunks of several tensors side by side, one row a rank.

tensors a and b over 2 ranks:   | a0 b0 |
                                | a1 b1 |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.transport.hugepages import prefer_huge_pages

#: What every backend carries; other dtypes are gathered as bytes.
_CARRIED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)


def as_rows(full: torch.Tensor, world_size: int) -> torch.Tensor:
    """View a 1-D full as ``(world_size, chunk)``: row r is chunk r."""
    return full.view(world_size, full.numel() // world_size)


def flat_rows(like: torch.Tensor, world_size: int, chunks: Sequence[int]) -> torch.Tensor:
    """Make an uninitialised ``(world_size, sum of the chunks)`` buffer."""
    flat = like.new_empty(world_size, sum(chunks))
    prefer_huge_pages(flat.untyped_storage())
    return flat


def fill(chunk: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` to the beginning of a chunk and zeros to the rest.

    Padding may hold anything, but zeros do not alarm those who look for NaN on the wire.
    """
    count = values.numel()
    chunk[:count].copy_(values, non_blocking=True)
    if count < chunk.numel():
        chunk[count:].zero_()


def contributions(
    fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], world_size: int
) -> torch.Tensor:
    """Pack fulls, in the one dtype of their shards, as ``(world_size, sum of the chunks)``.

    A full that is alone, complete and of that dtype is not copied.
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
    """View a tensor as one dimension of numbers that every backend adds."""
    tensor = tensor.view(-1)
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as one dimension of a dtype that every backend carries."""
    tensor = as_real(tensor)
    return tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as one dimension of bytes."""
    return as_real(tensor).view(torch.uint8)


def copy_chunks(full: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy a 1-D full of at most as many elements into ``rows``, one chunk a row."""
    chunk = rows.shape[1]
    if chunk == 0:
        return
    whole = full.numel() // chunk
    rows[:whole].copy_(full[: whole * chunk].view(whole, chunk))
    if whole < rows.shape[0]:
        fill(rows[whole], full[whole * chunk :])
        rows[whole + 1 :].zero_()
