"""The weights of a model alone, loaded from any format. :mod:`.hf` saves them.

A training that is to continue needs more than weights: see :mod:`.saving` and :mod:`.loading`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch import dtensor
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.boxes import Box
from shardwise.checkpoint.disk.entries import StatePath, torch_dtype
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.formats.detect import open_source
from shardwise.checkpoint.formats.source import (
    DEFAULT_BUFFER,
    ReadWindow,
    Source,
    model_tensors,
)
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.checkpoint.ranks.state import check_same_names, check_tensor, sharded_state_dict
from shardwise.checkpoint.ranks.state import ties as ties_of
from shardwise.sharding.allocate import allocate


def load_weights(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    strict: bool = True,
    buffer: int = DEFAULT_BUFFER,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load a model's weights. Each rank reads its shards and no more. Every rank calls this.

    Values are converted to the dtype of the parameter. A tied parameter is found under any of its
    names.

    Args:
        path: a folder of ``save_pretrained``, a safetensors file, a file of ``torch.save`` (which
            is read without running code from it), a checkpoint of ``torch.distributed.checkpoint``,
            or one of Shardwise.
        model: the model, sharded or not. Tensors on the meta device get memory; those that are not
            in the checkpoint (``strict=False``) stay on the meta device.
        strict: whether the names must be exactly the model's.
        buffer: bytes that reading may hold beside the model.
        group: the ranks that load together; the default process group if ``None``.

    Raises:
        CheckpointError: it is damaged or of another model; raised on all ranks alike.
    """
    wait_for_save()
    ranks = Ranks(group_for(group))
    ranks.all(f"loading {path}", lambda: _load(Path(path), model, strict=strict, buffer=buffer))


def _load(path: Path, model: nn.Module, *, strict: bool, buffer: int) -> None:
    state = tensors_of(model)
    ties = ties_of(model)
    window = ReadWindow(buffer)
    with open_source(path) as source, torch.no_grad():
        names = model_tensors(source)
        found = {
            name: next((n for n in [name, *ties.get(name, ())] if n in names), None)
            for name in state
        }
        if strict:
            used = {stored_as for stored_as in found.values() if stored_as is not None}
            check_same_names(
                str(source.where),
                missing={name for name, stored_as in found.items() if stored_as is None},
                unexpected=names.keys() - found.keys() - used,
            )
        if allocate(model, [name for name, stored_as in found.items() if stored_as is not None]):
            state = tensors_of(model)
        for name, stored_as in found.items():
            if stored_as is not None:
                read_parts(state[name], name, source, window, names[stored_as])


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model's state dict by name, with shards as ``DTensor``s."""
    return {
        name: each
        for name, each in sharded_state_dict(model).items()
        if isinstance(each, torch.Tensor)
    }


def parts(tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield this rank's parts of a tensor: the box of each, and its elements."""
    yield Box(*dtensor.chunk_of(tensor)), dtensor.plain(tensor)


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
