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
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise._torch import fsdp
from shardwise.base.boxes import Box, full_box, narrow
from shardwise.base.errors import CheckpointError
from shardwise.base.files import sync, write_new
from shardwise.checkpoint.disk.beside import written_beside
from shardwise.checkpoint.disk.entries import TensorInfo, dtype_name, torch_dtype
from shardwise.checkpoint.disk.filenames import SINGLE
from shardwise.checkpoint.disk.place import folder_of
from shardwise.checkpoint.disk.safetensors import PT_METADATA, as_bytes, lay_out
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
from shardwise.checkpoint.ranks.alike import RankState, check_alike, digests_of
from shardwise.checkpoint.ranks.loading import own_part, tensors_of
from shardwise.checkpoint.ranks.saving import wait_for_save
from shardwise.checkpoint.ranks.state import check_tensor, config_of
from shardwise.checkpoint.ranks.state import ties as ties_of
from shardwise.sharding.placement import full_tensor

R = TypeVar("R")


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
    wait_for_save()
    checked(save_hf, group, locals(), lambda: folder_of("path", path))
    saved = saved_model(model)
    write_model(Path(path), saved, max_shard_size=max_shard_size, buffer=buffer, group=group)


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

    def renamed(self, names: Mapping[str, str]) -> Conversion:
        """The same, with results of other names.

        Args:
            names: the new name of each result.
        """
        return Conversion(
            self.sources,
            {names[name]: info for name, info in self.results.items()},
            lambda full: {names[name]: each for name, each in self.convert(full).items()},
        )


@dataclass(frozen=True)
class Contents:
    """What ranks write of a model.

    Attributes:
        tensors: the tensors to write by their names in the files, sharded or not.
        conversions: what is written in another form. The sources of one conversion at a time are
            gathered in full on every rank.
        dtype: what floating-point tensors are converted to; ``None`` to write them as they are.
    """

    tensors: Mapping[str, torch.Tensor]
    conversions: Sequence[Conversion] = ()
    dtype: torch.dtype | None = None

    @functools.cached_property
    def infos(self) -> dict[str, TensorInfo]:
        """Dtype and shape of everything that is written, by name."""
        infos = {name: info_of(tensor) for name, tensor in self.tensors.items()}
        for conversion in self.conversions:
            infos.update(conversion.results)
        return {
            name: TensorInfo(dtype_name(self.dtype_of(torch_dtype(info.dtype))), info.shape)
            for name, info in infos.items()
        }

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which tensors of a dtype are written."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype


@dataclass(frozen=True)
class Rows:
    """A part of a tensor that this rank writes.

    Attributes:
        name: of the tensor.
        shape: of the tensor in full.
        box: which part of it.
        values: the part, in the dtype of the model; shares the memory of a shard, or is new.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor


def own_rows(contents: Contents, ranks: Ranks) -> list[Rows]:
    """The rows of this rank's shards that it is the one to write."""
    mine = {name: each.detach() for name, each in contents.tensors.items() if _writes(each, ranks)}
    parts = {name: own_part(tensor) for name, tensor in mine.items()}
    return [
        Rows(name, tuple(mine[name].shape), box, values.resolve_conj().resolve_neg())
        for name, (box, values) in parts.items()
    ]


def agreed_contents(
    read: Callable[[], Contents], ranks: Ranks, doing: str, prepare: Callable[[Contents], R]
) -> tuple[Contents, R]:
    """Let every rank find what it writes, and the first rank prepare for that. All ranks call this.

    Args:
        read: called on every rank; returns what is written.
        ranks: who writes.
        doing: what the ranks do, for error messages.
        prepare: called on the first rank with what it writes, once all others have found the same.

    Returns:
        What this rank writes, and what ``prepare`` has returned.

    Raises:
        CheckpointError: a rank failed, or has other tensors than the first one; raised on all ranks
            alike.
    """
    found: list[Contents] = []

    def plan() -> tuple[int, int, RankState]:
        found.append(read())
        infos = found[0].infos
        lines = "\n".join(f"{name} {info.dtype} {info.shape}" for name, info in infos.items())
        replicas = {n: t for n, t in found[0].tensors.items() if not isinstance(t, DTensor)}
        digests = digests_of(replicas, replicas.keys() if ranks.size > 1 else frozenset())
        held = RankState(
            [], [], {(("model", name), ()): digest for name, digest in digests.items()}
        )
        return len(infos), xxhash.xxh3_64_intdigest(lines.encode("utf-8", "surrogatepass")), held

    def compare(plans: list[tuple[int, int, RankState]]) -> list[tuple[R, str]]:
        for number, each in enumerate(plans):
            if each[:2] != plans[0][:2]:
                raise CheckpointError(
                    f"found {plans[0][0]} tensors, and on rank {number} of those that save "
                    f"{each[0]}, of other names, shapes or dtypes; expected the same model on all"
                )
        differs = check_alike([held for _, _, held in plans], ranks.names)
        return [(prepare(found[0]), differs)] * len(plans)

    prepared, differs = ranks.together(doing, plan, compare)
    if differs:
        warnings.warn(differs, stacklevel=2)
    return found[0], prepared


def write_rows(
    contents: Contents, ranks: Ranks, write: Callable[[list[Rows]], None]
) -> Callable[[], None]:
    """Let every rank write its rows. Every rank calls this.

    Every element is written by one rank. What is converted is written by one rank in full, the
    ranks taking turns.

    Args:
        contents: what to write.
        ranks: who writes.
        write: called with rows of this rank, once for the shards and once for each conversion.

    Returns:
        What raises if this rank has failed: its part in the next round of ``ranks``. Until then, it
        gathers with the others all the same.
    """
    errors: list[Exception] = []

    def attempt(make: Callable[[], list[Rows]]) -> None:
        try:
            if not errors:
                write(make())
        except Exception as error:  # raised below
            errors.append(error)

    attempt(lambda: own_rows(contents, ranks))
    for number, conversion in enumerate(contents.conversions):
        sources = {name: each.detach() for name, each in conversion.sources.items()}
        full = {
            name: (full_tensor(each) if isinstance(each, DTensor) else each).cpu()
            for name, each in sources.items()
        }
        if number % ranks.size == ranks.rank:
            attempt(functools.partial(_converted, conversion, full))
        del full

    def check() -> None:
        if errors:
            raise errors[0]

    return check


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
    target: Path,
    saved: SavedModel,
    *,
    max_shard_size: int = DEFAULT_SHARD,
    buffer: int = DEFAULT_BUFFER,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a model, sharded or not, to a new folder. Every rank calls this.

    Args:
        target: the folder to make, on a file system that all ranks share.
        saved: what to write.
        max_shard_size: largest size of a file in bytes; a larger tensor gets a file of its own.
        buffer: bytes that writing may hold beside the model.
        group: the ranks that save together; the default process group if ``None``.

    Raises:
        CheckpointError: it could not be written, or the path exists.
    """
    wait_for_save()
    ranks = Ranks(group_for(group))
    doing = f"saving {target}"
    with contextlib.ExitStack() as stack:

        def prepare(contents: Contents) -> tuple[str, Files]:
            most = sys.maxsize if saved.needs_single else max_shard_size
            files = plan_files(contents.infos, most, saved.single)
            partial = stack.enter_context(written_beside(target, None))
            partial.mkdir()
            _make_files(partial, files)
            write_index(partial, files)
            saved.write_others(partial)
            for made in partial.rglob("*"):
                sync(made)
            return str(partial), files

        contents, (partial, files) = agreed_contents(saved.contents, ranks, doing, prepare)
        places = {
            name: (Path(partial) / file, at)
            for file, infos in files.items()
            for name, at in lay_out(infos, PT_METADATA)[1].items()
        }
        write = functools.partial(_write_places, places, contents, ReadWindow(buffer))
        ranks.first(doing, stack.close, after=write_rows(contents, ranks, write))


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


def _writes(tensor: torch.Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the one to write its part, of all ranks that have the same part."""
    if not isinstance(tensor, DTensor):
        return ranks.coordinates
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        isinstance(placement, Replicate) and at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )


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


def _converted(conversion: Conversion, full: Mapping[str, torch.Tensor]) -> list[Rows]:
    made = conversion.convert(full)
    if {name: info_of(tensor) for name, tensor in made.items()} != dict(conversion.results):
        raise CheckpointError(
            f"{', '.join(conversion.sources)}: found {', '.join(made)} after the conversion, "
            f"expected {', '.join(conversion.results)} with the planned shapes"
        )
    return [
        Rows(name, tuple(tensor.shape), full_box(tensor.shape), tensor)
        for name, tensor in made.items()
    ]


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written
