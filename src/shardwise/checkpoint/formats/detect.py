"""Which format a checkpoint has, judging by the files in its folder."""

from __future__ import annotations

import contextlib
from enum import Enum
from pathlib import Path

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.commit import latest, steps
from shardwise.checkpoint.disk.companions import TOKENIZER, has_tokenizer
from shardwise.checkpoint.disk.manifest import NAME as MANIFEST
from shardwise.checkpoint.formats.source import Source

_DCP = ".metadata"
_INDEX = "model.safetensors.index.json"
_PARTS = "shard-*-model-*-of-*.safetensors"  # of tensors, which torch writes on each rank
TORCH_SUFFIXES = (".pt", ".pth", ".bin")


class Format(Enum):
    """A checkpoint format."""

    SHARDWISE = "shardwise"
    DCP = "dcp"
    HF = "hf"
    TORCH = "torch"


def find_checkpoint(path: Path) -> Path:
    """Find the checkpoint that a path means: the path itself, or the newest complete one of a run.

    Args:
        path: a checkpoint, a folder of ``step-...`` folders, or a folder that contains such a
            folder named ``checkpoints``.

    Raises:
        CheckpointError: there is none.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: found nothing there, expected a checkpoint")
    if format_of(path) is not None:
        return path
    newest = latest(steps_root(path))
    if newest is not None:
        return newest
    raise CheckpointError(
        f"{path}: found no checkpoint; expected {MANIFEST} (shardwise), {_DCP} (dcp), {_INDEX} or "
        "a .safetensors file (hf), a file of torch.save, or step-... folders, one of them complete"
    )


def find_tokenizer(path: Path) -> Path | None:
    """Find the folder of the tokenizer that belongs to a model: beside it, or in its run.

    Args:
        path: as for :func:`find_checkpoint`, or the folder of a tokenizer alone.
    """
    from shardwise.checkpoint.formats.hf import folders_of

    folders = [path]
    with contextlib.suppress(CheckpointError):
        folders += folders_of(find_checkpoint(path))
    inside = (each for folder in folders for each in (folder, folder / TOKENIZER))
    return next(filter(has_tokenizer, inside), None)


def steps_root(path: Path) -> Path:
    """The folder of a run's checkpoints: ``path``, or ``path/checkpoints``."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() and not steps(path) else path


def format_of(path: Path) -> Format | None:
    """The format of a checkpoint, or ``None`` if it is not known. Nothing in it is read."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return Format.HF
        return Format.TORCH if path.suffix in TORCH_SUFFIXES else None
    shards = {*path.glob("shard-*-of-*.safetensors")} - {*path.glob(_PARTS)}
    if shards or (path / MANIFEST).exists():
        return Format.SHARDWISE  # even without a manifest, so that the error says so
    if (path / _DCP).exists():
        return Format.DCP
    if (path / _INDEX).exists() or any(path.glob("*.safetensors")):
        return Format.HF
    return None


def open_source(path: Path) -> Source:
    """Open a checkpoint of any format. Close it, or use it in a ``with`` statement.

    Args:
        path: as for :func:`find_checkpoint`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = find_checkpoint(path)
    parts = sorted(each.name for each in path.glob(_PARTS))
    if parts:
        raise CheckpointError(
            f"{path}: found {parts[0]}, one of the parts that HuggingFaceStorageWriter("
            "save_distributed=True) of torch writes on each rank, expected whole tensors; save "
            "with enable_consolidation=True, too, and pass the folder around this one"
        )
    match format_of(path):
        case Format.SHARDWISE:
            from shardwise.checkpoint.formats.native import ShardwiseSource

            return ShardwiseSource(path)
        case Format.DCP:
            from shardwise.checkpoint.formats.dcp import DcpSource

            return DcpSource(path)
        case Format.TORCH:
            from shardwise.checkpoint.formats.torchfile import TorchSource

            return TorchSource(path)
        case _:
            from shardwise.checkpoint.formats.hf import HfSource

            return HfSource(path)
