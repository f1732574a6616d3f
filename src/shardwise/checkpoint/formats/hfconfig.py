"""The ``config.json`` of a model: where it lies, and what it says of tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from shardwise.checkpoint.disk.entries import StatePath, TensorInfo
from shardwise.checkpoint.disk.strict import parse
from shardwise.checkpoint.formats.source import Source, Window
from shardwise.errors import CheckpointError

CONFIG = "config.json"
_MOST = 1 << 24


def find_config(checkpoint: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The configuration that goes with a checkpoint: in its folder, or in that of its run.

    Args:
        checkpoint: a folder or file; ``step-00000040`` and ``checkpoints/step-00000040`` lie in
            the folder of a run.

    Returns:
        The file and what it says; ``None`` where there is none that names a ``model_type``.
    """
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    folders = [folder]
    if folder.name.startswith("step-"):
        run = folder.resolve().parent
        folders.append(run.parent if run.name == "checkpoints" else run)
    for each in folders:
        file = each / CONFIG
        if file.is_file() and file.stat().st_size <= _MOST:
            try:
                said = parse(file.read_bytes(), str(file))
            except CheckpointError:
                continue
            if isinstance(said, dict) and isinstance(said.get("model_type"), str):
                return file, said
    return None


def tied_copies(
    source: Source, paths: Mapping[str, StatePath], config: Mapping[str, Any], window: Window
) -> set[str]:
    """The names of weights that are a copy of another, where the configuration says they are tied.

    Those of an embedding and a head: matrices with a row for every token of the vocabulary. Others
    may be equal by chance, as norms are that have not learnt yet.

    Args:
        source: what holds them.
        paths: name in the model -> path in the source.
        config: as in a ``config.json``.
        window: the memory to read through.

    Returns:
        All names but the first of each value.
    """
    if config.get("tie_word_embeddings") is not True:
        return set()
    rows = config.get("vocab_size")
    matrices = {
        name: path
        for name, path in paths.items()
        if len(source.tensors[path].shape) == 2 and source.tensors[path].shape[0] == rows
    }
    if len(matrices) < 2:
        return set()
    first: dict[tuple[TensorInfo, bytes], str] = {}
    for name, path in matrices.items():
        first.setdefault((source.tensors[path], _digest(source, path, window)), name)
    return matrices.keys() - first.values()


def _digest(source: Source, path: StatePath, window: Window) -> bytes:
    digest = xxhash.xxh3_128()
    for chunk in window.chunks(source, path):
        digest.update(chunk)
    return digest.digest()
