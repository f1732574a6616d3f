"""The weights of a model alone: loaded from any format, and saved for Hugging Face.

A training that is to continue needs more than weights: see :mod:`.saving` and :mod:`.loading`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise._torch import dtensor
from shardwise.checkpoint.disk.boxes import Box, full_box
from shardwise.checkpoint.disk.commit import written_beside
from shardwise.checkpoint.disk.entries import TensorInfo, dtype_name, torch_dtype
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.disk.safetensors import PT_METADATA, as_bytes, in_order, make_header
from shardwise.checkpoint.formats.detect import open_source
from shardwise.checkpoint.formats.hf import DEFAULT_SHARD, HfFile, plan_files, write_index
from shardwise.checkpoint.formats.source import (
    DEFAULT_BUFFER,
    Source,
    Window,
    model_tensors,
)
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.checkpoint.ranks.state import check_same_names, check_tensor
from shardwise.checkpoint.ranks.state import ties as ties_of
from shardwise.errors import CheckpointError
from shardwise.sharding.state_dict import sharded_state_dict


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
        model: the model, sharded or not, with memory.
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
    state = {
        name: each
        for name, each in sharded_state_dict(model).items()
        if isinstance(each, torch.Tensor)
    }
    ties = ties_of(model)
    window = Window(buffer)
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
        for name, stored_as in found.items():
            if stored_as is not None:
                _fill(state[name], name, source, window, names[stored_as])


def _fill(
    tensor: torch.Tensor, name: str, source: Source, window: Window, path: tuple[str | int, ...]
) -> None:
    """Read this rank's part of a tensor, converted to the tensor's dtype."""
    info = source.tensors[path]
    check_tensor(tensor, name)
    if info.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{source.where}: {name}: found shape {list(info.shape)}, expected {list(tensor.shape)}"
        )
    for box, local in _parts(tensor):
        same = local.device.type == "cpu" and local.dtype == torch_dtype(info.dtype)
        if same and local.is_contiguous() and box.numel:
            source.read(path, box, local.detach())
            local.view(-1)[:0].zero_()  # tells autograd of a write, since it does not see the read
            continue
        for part, elements in window.parts(source, path, box):
            narrow(local, part.relative_to(box.offsets)).copy_(elements)


def _parts(tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield this rank's parts of a tensor: the box of each, and its elements."""
    if not isinstance(tensor, DTensor):
        yield full_box(tuple(tensor.shape)), tensor
        return
    local = dtensor.local_of(tensor)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    yield Box(tuple(chunk.offsets), tuple(chunk.sizes)), local


def save_hf(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_shard_size: int = DEFAULT_SHARD,
    buffer: int = DEFAULT_BUFFER,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model's weights as ``save_pretrained`` would save those of the unsharded model.

    Every rank calls this. Nothing is gathered: each rank writes its shards to their places in the
    files. The folder is complete, or does not exist. A tied parameter is saved once, under its
    first name, as transformers does. ``config.json`` and the tokenizer are left to transformers.

    Args:
        path: the folder to make, on a file system that all ranks share.
        model: the model, sharded or not.
        max_shard_size: largest size of a file in bytes; a larger tensor gets a file of its own.
        buffer: bytes that writing may hold beside the model.
        group: the ranks that save together; the default process group if ``None``.

    Raises:
        CheckpointError: it could not be written, or the path exists.
    """
    wait_for_save()
    ranks = Ranks(group_for(group))
    doing, target = f"saving {path}", Path(path)
    with contextlib.ExitStack() as stack:

        def prepare() -> tuple[str, list[HfFile]]:
            files = plan_files(
                {name: _info(tensor) for name, tensor in _named(model)}, max_shard_size
            )
            partial = stack.enter_context(written_beside(target, None))
            partial.mkdir()
            for file in files:
                _make_file(partial / file.name, file)
            write_index(partial, files)
            return str(partial), files

        partial, files = ranks.first(doing, prepare)
        ranks.all(doing, lambda: _write_parts(Path(partial), files, model, ranks, Window(buffer)))
        ranks.first(doing, stack.close)


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state dict, with tied ones under their first name only."""
    ties = ties_of(model)
    for name, tensor in sharded_state_dict(model).items():
        if isinstance(tensor, torch.Tensor) and ties.get(name, [name])[0] == name:
            yield name, check_tensor(tensor, name)


def _info(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape))


def _make_file(path: Path, file: HfFile) -> None:
    """Make a file with a header, and with room for the tensors."""
    header = make_header(in_order(file.tensors), PT_METADATA)
    with path.open("xb") as opened:
        opened.write(header)
        opened.truncate(len(header) + sum(info.nbytes for info in file.tensors.values()))


def _write_parts(
    folder: Path, files: Sequence[HfFile], model: nn.Module, ranks: Ranks, window: Window
) -> None:
    """Write what this rank has to write to the files, and wait until it is on the disk."""
    tensors = dict(_named(model))
    for file in files:
        ordered = in_order(file.tensors)
        at = len(make_header(ordered, PT_METADATA))
        with (folder / file.name).open("r+b") as opened:
            for name, info in ordered.items():
                if _writes(tensors[name], ranks):
                    _write_part(opened.fileno(), at, tensors[name], window)
                at += info.nbytes
            os.fsync(opened.fileno())


def _writes(tensor: torch.Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the one to write its part, of all ranks that have the same part."""
    if not isinstance(tensor, DTensor):
        return ranks.coordinates
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        isinstance(placement, Replicate) and at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )


def _write_part(handle: int, start: int, tensor: torch.Tensor, window: Window) -> None:
    info = _info(tensor)
    for box, local in _parts(tensor):
        for part in window.boxes(info, box):
            here = narrow(local.detach(), part.relative_to(box.offsets)).contiguous().cpu()
            data = as_bytes(here).numpy().data
            for first, count in _runs(part, info.shape):
                run, data = data[: count * info.itemsize], data[count * info.itemsize :]
                _write_all(handle, run, start + first * info.itemsize)


def _runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where the elements of a box are in the full tensor, as runs of consecutive elements.

    Yields:
        Index of the first element of a run, and its length.
    """
    outer = len(shape)
    run = 1
    while outer and run == _numel(shape[outer:]):
        outer -= 1
        run *= box.sizes[outer]
    for index in itertools.product(*map(range, box.sizes[:outer])):
        inside = tuple(
            a + b for a, b in zip(box.offsets, (*index, *[0] * len(shape)), strict=False)
        )
        first = 0
        for place, size in zip(inside, shape, strict=True):
            first = first * size + place
        yield first, run


def _numel(sizes: Sequence[int]) -> int:
    return torch.Size(sizes).numel()


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written
