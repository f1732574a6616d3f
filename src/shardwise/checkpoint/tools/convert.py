"""Convert a checkpoint to another format in parts of tensors, without a process group."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.disk.commit import check_destination, written_beside
from shardwise.checkpoint.formats.dcp import write_dcp
from shardwise.checkpoint.formats.detect import Format, find_checkpoint, open_source
from shardwise.checkpoint.formats.hf import DEFAULT_SHARD, write_hf
from shardwise.checkpoint.formats.native import write_shardwise
from shardwise.checkpoint.formats.source import (
    DEFAULT_BUFFER,
    Watch,
    Window,
    model_tensors,
    unwatched,
)


def convert(
    source: Path,
    destination: Path,
    to: Format,
    *,
    force: bool = False,
    buffer: int = DEFAULT_BUFFER,
    max_shard_size: int | None = None,
    watch: Watch = unwatched,
) -> None:
    """Write a checkpoint in another format.

    ``hf`` checkpoints contain the model only. The others contain everything that the source has;
    ``hf`` and ``torch`` sources have only the model.

    Args:
        source: the checkpoint, of any format.
        destination: the folder to write. It is complete or does not exist.
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
    source = find_checkpoint(source)
    check_destination(destination, source, force=force)
    with open_source(source) as opened:
        paths = model_tensors(opened).values() if to is Format.HF else opened.tensors
        window = Window(buffer, watch(sum(opened.tensors[path].nbytes for path in paths)))
        with written_beside(destination, source, force=force) as folder:
            folder.mkdir()
            match to:
                case Format.SHARDWISE:
                    write_shardwise(folder, opened, window)
                case Format.DCP:
                    write_dcp(folder, opened, window)
                case _:
                    write_hf(folder, opened, window, max_shard_size or DEFAULT_SHARD)
