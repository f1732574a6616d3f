"""Which format a checkpoint has, told by what lies in its folder."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from shardwise.checkpoint.disk.commit import latest, steps
from shardwise.checkpoint.disk.manifest import NAME as MANIFEST
from shardwise.checkpoint.formats.source import Source
from shardwise.errors import CheckpointError

_DCP = ".metadata"
_INDEX = "model.safetensors.index.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")


class Format(Enum):
    """A way to store a checkpoint."""

    SHARDWISE = "shardwise"
    DCP = "dcp"
    HF = "hf"
    TORCH = "torch"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest complete one of a run.

    Args:
        path: a checkpoint, a folder of ``step-...`` folders, or a folder with such ``checkpoints``.

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
        "a .safetensors file (hf), a file of torch.save, or folders step-... with a complete one"
    )


def steps_root(path: Path) -> Path:
    """Where the checkpoints of a run lie: ``path``, or ``path/checkpoints``."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() and not steps(path) else path


def format_of(path: Path) -> Format | None:
    """The format of one checkpoint, or ``None``. Nothing in it is read."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return Format.HF
        return Format.TORCH if path.suffix in TORCH_SUFFIXES else None
    if (path / MANIFEST).exists() or any(path.glob("shard-*-of-*.safetensors")):
        return Format.SHARDWISE  # also where the manifest is lost, for messages to say so
    if (path / _DCP).exists():
        return Format.DCP
    if (path / _INDEX).exists() or any(path.glob("*.safetensors")):
        return Format.HF
    return None


def open_source(path: Path) -> Source:
    """Open a checkpoint of whatever format. Close it, or use it in a ``with`` statement.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = find_checkpoint(path)
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
