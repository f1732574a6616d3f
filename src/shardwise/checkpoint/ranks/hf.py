"""The weights of a model, written in Hugging Face's format: each rank writes its shards.

The files are planned and made on the first rank, with room for every tensor. Then each rank writes
its rows to their places. In an object store, where a file has one writer, rows travel to it: see
:mod:`.streams`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch import fsdp
from shardwise.base.boxes import narrow
from shardwise.base.files import sync, write_new
from shardwise.checkpoint.disk.companions import Folder, write_beside
from shardwise.checkpoint.disk.entries import TensorInfo, dtype_name
from shardwise.checkpoint.disk.filenames import INDEX, SINGLE
from shardwise.checkpoint.disk.place import Place, place_of
from shardwise.checkpoint.disk.safetensors import PT_METADATA, as_bytes, lay_out
from shardwise.checkpoint.formats.destination import destination_of
from shardwise.checkpoint.formats.hf import (
    CONFIG,
    DEFAULT_SHARD,
    GENERATION_CONFIG,
    Files,
    plan_files,
    write_index,
)
from shardwise.checkpoint.formats.source import DEFAULT_BUFFER, ReadWindow
from shardwise.checkpoint.ranks.agreement import Ranks, checked, group_for
from shardwise.checkpoint.ranks.contents import Contents, Rows, agreed_contents, write_rows
from shardwise.checkpoint.ranks.loading import tensors_of
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.checkpoint.ranks.state import check_tensor, config_of
from shardwise.checkpoint.ranks.state import ties as ties_of

#: Default size of a file in an object store, in bytes: many ranks have one to write.
STORE_SHARD = 2 * 10**9


def save_hf(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_shard_size: int | None = None,
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
        path: the folder to make, on a file system that all ranks share; or its URL in an object
            store, where each file is sent by one rank.
        model: the model, sharded or not.
        max_shard_size: largest size of a file in bytes; a larger tensor gets a file of its own.
            ``None`` for 50 GB, and in an object store for 2 GB.
        buffer: bytes that writing to a folder may hold beside the model.
        group: the ranks that save together; the default process group if ``None``.

    Raises:
        CheckpointError: it could not be written, or the path exists.
    """
    wait_for_save()
    checked(save_hf, group, locals(), lambda: place_of(path))
    saved = saved_model(model)
    write_model(place_of(path), saved, max_shard_size=max_shard_size, buffer=buffer, group=group)


@dataclass(frozen=True)
class SavedModel:
    """How a model is saved.

    Attributes:
        contents: called on every rank whenever the model is saved; returns what is written of it.
            Calls after the first are cheap.
        write_others: called on the first rank with the folder, to write the files beside the
            weights.
        single: name of the file, if all tensors are in one.
        needs_single: whether whoever reads it reads one file only, however large.
    """

    contents: Callable[[], Contents]
    write_others: Callable[[Path], None]
    single: str = SINGLE
    needs_single: bool = False


def saved_model(model: nn.Module) -> SavedModel:
    """How any model is saved: under its own names, with its configuration if it has one."""
    return SavedModel(
        lambda: Contents(named_tensors(model)), lambda folder: write_configs(folder, model)
    )


def write_model(
    place: Place,
    saved: SavedModel,
    *,
    max_shard_size: int | None = None,
    buffer: int = DEFAULT_BUFFER,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a model, sharded or not, to a new folder. Every rank calls this.

    Args:
        place: the folder to make, on a file system that all ranks share, or in an object store.
        saved: what to write.
        max_shard_size: as for :func:`save_hf`.
        buffer: as for :func:`save_hf`.
        group: the ranks that save together; the default process group if ``None``.

    Raises:
        CheckpointError: it could not be written, or the path exists.
    """
    wait_for_save()
    ranks = Ranks(group_for(group))
    doing = f"saving {place}"
    if max_shard_size is None:
        max_shard_size = DEFAULT_SHARD if isinstance(place, Path) else STORE_SHARD
    most = sys.maxsize if saved.needs_single else max_shard_size
    with contextlib.ExitStack() as stack:

        def prepare(contents: Contents) -> Files:
            files = plan_files(contents.infos, most, saved.single)
            folder = stack.enter_context(destination_of(place).opened(INDEX))
            write_index(folder, files)
            with _small_files(folder) as others:
                saved.write_others(others)
            placed = {os.fspath(folder / name): infos for name, infos in files.items()}
            if isinstance(folder, Path):
                _make_files(placed)
            return placed

        contents, files = agreed_contents(saved.contents, ranks, doing, prepare)
        if isinstance(place, Path):
            places = {
                name: (Path(file), at)
                for file, infos in files.items()
                for name, at in lay_out(infos, PT_METADATA)[1].items()
            }
            write = functools.partial(_write_places, places, contents, ReadWindow(buffer))
            check = write_rows(contents, ranks, write)
        else:
            from shardwise.checkpoint.ranks.streams import FileStreams  # of no use to folders

            streams = FileStreams(contents, files, ranks, doing)
            streams.write()
            check = streams.check
        ranks.first(doing, stack.close, after=check)


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
    found = tensors_of(model)

    def is_first(name: str) -> bool:
        names = [each for each in ties.get(name, [name]) if each in found]
        return min(names, key=secondary.__contains__) == name

    return {name: check_tensor(tensor, name) for name, tensor in found.items() if is_first(name)}


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


@contextlib.contextmanager
def _small_files(folder: Folder) -> Iterator[Path]:
    """Yield a folder of this host for small files of a checkpoint, which other programs write.

    Args:
        folder: the folder of the checkpoint, as for :func:`write_beside`.
    """
    if isinstance(folder, Path):
        yield folder
        for made in folder.rglob("*"):
            sync(made)
        return
    with tempfile.TemporaryDirectory() as beside:
        yield Path(beside)
        for made in filter(Path.is_file, Path(beside).rglob("*")):
            write_beside(folder, made.relative_to(beside).as_posix(), made.read_bytes())


def _make_files(files: Files) -> None:
    """Make files with a header, and with room for the tensors."""
    for name, tensors in files.items():
        header, _ = lay_out(tensors, PT_METADATA)
        with open(name, "xb") as opened:
            opened.write(header)
            opened.truncate(len(header) + sum(info.nbytes for info in tensors.values()))


#: Where tensors are: the file, and the byte of it at which they begin, by name.
_Places = Mapping[str, tuple[Path, int]]


def _write_places(
    places: _Places, contents: Contents, window: ReadWindow, rows: Sequence[Rows]
) -> None:
    """Write rows to their places in files that exist, and wait until they are on the disk."""
    ordered = sorted(rows, key=lambda each: places[each.name])
    for file, group in itertools.groupby(ordered, key=lambda each: places[each.name][0]):
        with file.open("r+b") as opened:
            for each in group:
                dtype = contents.dtype_of(each.values.dtype)
                _write_parts(opened.fileno(), places[each.name][1], each, dtype, window)
            os.fsync(opened.fileno())


def _write_parts(
    handle: int, start: int, rows: Rows, dtype: torch.dtype, window: ReadWindow
) -> None:
    """Write rows to an open file in which their tensor begins at byte ``start``."""
    info = TensorInfo(dtype_name(dtype), rows.shape)
    for part in window.boxes(info, rows.box):
        found = narrow(rows.values, part.relative_to(rows.box.offsets))
        data = as_bytes(found.to(dtype).contiguous().cpu()).numpy().data
        for first, count in part.runs(info.shape):
            run, data = data[: count * info.itemsize], data[count * info.itemsize :]
            _write_all(handle, run, start + first * info.itemsize)


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written
