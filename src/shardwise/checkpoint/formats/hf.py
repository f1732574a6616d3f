"""The layout of Hugging Face's ``save_pretrained``: safetensors files, and an index of them.

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json          which tensor is in which file

A model that fits in one file is ``model.safetensors``, without an index. There is only the model:
neither optimizer nor plain values. ``config.json`` is written where the checkpoint or its run has
one; the tokenizer is not ours to write.

The ``config.json`` of a model: where it lies, and what it says of tied weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from shardwise.checkpoint.disk.boxes import Box
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo
from shardwise.checkpoint.disk.files import Links, read_small, write_new
from shardwise.checkpoint.disk.safetensors import Place, read_header, write_safetensors
from shardwise.checkpoint.disk.strict import Fields, parse, refuse
from shardwise.checkpoint.formats.source import (
    BaseSource,
    ExtentReader,
    Source,
    Window,
    full_extent,
    model_tensors,
)
from shardwise.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: The size of files that ``save_pretrained`` makes, in bytes.
DEFAULT_SHARD = 50 * 10**9
_MAX_INDEX = 1 << 28
_FILE = re.compile(r"[^./\\\0][^/\\\0]*\.safetensors")


@dataclass(frozen=True)
class HfFile:
    """One file of a model.

    Attributes:
        name: the file's name.
        tensors: what it holds.
    """

    name: str
    tensors: Mapping[str, TensorInfo]


class HfSource(BaseSource):
    """A model in this layout, or in a single safetensors file.

    Args:
        where: the folder, or a ``.safetensors`` file.

    Raises:
        CheckpointError: there is none, or its index or a header is damaged.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        self._reader = ExtentReader()
        self._places: dict[StatePath, tuple[Path, Place]] = {}
        for file, named in _files(where).items():
            self._add(file, named)
        self.tensors = {path: place.info for path, (_, place) in self._places.items()}
        self.values: dict[StatePath, Any] = {}

    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor; see :class:`.Source`."""
        file, place = self._places[path]
        self._reader.read([full_extent(place.info, file, place.start)], box, into)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def _add(self, file: Path, named: frozenset[str]) -> None:
        """The tensors of a file: those that the index names, and those that it knows nothing of."""
        places = read_header(file)
        missing = sorted(named - places.keys())
        if missing:
            raise CheckpointError(
                f"{self.where / INDEX}: says that {missing[0]!r} is in {file.name}, which does not "
                f"hold it{_and_others(missing)}"
            )
        for name, place in places.items():
            path = ("model", name)
            if path in self._places and name not in named:
                continue  # a second copy, in another file than the index says
            self._places[path] = (file.resolve(), place)


def _files(where: Path) -> dict[Path, frozenset[str]]:
    """The files of a model, and for each the tensors that the index says are in it."""
    if not where.is_dir():
        return {where: frozenset()}
    if (where / INDEX).exists():
        return _read_index(where)
    found = sorted(where.glob("*.safetensors"))
    single = where / SINGLE
    if single in found:
        return {single: frozenset()}
    if len(found) == 1:
        return {found[0]: frozenset()}
    raise CheckpointError(
        f"{where}: found {len(found)} safetensors files and no {INDEX}, expected the index, or a "
        f"single file {SINGLE}"
    )


def _read_index(folder: Path) -> dict[Path, frozenset[str]]:
    index = folder / INDEX
    text = read_small(index, _MAX_INDEX, Links.FOLLOW)
    files: dict[Path, set[str]] = {}
    for name, file in Fields(parse(text, str(index)), str(index)).object("weight_map").items():
        if not isinstance(file, str) or not file.isprintable() or not _FILE.fullmatch(file):
            refuse(f"{index}, {name!r}", file, "the name of a .safetensors file beside the index")
        files.setdefault(folder / file, set()).add(name)
    if not files:
        refuse(f"{index}, 'weight_map'", "nothing", "the file of every tensor")
    return {file: frozenset(names) for file, names in files.items()}


def _and_others(names: list[str]) -> str:
    return f", nor {len(names) - 1} others" if len(names) > 1 else ""


def plan_files(tensors: Mapping[str, TensorInfo], max_shard_size: int) -> list[HfFile]:
    """Which tensor goes into which file: in order, a new file when the next does not fit.

    A tensor that is larger than ``max_shard_size`` gets a file of its own.
    """
    groups: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for name, info in tensors.items():
        if groups[-1] and filled + info.nbytes > max_shard_size:
            groups.append({})
            filled = 0
        groups[-1][name] = info
        filled += info.nbytes
    if len(groups) == 1:
        return [HfFile(SINGLE, groups[0])]
    return [
        HfFile(f"model-{i:05}-of-{len(groups):05}.safetensors", group)
        for i, group in enumerate(groups, 1)
    ]


def write_index(folder: Path, files: list[HfFile]) -> None:
    """Say which tensor is in which file, if there is more than one file."""
    if len(files) == 1:
        return
    sizes = [info.nbytes for file in files for info in file.tensors.values()]
    index = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {name: file.name for file in files for name in file.tensors},
    }
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    write_new(folder / INDEX, text.encode("utf-8"))


def write_hf(
    folder: Path, source: Source, window: Window, max_shard_size: int = DEFAULT_SHARD
) -> list[Path]:
    """Write the model of a source in this layout, front to back.

    Where the source has a ``config.json`` beside it, in the folder of its run or in itself, that is
    written too. Weights that are tied are written once, as transformers does.

    Args:
        folder: an empty folder.
        source: what to write.
        window: the memory to use.
        max_shard_size: bytes of a file, at most, unless a single tensor is larger.

    Returns:
        The files with tensors.

    Raises:
        CheckpointError: the source is damaged, or holds no model.
    """
    paths = model_tensors(source)
    text, said = find_config(source) or (b"", {})
    for name in tied_copies(source, paths, said, Window(window.nbytes)):
        window.progress(source.tensors[paths.pop(name)].nbytes)
    if text:
        (folder / CONFIG).write_bytes(text)
    files = plan_files({name: source.tensors[path] for name, path in paths.items()}, max_shard_size)
    for file in files:
        write_safetensors(folder / file.name, file.tensors, _chunks_of(source, paths, window))
    write_index(folder, files)
    return [folder / file.name for file in files]


def write_single(file: Path, source: Source, window: Window) -> None:
    """Write the model of a source as one safetensors file."""
    paths = model_tensors(source)
    infos = {name: source.tensors[path] for name, path in paths.items()}
    write_safetensors(file, infos, _chunks_of(source, paths, window))


def _chunks_of(
    source: Source, paths: Mapping[str, StatePath], window: Window
) -> Callable[[str], Iterator[memoryview]]:
    return lambda name: window.chunks(source, paths[name])


CONFIG = "config.json"
_MOST = 1 << 24


def find_config(source: Source) -> tuple[bytes, Mapping[str, Any]] | None:
    """The configuration that goes with a checkpoint.

    From its folder, or that of its run; else what the model said when it was saved.

    Args:
        source: of a folder or file; ``step-00000040`` and ``checkpoints/step-00000040`` lie in
            the folder of a run.

    Returns:
        The text of a file, and what it says; ``None`` where there is none that names a
        ``model_type``.
    """
    checkpoint = source.where
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    folders = [folder]
    if folder.name.startswith("step-"):
        run = folder.resolve().parent
        folders.append(run.parent if run.name == "checkpoints" else run)
    for each in folders:
        file = each / CONFIG
        if file.exists():
            try:
                text = read_small(file, _MOST, Links.FOLLOW)
                said = parse(text, str(file))
            except CheckpointError:
                continue
            if isinstance(said, dict) and isinstance(said.get("model_type"), str):
                return text, said
    if not source.config:
        return None
    return f"{json.dumps(dict(source.config), indent=2)}\n".encode(), source.config


def tied_copies(
    source: Source, paths: Mapping[str, StatePath], config: Mapping[str, Any], window: Window
) -> set[str]:
    """The names of weights that are a copy of another, and tied to it.

    Which are tied says the checkpoint, as far as its format does. And where the configuration says
    that embedding and head are, all equal matrices with a row for every token of the vocabulary
    are taken for such. Others may be equal by chance, as norms are that have not learnt yet.

    Args:
        source: what holds them.
        paths: name in the model -> path in the source.
        config: as in a ``config.json``; empty where there is none.
        window: the memory to read through.

    Returns:
        All names but the first of each value.
    """
    tie = config.get("tie_word_embeddings")
    if tie is False:
        return set()  # who reads it will not tie them again
    tied = [{name, other} for name, other in source.tied.items() if {name, other} <= paths.keys()]
    rows = config.get("vocab_size") if tie is True else None
    infos = {name: source.tensors[path] for name, path in paths.items()}
    tied.append(
        {name for name, info in infos.items() if len(info.shape) == 2 and info.shape[0] == rows}
    )
    digests = {
        name: (infos[name], _digest(source, paths[name], window))
        for name in paths
        if any(name in group and len(group) > 1 for group in tied)
    }
    copies: set[str] = set()
    for group in tied:
        first: dict[tuple[TensorInfo, bytes], str] = {}
        for name in (name for name in digests if name in group):
            if first.setdefault(digests[name], name) != name:
                copies.add(name)
    return copies


def _digest(source: Source, path: StatePath, window: Window) -> bytes:
    digest = xxhash.xxh3_128()
    for chunk in window.chunks(source, path):
        digest.update(chunk)
    return digest.digest()
