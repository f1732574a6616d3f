"""The weights of a model, written in Hugging Face's format: each rank writes its shards.

The files are planned and made on the first rank, with room for every tensor. Then each rank writes
its rows to their places. Nothing is gathered, except for what a caller wants written in another
form than the model has it, such as the experts of a layer one by one: see :class:`Conversion`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise._torch import fsdp
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.commit import written_beside
from shardwise.checkpoint.disk.entries import TensorInfo, dtype_name
from shardwise.checkpoint.disk.files import sync, write_new
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.disk.safetensors import PT_METADATA, as_bytes, lay_out
from shardwise.checkpoint.formats.hf import (
    CONFIG,
    DEFAULT_SHARD,
    GENERATION_CONFIG,
    SINGLE,
    Files,
    plan_files,
    write_index,
)
from shardwise.checkpoint.formats.source import DEFAULT_BUFFER, ReadWindow
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.loading import own_part
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.checkpoint.ranks.state import check_tensor, config_of, sharded_state_dict
from shardwise.checkpoint.ranks.state import ties as ties_of
from shardwise.optim.part import runs_of
from shardwise.sharding.placement import full_tensor


def save_hf(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_shard_size: int = DEFAULT_SHARD,
    buffer: int = DEFAULT_BUFFER,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model's weights, and its configuration, in the format of ``save_pretrained``.

    Every rank calls this. Nothing is gathered: each rank writes its shards to their places in the
    files. The folder is complete, or does not exist. A tied parameter is saved once, under its
    first name. If the model is one of transformers, ``config.json`` is written and, if it can
    generate, ``generation_config.json``, so that ``from_pretrained`` loads the folder.
    :func:`shardwise.save_pretrained` also writes the tokenizer.

    Args:
        path: the folder to make, on a file system that all ranks share.
        model: the model, sharded or not.
        max_shard_size: largest size of a file in bytes; a larger tensor gets a file of its own.
        buffer: bytes that writing may hold beside the model.
        group: the ranks that save together; the default process group if ``None``.

    Raises:
        CheckpointError: it could not be written, or the path exists.
    """
    write_model(
        Path(path),
        lambda: (named_tensors(model), []),
        lambda folder: write_configs(folder, model),
        max_shard_size=max_shard_size,
        buffer=buffer,
        group=group,
    )


@dataclass(frozen=True)
class Conversion:
    """Tensors of a model that are written in another form.

    Attributes:
        sources: the tensors of the model by name, sharded or not.
        results: what is written in their place, by name.
        convert: makes the tensors to write of the full ``sources``, on the CPU.
    """

    sources: Mapping[str, torch.Tensor]
    results: Mapping[str, TensorInfo]
    convert: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def write_model(
    target: Path,
    contents: Callable[[], tuple[Mapping[str, torch.Tensor], Sequence[Conversion]]],
    write_others: Callable[[Path], None],
    *,
    max_shard_size: int,
    buffer: int,
    group: dist.ProcessGroup | None,
    single: str = SINGLE,
) -> None:
    """Write tensors, sharded or not, and other files to a new folder. Every rank calls this.

    Args:
        target: the folder to make, on a file system that all ranks share.
        contents: called on every rank; returns what it has to write: tensors by the names in the
            files, and what is converted first. The sources of one conversion at a time are gathered
            in full on every rank.
        write_others: called on the first rank with the folder, to write the other files.
        max_shard_size: largest size of a file in bytes; a larger tensor gets a file of its own.
        buffer: bytes that writing may hold beside the model.
        group: the ranks that save together; the default process group if ``None``.
        single: name of the file, if all tensors are in one.

    Raises:
        CheckpointError: it could not be written, or the path exists.
    """
    wait_for_save()
    ranks = Ranks(group_for(group))
    doing = f"saving {target}"
    tensors, conversions = ranks.all(doing, contents)
    with contextlib.ExitStack() as stack:

        def prepare() -> tuple[str, Files]:
            infos = {name: info_of(tensor) for name, tensor in tensors.items()}
            for conversion in conversions:
                infos.update(conversion.results)
            files = plan_files(infos, max_shard_size, single)
            partial = stack.enter_context(written_beside(target, None))
            partial.mkdir()
            _make_files(partial, files)
            write_index(partial, files)
            write_others(partial)
            for written in partial.rglob("*"):
                sync(written)
            return str(partial), files

        partial, files = ranks.first(doing, prepare)
        places = {
            name: (Path(partial) / file, at)
            for file, infos in files.items()
            for name, at in lay_out(infos, PT_METADATA)[1].items()
        }
        ranks.all(doing, lambda: _write_shards(places, tensors, ranks, ReadWindow(buffer)))
        for number, conversion in enumerate(conversions):
            sources = {name: each.detach() for name, each in conversion.sources.items()}
            full = {
                name: (full_tensor(each) if isinstance(each, DTensor) else each).cpu()
                for name, each in sources.items()
            }
            writes = number % ranks.size == ranks.rank
            made = full if writes else {}
            ranks.all(doing, functools.partial(_write_converted, places, conversion, made))
            del full, made
        ranks.first(doing, stack.close)


def named_tensors(model: nn.Module, secondary: Set[str] = frozenset()) -> dict[str, torch.Tensor]:
    """The tensors of a state dict by name, with tied ones under one name only.

    Args:
        model: the model, sharded or not.
        secondary: names that a tied tensor is not saved under if it has another one. Of the others,
            it is the first.

    Raises:
        TypeError: a tensor cannot be saved; see :func:`.check_tensor`.
        ValueError: a tensor is on the meta device.
    """
    ties = ties_of(model)
    return {
        name: check_tensor(tensor, name)
        for name, tensor in sharded_state_dict(model).items()
        if isinstance(tensor, torch.Tensor)
        and min(ties.get(name, [name]), key=secondary.__contains__) == name
    }


def write_configs(folder: Path, model: nn.Module) -> None:
    """Write ``config.json`` and ``generation_config.json``, if the model has them.

    Args:
        folder: the folder of the model.
        model: a model of transformers, or anything else, for which nothing is written.
    """
    if not (config := config_of(model)):
        return
    if hasattr(type(model), "config_class"):  # it is not a wrapper that only shows the config
        config["architectures"] = [fsdp.original_class(model).__name__]
    config.pop("distributed_config", None)  # how this process was to shard the model
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    if (dtype := next(floats, None)) is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    write_new(folder / CONFIG, f"{json.dumps(config, indent=2)}\n".encode())
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        write_new(folder / GENERATION_CONFIG, generation.to_json_string().encode())


def info_of(tensor: torch.Tensor) -> TensorInfo:
    """The dtype and the full shape of a tensor."""
    return TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape))


def _make_files(folder: Path, files: Files) -> None:
    """Make files with a header, and with room for the tensors."""
    for name, tensors in files.items():
        header, _ = lay_out(tensors, PT_METADATA)
        with (folder / name).open("xb") as opened:
            opened.write(header)
            opened.truncate(len(header) + sum(info.nbytes for info in tensors.values()))


#: Where tensors are: the file, and the byte of it at which they begin, by name.
_Places = Mapping[str, tuple[Path, int]]


def _opened(places: _Places, names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Open the files of tensors, one after the other, and sync each in the end.

    Yields:
        A name, the descriptor of its file, and where in the file the tensor begins.
    """
    ordered = sorted(names, key=lambda name: places[name])
    for file, group in itertools.groupby(ordered, key=lambda name: places[name][0]):
        with file.open("r+b") as opened:
            for name in group:
                yield name, opened.fileno(), places[name][1]
            os.fsync(opened.fileno())


def _write_shards(
    places: _Places, tensors: Mapping[str, torch.Tensor], ranks: Ranks, window: ReadWindow
) -> None:
    """Write what this rank has to write to the files, and wait until it is on the disk."""
    own = [name for name, tensor in tensors.items() if _writes(tensor, ranks)]
    for name, handle, start in _opened(places, own):
        _write_parts(handle, start, tensors[name], window)


def _writes(tensor: torch.Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the one to write its part, of all ranks that have the same part."""
    if not isinstance(tensor, DTensor):
        return ranks.coordinates
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        isinstance(placement, Replicate) and at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )


def _write_parts(handle: int, start: int, tensor: torch.Tensor, window: ReadWindow) -> None:
    info = info_of(tensor)
    box, local = own_part(tensor)
    for part in window.boxes(info, box):
        here = narrow(local.detach(), part.relative_to(box.offsets)).contiguous().cpu()
        data = as_bytes(here).numpy().data
        for first, count in runs_of(info.shape, part.offsets, part.sizes):
            run, data = data[: count * info.itemsize], data[count * info.itemsize :]
            _write_all(handle, run, start + first * info.itemsize)


def _write_converted(
    places: _Places, conversion: Conversion, full: Mapping[str, torch.Tensor]
) -> None:
    """Convert full tensors and write the results; nothing on a rank that has no full tensors."""
    if not full:
        return
    made = conversion.convert(full)
    if {name: info_of(tensor) for name, tensor in made.items()} != dict(conversion.results):
        raise CheckpointError(
            f"{', '.join(conversion.sources)}: found {', '.join(made)} after the conversion, "
            f"expected {', '.join(conversion.results)} with the planned shapes"
        )
    for name, handle, start in _opened(places, list(made)):
        _write_all(handle, as_bytes(made[name].contiguous()).numpy().data, start)


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written
