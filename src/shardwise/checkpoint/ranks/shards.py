"""This rank's parts of tensors: which they are, and how they are read from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.boxes import Box, full_box
from shardwise.checkpoint.disk.entries import StatePath, torch_dtype
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.formats.source import ReadWindow, Source
from shardwise.checkpoint.ranks.state import check_tensor


def parts(tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield this rank's parts of a tensor: the box of each, and its elements."""
    if not isinstance(tensor, DTensor):
        yield full_box(tuple(tensor.shape)), tensor
        return
    local = dtensor.local_of(tensor)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    yield Box(tuple(chunk.offsets), tuple(chunk.sizes)), local


def read_parts(
    tensor: torch.Tensor, name: str, source: Source, window: ReadWindow, path: StatePath
) -> None:
    """Read this rank's part of a tensor, converted to the tensor's dtype.

    Args:
        tensor: the tensor to fill, with memory.
        name: its name, for error messages.
        source: the checkpoint.
        window: the buffer for what cannot be read straight into the tensor.
        path: path of the tensor in the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or has another shape.
    """
    info = source.tensors[path]
    check_tensor(tensor, name)
    if info.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{source.where}: {name}: found shape {list(info.shape)}, expected {list(tensor.shape)}"
        )
    for box, local in parts(tensor):
        same = local.device.type == "cpu" and local.dtype == torch_dtype(info.dtype)
        if same and local.is_contiguous() and box.numel:
            source.read(path, box, local.detach())
            local.view(-1)[:0].zero_()  # tells autograd of a write, since it does not see the read
            continue
        for part, elements in window.parts(source, path, box):
            narrow(local, part.relative_to(box.offsets)).copy_(elements)
