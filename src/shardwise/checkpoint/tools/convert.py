"""Write a checkpoint in another form, in parts of tensors and without a process group.

:func:`consolidate` writes full tensors to plain files that other programs can read; :func:`convert`
writes a checkpoint of another format. Both read all formats except one file per rank, which
:mod:`shardwise.checkpoint.consolidate` reads.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.checkpoint.disk.beside import folders_of
from shardwise.checkpoint.disk.companions import Folder, copy_companions
from shardwise.checkpoint.disk.entries import MANIFEST, dotted
from shardwise.checkpoint.disk.filenames import INDEX
from shardwise.checkpoint.disk.place import Place, folder_of
from shardwise.checkpoint.disk.values import unflatten
from shardwise.checkpoint.formats.dcp import write_dcp
from shardwise.checkpoint.formats.destination import destination_of
from shardwise.checkpoint.formats.detect import TORCH_SUFFIXES, Format, find_checkpoint, open_source
from shardwise.checkpoint.formats.hf import (
    DEFAULT_SHARD,
    find_config,
    write_hf,
    write_single,
)
from shardwise.checkpoint.formats.native import write_shardwise
from shardwise.checkpoint.formats.source import (
    DEFAULT_BUFFER,
    ReadWindow,
    Source,
    Watch,
    model_tensors,
    unwatched,
)
from shardwise.checkpoint.formats.torchfile import Placeholder, write_tree

# Extensions of files, such as .txt, .ckpt or .h5, but not version numbers, as in lm-0.1b.
_FILE_SUFFIX = re.compile(r"\.[A-Za-z]\w*")


def consolidate(
    source: Place,
    destination: Place,
    *,
    everything: bool = False,
    force: bool = False,
    buffer: int = DEFAULT_BUFFER,
    max_shard_size: int | None = None,
    watch: Watch = unwatched,
) -> None:
    """Write the full tensors of a checkpoint, which may be many times larger than memory.

    The name of the destination determines the format:

    - ``.safetensors``: one file with the model;
    - ``.pt``, ``.pth``, ``.bin``: a ``torch.save`` file with the model's state dict;
    - a name without an extension: a folder as written by ``save_pretrained``, with the
      configuration and the tokenizer if the checkpoint or its run has them.

    Args:
        source: the checkpoint, of any format; or its name in an object store.
        destination: the file or folder to write. It is complete or does not exist. Or the name of
            one in an object store, but not of a torch file.
        everything: write ``{"model": ..., "optimizer": ..., "extra": ...}`` into a ``torch.save``
            file, as far as the checkpoint has them.
        force: replace an existing destination.
        buffer: bytes of memory to use.
        max_shard_size: bytes of a file in a folder; ``None`` for 50 GB.
        watch: called with the number of bytes to write; the function that it returns is called with
            the bytes of each part that was written.

    Raises:
        CheckpointError: the source is damaged, or contains no model.
        ValueError: the destination exists, or options cannot be combined.
        OSError: writing failed, for example because the disk is full. There is no destination then.
    """
    suffix = Path(destination.name).suffix
    to_torch = suffix in TORCH_SUFFIXES
    to_folder = not to_torch and suffix != ".safetensors"
    if to_folder and _FILE_SUFFIX.fullmatch(suffix):
        raise ValueError(
            f"found a destination {suffix}, expected .safetensors, "
            f"{', '.join(TORCH_SUFFIXES)}, or the name of a folder, without an extension"
        )
    if everything and not to_torch:
        raise ValueError("--everything requires a torch.save file: .pt, .pth or .bin")
    if max_shard_size is not None and not to_folder:
        raise ValueError("--max-shard-size requires a folder, not a single file")
    if to_torch:
        folder_of(f"{destination}", destination)
    last = INDEX if to_folder else None
    with _written(source, destination, last, everything, force, buffer, watch) as written:
        target, read, window = written
        if to_torch:
            _write_torch(target, read, window, everything=everything)
        elif to_folder:
            _write_hf(target, read, window, max_shard_size)
        else:
            write_single(target, read, window)


@contextlib.contextmanager
def _written(
    source: Place,
    destination: Place,
    last: str | None,
    everything: bool,
    force: bool,
    buffer: int,
    watch: Watch,
) -> Iterator[tuple[Any, Source, ReadWindow]]:
    """Open a checkpoint, and yield where to write it, the checkpoint, and the buffer to use.

    ``last`` is the file that commits a folder in an object store; ``None``: it is a single file.
    """
    source = find_checkpoint(source)
    to = destination_of(destination, source, force=force)
    with open_source(source) as opened:
        paths = opened.tensors if everything else model_tensors(opened).values()
        window = to.window(buffer, watch(sum(opened.tensors[path].nbytes for path in paths)))
        with to.opened(last) as target:
            yield target, opened, window
        if everything and opened.left_out:
            warnings.warn(f"{opened.left_out}; it is left out", stacklevel=4)


def _write_hf(
    folder: Folder, source: Source, window: ReadWindow, max_shard_size: int | None
) -> None:
    """Write a model for transformers, with the tokenizer that is beside it or in its run."""
    write_hf(folder, source, window, max_shard_size or DEFAULT_SHARD)
    if find_config(source) is not None:  # else it is no model of transformers
        copy_companions(folders_of(source.where), folder)


def _write_torch(file: Path, source: Source, window: ReadWindow, *, everything: bool) -> None:
    """Write a ``torch.save`` file, and sync it to disk."""
    holes = {path: Placeholder(dotted(path), info) for path, info in source.tensors.items()}
    tree: Any
    if everything:
        tree = unflatten([*source.values.items(), *holes.items()], str(source.where))
        if isinstance(optimizer := tree.get("optimizer"), dict):
            optimizer.setdefault("state", {})  # torch's optimizers need one, also if it is empty
    else:
        tree = {dotted(path[1:]): hole for path, hole in holes.items() if path[0] == "model"}
        tree |= {dotted(path[1:]): v for path, v in source.values.items() if path[0] == "model"}
    paths = {hole.name: path for path, hole in holes.items()}
    write_tree(file, tree, window.by_name(source, paths))


def convert(
    source: Place,
    destination: Place,
    to: Format,
    *,
    force: bool = False,
    buffer: int = DEFAULT_BUFFER,
    max_shard_size: int | None = None,
    watch: Watch = unwatched,
) -> None:
    """Write a checkpoint in another format.

    ``hf`` checkpoints contain the model only, with its configuration and tokenizer if the source or
    its run has them. The others contain everything that the source has; ``hf`` sources have only
    the model.

    Args:
        source: the checkpoint, of any format; or its name in an object store.
        destination: the folder to write. It is complete or does not exist. Or the name of one in an
            object store, for ``SHARDWISE`` and ``HF``.
        to: ``SHARDWISE``, ``DCP`` or ``HF``.
        force: replace an existing checkpoint.
        buffer: bytes of memory to use; also the largest part of a tensor in the result.
        max_shard_size: bytes of a file, for ``hf``; ``None`` for 50 GB.
        watch: called with the number of bytes to write; the function that it returns is called with
            the bytes of each part that was written.

    Raises:
        CheckpointError: the source is damaged, or has values that the format cannot store.
        ValueError: the destination exists, or ``to`` is ``TORCH``.
        OSError: writing failed, for example because the disk is full. There is no destination then.
    """
    if to is Format.TORCH:
        raise ValueError("to: found torch, expected shardwise, dcp or hf; use consolidate")
    if to is Format.DCP:
        folder_of(f"{destination}", destination)
    everything = to is not Format.HF
    last = MANIFEST if everything else INDEX
    with _written(source, destination, last, everything, force, buffer, watch) as written:
        folder, read, window = written
        match to:
            case Format.SHARDWISE:
                write_shardwise(folder, read, window)
            case Format.DCP:
                write_dcp(folder, read, window)
            case _:
                _write_hf(folder, read, window, max_shard_size)
