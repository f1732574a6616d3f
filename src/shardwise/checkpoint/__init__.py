"""Checkpoints that are complete or absent, run no code when loaded, and load on any mesh."""

from typing import TYPE_CHECKING

from shardwise.base.lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.base.errors import CheckpointError, StoreError
    from shardwise.checkpoint.disk.commit import is_complete, keep_last, latest, step_folder, steps
    from shardwise.checkpoint.ranks.hf import save_hf
    from shardwise.checkpoint.ranks.loading import load, load_weights
    from shardwise.checkpoint.ranks.moving import transfer
    from shardwise.checkpoint.ranks.neighbor import Recovered, recover, replicate
    from shardwise.checkpoint.ranks.per_rank import PerRank, per_rank
    from shardwise.checkpoint.ranks.saving import Handle, async_save, save
    from shardwise.checkpoint.ranks.xla import (
        consolidate_sharded_model_checkpoints,
        get_shard_metadata,
        load_rank_checkpoint,
        save_rank_checkpoint,
    )

__all__ = [
    "CheckpointError",
    "Handle",
    "PerRank",
    "Recovered",
    "StoreError",
    "async_save",
    "consolidate_sharded_model_checkpoints",
    "get_shard_metadata",
    "is_complete",
    "keep_last",
    "latest",
    "load",
    "load_rank_checkpoint",
    "load_weights",
    "per_rank",
    "recover",
    "replicate",
    "save",
    "save_hf",
    "save_rank_checkpoint",
    "step_folder",
    "steps",
    "transfer",
]


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__)
