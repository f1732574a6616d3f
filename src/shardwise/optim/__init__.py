"""Optimizers that know about shards."""

from typing import TYPE_CHECKING

from shardwise._lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.optim.adamw8bit import AdamW8bit
    from shardwise.optim.muon import Muon
    from shardwise.optim.split import muon_groups

__all__ = ["AdamW8bit", "Muon", "muon_groups"]

_HOME = {
    "AdamW8bit": "shardwise.optim.adamw8bit",
    "Muon": "shardwise.optim.muon",
    "muon_groups": "shardwise.optim.split",
}


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
