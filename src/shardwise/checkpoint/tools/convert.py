"""From one format to another, a part of a tensor at a time, without a process group."""

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

    ``hf`` takes the model alone. The others take everything: from the formats ``hf`` and ``torch``
    that is the model.

    Args:
        source: the checkpoint, of any format.
        destination: the folder to make. It is complete, or not there.
        to: ``SHARDWISE``, ``DCP`` or ``HF``.
        force: replace a checkpoint that is there.
        buffer: bytes that may be in memory; parts of tensors in the result are not larger.
        max_shard_size: of ``hf``: bytes of a file, 50 GB where it is ``None``.
        watch: told how many bytes there are, and then how many were moved.

    Raises:
        CheckpointError: the source is damaged, or holds what the format has no place for.
        ValueError: something is at the destination, or ``to`` is ``TORCH``.
        OSError: the disk is full, say; nothing is at the destination then.
    """
    if to is Format.TORCH:
        raise ValueError("to: found torch, expected shardwise, dcp or hf; consolidate makes files")
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
