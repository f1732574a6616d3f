"""A plain file of ``torch.save`` as a source: a state dict, or a dict of state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.disk.boxes import Box, whole
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo
from shardwise.checkpoint.formats.extents import Extent, ExtentReader
from shardwise.checkpoint.formats.source import Opened
from shardwise.checkpoint.formats.torchfile import StoredShard, StoredTensor, read_tree
from shardwise.errors import CheckpointError

_MODEL = ("model", "state_dict", "model_state_dict")


class TorchSource(Opened):
    """The model in a file of ``torch.save``: what it holds under ``model``, or else all of it.

    Args:
        where: the file.

    Raises:
        CheckpointError: it is none, or there is code in it, or no model.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        self._reader = ExtentReader()
        tree = read_tree(where)
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{where}: found a {type(tree).__name__}, expected a state dict")
        model = next((tree[key] for key in _MODEL if isinstance(tree.get(key), Mapping)), tree)
        self._stored = dict(_tensors(("model",), model, str(where)))
        if not self._stored:
            raise CheckpointError(f"{where}: holds no tensors by name, expected a state dict")
        self.tensors: Mapping[StatePath, TensorInfo] = {
            path: stored.info for path, stored in self._stored.items()
        }
        self.values: Mapping[StatePath, Any] = {}

    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor; see :class:`.Source`."""
        stored = self._stored[path]
        extent = Extent(whole(stored.info.shape), self.where, stored.start, stored.strides)
        self._reader.read([extent], box, into)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()


def _tensors(path: StatePath, tree: Any, where: str) -> Iterator[tuple[StatePath, StoredTensor]]:
    """The tensors of a state dict, by their keys; what else is in it is left out."""
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            if not isinstance(key, str) or not key.isprintable():
                raise CheckpointError(f"{where}: found the key {key!r}, expected a name")
            yield from _tensors((*path, key), item, where)
    elif isinstance(tree, StoredTensor):
        yield path, tree
    elif isinstance(tree, StoredShard):
        raise CheckpointError(
            f"{where}: {'.'.join(map(str, path[1:]))} is a rank's part of a sharded tensor; "
            "consolidate the files of all ranks with python -m shardwise.checkpoint.consolidate"
        )
