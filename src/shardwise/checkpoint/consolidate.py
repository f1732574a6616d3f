"""One checkpoint for programs that know nothing of Shardwise: full tensors, in plain files.

As a command, ``python -m shardwise.checkpoint.consolidate`` makes one file of the files that each
rank has saved by itself, with the options that XLA's command of that name has; see :mod:`.xla`.
``shardwise checkpoint consolidate`` takes checkpoints of all other formats.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

from shardwise.checkpoint.destination import check_destination, written_beside
from shardwise.checkpoint.formats import TORCH_SUFFIXES, find_checkpoint, open_source
from shardwise.checkpoint.hf import DEFAULT_SHARD, write_hf, write_single
from shardwise.checkpoint.state import unflatten
from shardwise.checkpoint.stored import (
    DEFAULT_BUFFER,
    Source,
    Watch,
    Window,
    dotted,
    model_tensors,
    unwatched,
)
from shardwise.checkpoint.torchfile import Hole, write_tree
from shardwise.errors import CheckpointError

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
    holes = {path: Hole(dotted(path), info) for path, info in source.tensors.items()}
    tree: Any
    if everything:
        tree = unflatten([*source.values.items(), *holes.items()], str(source.where))
    else:
        tree = {dotted(path[1:]): hole for path, hole in holes.items() if path[0] == "model"}
        tree |= {dotted(path[1:]): v for path, v in source.values.items() if path[0] == "model"}
    paths = {hole.name: path for path, hole in holes.items()}
    write_tree(file, tree, lambda name: window.chunks(source, paths[name]))


def main(arguments: list[str] | None = None) -> int:
    """The command line of ``python -m shardwise.checkpoint.consolidate``; its exit code."""
    from shardwise.checkpoint.xla import SUFFIX, consolidate_sharded_model_checkpoints

    parser = argparse.ArgumentParser(
        prog="python -m shardwise.checkpoint.consolidate",
        description="Make one file of the files that each rank has saved, without a process group.",
        epilog="Example: python -m shardwise.checkpoint.consolidate --ckpt_prefix runs/vit "
        '--ckpt_suffix "_rank-*-of-*.pth"',
    )
    parser.add_argument(
        "--ckpt_prefix", required=True, help="what the names of the files begin with"
    )
    parser.add_argument(
        "--ckpt_suffix", default=SUFFIX, help="how they end, a pattern (default: %(default)s)"
    )
    parser.add_argument(
        "--save_path", default="", help="file to make (default: <prefix>_consolidated.pth)"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    options = parser.parse_args(arguments)
    try:
        model, path = consolidate_sharded_model_checkpoints(
            options.ckpt_prefix, options.ckpt_suffix, options.save_path, force=options.force
        )
    except (CheckpointError, OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    assert path is not None
    print(f"saved {len(model)} tensors, {os.stat(path).st_size:,} bytes, to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
