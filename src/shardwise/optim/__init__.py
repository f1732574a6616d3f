"""Optimizers that know about shards."""

from typing import TYPE_CHECKING

from shardwise._lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.optim.adamw8bit import AdamW8bit

__all__ = ["AdamW8bit"]

_HOME = {
    "AdamW8bit": "shardwise.optim.adamw8bit",
}


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
