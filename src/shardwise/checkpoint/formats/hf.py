"""The format of Hugging Face's ``save_pretrained``: safetensors files, and an index of them.

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json          the file of each tensor, by name
    config.json                           the model's configuration

A model that fits in one file is ``model.safetensors``, without an index. The format contains only
the model, neither an optimizer nor plain values. ``config.json`` is written if the checkpoint or
its run has one.

Source: ``transformers.PreTrainedModel.save_pretrained``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from shardwise.base.boxes import Box, full_box, row_major
from shardwise.base.errors import CheckpointError, StoreError
from shardwise.base.portions import portions
from shardwise.base.strict import Fields, parse, refuse
from shardwise.checkpoint.disk.beside import folders_of
from shardwise.checkpoint.disk.companions import Folder, write_beside
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo
from shardwise.checkpoint.disk.filenames import INDEX, SINGLE, is_of_attempt
from shardwise.checkpoint.disk.place import Place, read_whole
from shardwise.checkpoint.disk.safetensors import (
    StoredSpan,
    read_header,
    read_spans,
    write_safetensors,
)
from shardwise.checkpoint.formats.source import (
    Extent,
    ExtentSource,
    ReadWindow,
    Source,
    model_tensors,
)

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.store_path import StoredObject, StorePath
    from shardwise.checkpoint.disk.store_reads import StoreReads

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
#: Default size of a file in bytes, as in ``save_pretrained``.
DEFAULT_SHARD = 50 * 10**9
_MAX_INDEX = 1 << 28
_MAX_CONFIG = 1 << 24
_ONE_OF = re.compile(r".*-\d+-of-(?!0*1\D)\d", re.ASCII)  # one of several
_FILE = re.compile(r"[^./\\\0][^/\\\0]*\.safetensors")


#: Dtype and shape of the tensors of a model by name, by the name of their file.
Files = Mapping[str, Mapping[str, TensorInfo]]


class HfSource(ExtentSource):
    """A model in this format, or in a single safetensors file.

    Args:
        where: the folder, or a ``.safetensors`` file; or its name in an object store, whose files
            must not be replaced while they are read.

    Raises:
        CheckpointError: there is no model, or its index or a header is damaged.
        StoreError: the object store does not answer.
    """

    def __init__(self, where: Place) -> None:
        folder: Place = where
        self._reads: StoreReads | None = None
        if not isinstance(where, Path):
            from shardwise.checkpoint.disk.store_reads import StoreReads  # of no use to folders

            folder, found = _stored_beside(where)
            sizes = {name: each.size for name, each in found.items()}
            tags = {name: each.tag for name, each in found.items()}
            self._reads = StoreReads(folder, sizes, tags=tags)
            files = _files(folder, sizes) if folder == where else {where: set[str]()}
        else:
            files = _files(where, _names_in(where)) if where.is_dir() else {where: set()}
        super().__init__(where, self._reads)
        self.tensors: dict[StatePath, TensorInfo] = {}
        self.values: dict[StatePath, Any] = {}
        self._extents: dict[StatePath, Extent] = {}
        try:
            for file, named in files.items():
                self._add(file, named)
        except BaseException:
            self.close()
            raise

    def _header_of(self, file: StorePath) -> dict[str, StoredSpan]:
        """Read where the tensors of a file in an object store are."""
        assert self._reads is not None
        if not self._reads.has(file.name):
            raise CheckpointError(f"{file}: is missing")
        with self._reads.open(file.name) as opened:
            return read_spans(opened.read, opened.size, file)

    def expect(self, parts: Iterable[tuple[StatePath, Box]]) -> None:
        """Plan to read parts of tensors; see :class:`.Source`."""
        for path, box in parts if self._reads is not None else ():
            assert self._reads is not None
            extent, itemsize = self._extents[path], self.tensors[path].itemsize
            first, end = (extent.start + at * itemsize for at in box.span(extent.box.sizes))
            self._reads.want(extent.file.name, first, end)

    def _extents_of(self, path: StatePath) -> list[Extent]:
        return [self._extents[path]]

    def _add(self, file: Place, named: set[str]) -> None:
        """Add the tensors of a file: those that the index names, and those that it lacks."""
        places = read_header(file) if isinstance(file, Path) else self._header_of(file)
        missing = sorted(named - places.keys())
        if missing:
            others = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{self.where / INDEX}: says that {missing[0]!r} is in {file.name}, which does not "
                f"contain it{others}"
            )
        for name, place in places.items():
            path = ("model", name)
            if path in self.tensors and name not in named:
                continue  # a second copy, in a file other than the index says
            self.tensors[path], shape = place.info, place.info.shape
            box, strides = full_box(shape), row_major(shape)
            where = file.resolve() if isinstance(file, Path) else file
            self._extents[path] = Extent(box, where, place.start, strides)


def _names_in(where: Path) -> Collection[str]:
    return [each.name for each in where.iterdir() if each.exists()]


def _stored_beside(where: StorePath) -> tuple[StorePath, Mapping[str, StoredObject]]:
    """The folder of a model in an object store, and the files of it, or one, by their names."""
    if where.name.endswith(".safetensors") and (found := where.find()) is not None:
        return where.parent, {where.name: found}
    return where, where.listed()[1]


def _files(folder: Place, names: Collection[str]) -> dict[Place, set[str]]:
    """The files of a model, each with the tensors that the index says it contains."""
    if SINGLE in names:  # also beside the index of an earlier model: transformers takes it first
        return {folder / SINGLE: set()}
    if INDEX in names:
        return _read_index(folder)
    found = [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1 and (_ONE_OF.match(found[0]) or is_of_attempt(found[0])):
        raise CheckpointError(
            f"{folder}: found {found[0]} and no {INDEX}, expected the index, without which it may "
            "be one of several files; to read it alone, name the file"
        )
    if len(found) == 1:
        return {folder / found[0]: set()}
    raise CheckpointError(
        f"{folder}: found {len(found)} safetensors files and no {INDEX}, expected the index or a "
        f"single file {SINGLE}"
    )


def _read_index(folder: Place) -> dict[Place, set[str]]:
    index = folder / INDEX
    text = read_whole(index, _MAX_INDEX)
    files: dict[Place, set[str]] = {}
    for name, file in Fields(parse(text, str(index)), str(index)).object("weight_map").items():
        if not isinstance(file, str) or not file.isprintable() or not _FILE.fullmatch(file):
            refuse(f"{index}, {name!r}", file, "the name of a .safetensors file beside the index")
        files.setdefault(folder / file, set()).add(name)
    if not files:
        refuse(f"{index}, 'weight_map'", "nothing", "the file of every tensor")
    return files


def plan_files(
    tensors: Mapping[str, TensorInfo], max_shard_size: int, single: str = SINGLE
) -> Files:
    """Assign tensors to files: in order, with a new file whenever the next tensor does not fit.

    A tensor larger than ``max_shard_size`` gets a file of its own.

    Args:
        tensors: dtype and shape of the tensors, by name.
        max_shard_size: largest size of a file in bytes.
        single: name of the file, if all tensors are in one.
    """
    named = portions(tensors.items(), lambda item: item[1].nbytes, max_shard_size)
    groups = [dict(each) for each in named]
    if len(groups) < 2:
        return {single: dict(tensors)}
    return {
        f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)
    }


def write_index(folder: Folder, files: Files) -> None:
    """Write the index of a model, and wait until it is on the disk.

    A model in one file needs none. In an object store it has one, since that is the commit.
    """
    if len(files) == 1 and isinstance(folder, Path):
        return
    sizes = [info.nbytes for tensors in files.values() for info in tensors.values()]
    index = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {
            name: (folder / file).name for file, tensors in files.items() for name in tensors
        },
    }
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    write_beside(folder, INDEX, text.encode("utf-8"))


def write_hf(
    folder: Folder, source: Source, window: ReadWindow, max_shard_size: int = DEFAULT_SHARD
) -> None:
    """Write the model of a source in this format.

    ``config.json`` is written too, if the checkpoint, its folder or the folder of its run has one.
    Tied weights are written once, as transformers does.

    Args:
        folder: an empty folder, or a model that is being written to an object store.
        source: the checkpoint to write.
        window: the buffer to use.
        max_shard_size: largest size of a file in bytes; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: the source is damaged, or contains no model.
        OSError: a file cannot be written.
    """
    paths = model_tensors(source)
    text, config = find_config(source) or (b"", {})
    for name in tied_copies(source, paths, config, ReadWindow(window.nbytes)):
        window.progress(source.tensors[paths.pop(name)].nbytes)
    if text:
        write_beside(folder, CONFIG, text)
    files = plan_files({name: source.tensors[path] for name, path in paths.items()}, max_shard_size)
    for file, tensors in files.items():
        write_safetensors(folder / file, tensors, window.by_name(source, paths))
    write_index(folder, files)


def write_single(file: Place, source: Source, window: ReadWindow) -> None:
    """Write the model of a source as one safetensors file.

    Args:
        file: path of the file, which must not exist, or its name in an object store.
        source: the checkpoint to write.
        window: the buffer to use.

    Raises:
        CheckpointError: the source is damaged, or contains no model.
        OSError: the file cannot be written.
    """
    paths = model_tensors(source)
    infos = {name: source.tensors[path] for name, path in paths.items()}
    write_safetensors(file, infos, window.by_name(source, paths))


def find_config(source: Source) -> tuple[bytes, Mapping[str, Any]] | None:
    """Find the configuration that belongs to a checkpoint.

    It is ``config.json`` in the checkpoint's folder or in the folder of its run, or else what the
    checkpoint recorded about its model.

    Args:
        source: a checkpoint; see :func:`folders_of`.

    Returns:
        The text of the file, and its contents; ``None`` if there is none with a ``model_type``.
    """
    for each in folders_of(source.where):
        try:
            text = read_whole(each / CONFIG, _MAX_CONFIG)
            config = parse(text, str(each / CONFIG))
        except StoreError:
            raise
        except CheckpointError:
            continue
        if isinstance(config, dict) and isinstance(config.get("model_type"), str):
            return text, config
    if not source.config:
        return None
    return f"{json.dumps(dict(source.config), indent=2)}\n".encode(), source.config


def tied_copies(
    source: Source, paths: Mapping[str, StatePath], config: Mapping[str, Any], window: ReadWindow
) -> set[str]:
    """Find the weights that are a copy of another weight and tied to it.

    The checkpoint says which weights are tied, if its format records it. And if the configuration
    says that the embedding and the output head are tied, all equal matrices with a row for each
    token of the vocabulary count as tied. Other weights may be equal by chance, as norms are before
    training.

    Args:
        source: the checkpoint.
        paths: path in the source, by name in the model.
        config: contents of ``config.json``; empty if there is none.
        window: the buffer to read through.

    Returns:
        Of each group of tied and equal weights, all names but the first.
    """
    tie = config.get("tie_word_embeddings")
    if tie is False:
        return set()  # a load does not tie them again
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


def _digest(source: Source, path: StatePath, window: ReadWindow) -> bytes:
    digest = xxhash.xxh3_128()
    for chunk in window.chunks(source, path):
        digest.update(chunk)
    return digest.digest()
