"""Which format a checkpoint has, judging by the files in its folder. Torch is not imported."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, overload

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.commit import latest, steps
from shardwise.checkpoint.disk.entries import MANIFEST
from shardwise.checkpoint.disk.filenames import (
    DEEPSPEED,
    INDEX,
    SINGLE,
    files_beside,
    is_rank_file,
    sets_of_rank_files,
)
from shardwise.checkpoint.disk.place import Place

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.store_path import StorePath
    from shardwise.checkpoint.formats.rank_files import RankSource
    from shardwise.checkpoint.formats.source import Source

_DCP = ".metadata"
_PARTS = "shard-*-model-*-of-*.safetensors"  # of tensors, which torch writes on each rank
TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_LIGHTNING = ".ckpt"  # as torch.save writes it
# What programs save a model as in a folder, with torch.save.
_TORCH_FILES = ("pytorch_model_fsdp.bin", "pytorch_model.bin")
_OPTIMIZER = "optimizer.bin"  # which Accelerate saves beside them
#: Files of programs whose folders are not read: what they are, and what to do.
_FOREIGN = {
    "**/*_optim_states.pt": DEEPSPEED,
    "**/zero/*/fp32.pt": "DeepSpeed's universal checkpoint; its zero_to_fp32.py makes a model of "
    "the checkpoint that it was made of",
    "pytorch_model_fsdp*_rank*.bin": "Accelerate, one for each rank, which do not say where a "
    "shard is in its tensor; save with SHARDED_STATE_DICT and use_dcp, or FULL_STATE_DICT",
}


class Format(Enum):
    """A checkpoint format."""

    SHARDWISE = "shardwise"
    DCP = "dcp"
    HF = "hf"
    TORCH = "torch"
    RANKS = "ranks"


@overload
def find_checkpoint(path: Path) -> Path: ...
@overload
def find_checkpoint(path: Place) -> Place: ...
def find_checkpoint(path: Place) -> Place:
    """Find the checkpoint that a path means: the path itself, or the newest complete one of a run.

    Args:
        path: a checkpoint, a folder of ``step-...`` folders, or a folder that contains such a
            folder named ``checkpoints``; or the name of one of these in an object store.

    Raises:
        CheckpointError: there is none.
        StoreError: the object store does not answer.
    """
    if not isinstance(path, Path):
        return _find_stored(path)[0]
    if not path.exists():
        raise CheckpointError(f"{path}: found nothing there, expected a checkpoint")
    if format_of(path) is Format.RANKS:
        return _rank_files(path)[0]
    if (path / _TORCH_FILES[0]).is_file() and (path / _OPTIMIZER).is_file():
        return path / _TORCH_FILES[0]  # Trainer saves the model alone, too, as safetensors
    if format_of(path) is not None:
        return path
    newest = latest(steps_root(path))
    if newest is not None:
        return newest
    for name in _TORCH_FILES:
        if (path / name).is_file():
            return path / name
    refuse_foreign(path)
    raise CheckpointError(
        f"{path}: found no checkpoint; expected {MANIFEST} (shardwise), {_DCP} (dcp), {INDEX} or "
        "a .safetensors file (hf), a file of torch.save, files of all ranks, or step-... folders, "
        "one of them complete"
    )


def _find_stored(path: StorePath) -> tuple[StorePath, Format]:
    if (form := format_of(path)) is not None:
        return path, form
    newest = latest(path) or latest(path / "checkpoints")
    if newest is None:
        raise CheckpointError(
            f"{path}: found no checkpoint; expected {MANIFEST}, {INDEX}, a .safetensors file, or "
            "step-... folders, one of them complete"
        )
    return newest, Format.SHARDWISE


def refuse_foreign(folder: Path) -> None:
    """Say what to do about files in a folder that other software alone reads.

    Raises:
        CheckpointError: there are such files.
    """
    for pattern, what in _FOREIGN.items():
        if found := min(folder.glob(pattern), default=None):
            raise CheckpointError(f"{found}: found files of {what}")


def _rank_files(path: Path) -> list[Path]:
    """The files of all ranks that the file of one rank, or their folder, stands for.

    Raises:
        CheckpointError: there are several checkpoints in the folder.
    """
    if path.is_file():
        return files_beside(path)
    found = sets_of_rank_files(path)
    if len(found) != 1:
        names = ", ".join(files[0].name for files in found[:4])
        raise CheckpointError(
            f"{path}: found the files of ranks of {len(found)} checkpoints: {names}; name a file"
        )
    return found[0]


def find_tokenizer(path: Path) -> Path | None:
    """Find the folder of the tokenizer that belongs to a model: beside it, or in its run.

    Args:
        path: as for :func:`find_checkpoint`, or the folder of a tokenizer alone.
    """
    from shardwise.checkpoint.disk.beside import folders_of
    from shardwise.checkpoint.disk.companions import TOKENIZER, has_tokenizer

    folders = [path]
    with contextlib.suppress(CheckpointError):
        folders += folders_of(find_checkpoint(path))
    inside = (each for folder in folders for each in (folder, folder / TOKENIZER))
    return next(filter(has_tokenizer, inside), None)


def steps_root(path: Path) -> Path:
    """The folder of a run's checkpoints: ``path``, or ``path/checkpoints``."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() and not steps(path) else path


def format_of(path: Place) -> Format | None:
    """The format of a checkpoint, or ``None`` if it is not known. Nothing in it is read.

    Raises:
        StoreError: the object store does not answer.
    """
    if not isinstance(path, Path):
        suffix = Path(path.name).suffix
        if suffix in (".safetensors", *TORCH_SUFFIXES, _LIGHTNING) and path.is_file():
            return Format.HF if suffix == ".safetensors" else Format.TORCH
        if (path / MANIFEST).is_file():  # which a list may lack
            return Format.SHARDWISE
        return format_among(path.listed()[1])
    if path.is_file():
        if path.suffix == ".safetensors":
            return Format.HF
        if is_rank_file(path):
            return Format.RANKS
        return Format.TORCH if path.suffix in (*TORCH_SUFFIXES, _LIGHTNING) else None
    shards = {*path.glob("shard-*-of-*.safetensors")} - {*path.glob(_PARTS)}
    if shards or (path / MANIFEST).exists():
        return Format.SHARDWISE  # even without a manifest, so that the error says so
    if (path / _DCP).exists() or any(path.glob(f"pytorch_model_fsdp_*/{_DCP}")):
        return Format.DCP
    if (path / INDEX).exists() or any(path.glob("*.safetensors")):
        return Format.HF
    return Format.RANKS if sets_of_rank_files(path) else None


def format_among(names: Iterable[str]) -> Format | None:
    """The format of a checkpoint in an object store, by the names of its files."""
    names = set(names)
    if MANIFEST in names:
        return Format.SHARDWISE
    if {INDEX, SINGLE} & names:  # beside which there may be shards of what is to replace it
        return Format.HF
    if any(re.fullmatch(r"shard-\d+-of-\d+.*\.safetensors", name) for name in names):
        return Format.SHARDWISE  # even without a manifest, so that the error says so
    if _DCP in names:
        return Format.DCP
    return Format.HF if any(name.endswith(".safetensors") for name in names) else None


def open_source(path: Place) -> Source:
    """Open a checkpoint of any format. Close it, or use it in a ``with`` statement.

    Args:
        path: as for :func:`find_checkpoint`; in an object store, of Shardwise's own format, or
            ``hf``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found: Place
    form: Format | None
    if not isinstance(path, Path):
        found, form = _find_stored(path)
    else:
        found = path = find_checkpoint(path)
        form = format_of(path)
        if parts := sorted(each.name for each in path.glob(_PARTS)):
            raise CheckpointError(
                f"{path}: found {parts[0]}, one of the parts that HuggingFaceStorageWriter("
                "save_distributed=True) of torch writes on each rank, expected whole tensors; save "
                "with enable_consolidation=True, too, and pass the folder around this one"
            )
    if form is Format.SHARDWISE:
        from shardwise.checkpoint.formats.native import ShardwiseSource

        return ShardwiseSource(found)
    if form is Format.HF or form is None:
        from shardwise.checkpoint.formats.hf import HfSource

        return HfSource(found)
    if not isinstance(found, Path):
        raise CheckpointError(
            f"{found}: found a checkpoint of another format ({form.value}) "
            "in an object store, expected shardwise or hf there; copy it to a folder"
        )
    if form is Format.DCP:
        from shardwise.checkpoint.formats.dcp import DcpSource

        return DcpSource(found)
    if form is Format.RANKS:
        return open_rank_files(_rank_files(found))
    from shardwise.checkpoint.formats.torchfile import TorchSource

    beside = found.with_name(_OPTIMIZER)
    of_folder = found.name in _TORCH_FILES and beside.is_file()
    return TorchSource(found, beside if of_folder else None)


def open_rank_files(files: Sequence[Path]) -> RankSource:
    """Open the files of all ranks: ours, or those of PyTorch/XLA's FSDP.

    Args:
        files: paths of the files, in any order.

    Raises:
        CheckpointError: a file is missing, damaged, hostile, or of another checkpoint; or the parts
            of a tensor do not cover it.
    """
    from shardwise.checkpoint.formats.rank_files import RankFiles
    from shardwise.checkpoint.formats.torch_xla import XlaFiles, is_of_xla

    return XlaFiles(files) if is_of_xla(files[0]) else RankFiles(files)
