"""One checkpoint for programs that know nothing of Shardwise: full tensors, in plain files.

Of checkpoints of every format but one file a rank; those are for
:mod:`shardwise.checkpoint.consolidate`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardwise.checkpoint.disk.commit import check_destination, written_beside
from shardwise.checkpoint.disk.entries import dotted
from shardwise.checkpoint.disk.values import unflatten
from shardwise.checkpoint.formats.detect import TORCH_SUFFIXES, find_checkpoint, open_source
from shardwise.checkpoint.formats.hf import DEFAULT_SHARD, write_hf, write_single
from shardwise.checkpoint.formats.source import (
    DEFAULT_BUFFER,
    Source,
    Watch,
    Window,
    model_tensors,
    unwatched,
)
from shardwise.checkpoint.formats.torchwrite import Placeholder, write_tree

# What ends so is meant to be a file: .txt, .ckpt, .h5. A version number is no such ending: lm-0.1b.
_FILE_SUFFIX = re.compile(r"\.[A-Za-z]\w*")


def consolidate(
    source: Path,
    destination: Path,
    *,
    everything: bool = False,
    force: bool = False,
    buffer: int = DEFAULT_BUFFER,
    max_shard_size: int | None = None,
    watch: Watch = unwatched,
) -> None:
    """Write the full tensors of a checkpoint, which may be many times larger than memory.

    By the name of the destination:

    - ``.safetensors``: one file with the model;
    - ``.pt``, ``.pth``, ``.bin``: a file of ``torch.save`` with the model's state dict;
    - a name without such an ending: a folder of safetensors files with an index, as
      ``save_pretrained`` makes it.

    Args:
        source: the checkpoint, of any format.
        destination: the file or folder to make. It is complete, or not there.
        everything: of a file of ``torch.save``: write ``{"model": ..., "optimizer": ...,
            "extra": ...}``, as far as the checkpoint has them.
        force: replace what is there.
        buffer: bytes that may be in memory.
        max_shard_size: of a folder: bytes of a file, 50 GB where it is ``None``.
        watch: told how many bytes there are, and then how many were moved.

    Raises:
        CheckpointError: the source is damaged, or holds no model.
        ValueError: something is at the destination, or options do not go together.
        OSError: the disk is full, say; nothing is at the destination then.
    """
    to_torch = destination.suffix in TORCH_SUFFIXES
    to_folder = not to_torch and destination.suffix != ".safetensors"
    if to_folder and _FILE_SUFFIX.fullmatch(destination.suffix):
        raise ValueError(
            f"found a destination {destination.suffix}, expected .safetensors, "
            f"{', '.join(TORCH_SUFFIXES)}, or the name of a folder, without an ending"
        )
    if everything and not to_torch:
        raise ValueError("--everything goes with a file of torch.save: .pt, .pth or .bin")
    if max_shard_size is not None and not to_folder:
        raise ValueError("--max-shard-size goes with a folder, and not with a single file")
    source = find_checkpoint(source)
    check_destination(destination, source, force=force)
    with open_source(source) as opened:
        paths = opened.tensors if everything else model_tensors(opened).values()
        window = Window(buffer, watch(sum(opened.tensors[path].nbytes for path in paths)))
        with written_beside(destination, source, force=force) as partial:
            if to_torch:
                _write_torch(partial, opened, window, everything=everything)
            elif to_folder:
                partial.mkdir()
                write_hf(partial, opened, window, max_shard_size or DEFAULT_SHARD)
            else:
                write_single(partial, opened, window)


def _write_torch(file: Path, source: Source, window: Window, *, everything: bool) -> None:
    """Write a file of ``torch.save``, and see it onto the disk."""
    holes = {path: Placeholder(dotted(path), info) for path, info in source.tensors.items()}
    tree: Any
    if everything:
        tree = unflatten([*source.values.items(), *holes.items()], str(source.where))
    else:
        tree = {dotted(path[1:]): hole for path, hole in holes.items() if path[0] == "model"}
        tree |= {dotted(path[1:]): v for path, v in source.values.items() if path[0] == "model"}
    paths = {hole.name: path for path, hole in holes.items()}
    write_tree(file, tree, lambda name: window.chunks(source, paths[name]))
