"""The ``config.json`` of a model: where it lies, and what it says of tied weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from shardwise.checkpoint.disk.entries import StatePath, TensorInfo
from shardwise.checkpoint.disk.strict import Links, parse, read_small
from shardwise.checkpoint.formats.source import Source, Window
from shardwise.errors import CheckpointError

CONFIG = "config.json"
_MOST = 1 << 24


def find_config(source: Source) -> tuple[bytes, Mapping[str, Any]] | None:
    """The configuration that goes with a checkpoint.

    From its folder, or that of its run; else what the model said when it was saved.

    Args:
        source: of a folder or file; ``step-00000040`` and ``checkpoints/step-00000040`` lie in
            the folder of a run.

    Returns:
        The text of a file, and what it says; ``None`` where there is none that names a
        ``model_type``.
    """
    checkpoint = source.where
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    folders = [folder]
    if folder.name.startswith("step-"):
        run = folder.resolve().parent
        folders.append(run.parent if run.name == "checkpoints" else run)
    for each in folders:
        file = each / CONFIG
        if file.exists():
            try:
                text = read_small(file, _MOST, Links.FOLLOW)
                said = parse(text, str(file))
            except CheckpointError:
                continue
            if isinstance(said, dict) and isinstance(said.get("model_type"), str):
                return text, said
    if not source.config:
        return None
    return f"{json.dumps(dict(source.config), indent=2)}\n".encode(), source.config


def tied_copies(
    source: Source, paths: Mapping[str, StatePath], config: Mapping[str, Any], window: Window
) -> set[str]:
    """The names of weights that are a copy of another, and tied to it.

    Which are tied says the checkpoint, as far as its format does. And where the configuration says
    that embedding and head are, all equal matrices with a row for every token of the vocabulary
    are taken for such. Others may be equal by chance, as norms are that have not learnt yet.

    Args:
        source: what holds them.
        paths: name in the model -> path in the source.
        config: as in a ``config.json``; empty where there is none.
        window: the memory to read through.

    Returns:
        All names but the first of each value.
    """
    tie = config.get("tie_word_embeddings")
    if tie is False:
        return set()  # who reads it will not tie them again
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


def _digest(source: Source, path: StatePath, window: Window) -> bytes:
    digest = xxhash.xxh3_128()
    for chunk in window.chunks(source, path):
        digest.update(chunk)
    return digest.digest()
