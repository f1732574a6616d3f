"""Checkpoints that are whole or not there, never run code, and load on any mesh."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoint.api import async_save, load, save
    from shardwise.checkpoint.background import Handle
    from shardwise.checkpoint.commit import is_complete, keep_last, latest, step_folder, steps
    from shardwise.checkpoint.weights import load_weights, save_hf
    from shardwise.checkpoint.xla import (
        consolidate_sharded_model_checkpoints,
        get_shard_metadata,
        load_rank_checkpoint,
        save_rank_checkpoint,
    )
    from shardwise.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Handle",
    "async_save",
    "consolidate_sharded_model_checkpoints",
    "get_shard_metadata",
    "is_complete",
    "keep_last",
    "latest",
    "load",
    "load_rank_checkpoint",
    "load_weights",
    "save",
    "save_hf",
    "save_rank_checkpoint",
    "step_folder",
    "steps",
]

# As in the package above: importing torch takes seconds, and names are fetched when first used.
_HOME = {
    "CheckpointError": "shardwise.errors",
    "Handle": "shardwise.checkpoint.background",
    "async_save": "shardwise.checkpoint.api",
    "consolidate_sharded_model_checkpoints": "shardwise.checkpoint.xla",
    "get_shard_metadata": "shardwise.checkpoint.xla",
    "is_complete": "shardwise.checkpoint.commit",
    "keep_last": "shardwise.checkpoint.commit",
    "latest": "shardwise.checkpoint.commit",
    "load": "shardwise.checkpoint.api",
    "load_rank_checkpoint": "shardwise.checkpoint.xla",
    "load_weights": "shardwise.checkpoint.weights",
    "save": "shardwise.checkpoint.api",
    "save_hf": "shardwise.checkpoint.weights",
    "save_rank_checkpoint": "shardwise.checkpoint.xla",
    "step_folder": "shardwise.checkpoint.commit",
    "steps": "shardwise.checkpoint.commit",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
