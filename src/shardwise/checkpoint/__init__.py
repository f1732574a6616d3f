"""Checkpoints that are whole or not there, never run code, and load on any mesh."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoint.api import async_save, load, save
    from shardwise.checkpoint.background import Handle
    from shardwise.checkpoint.commit import is_complete, keep_last, latest, step_folder, steps
    from shardwise.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Handle",
    "async_save",
    "is_complete",
    "keep_last",
    "latest",
    "load",
    "save",
    "step_folder",
    "steps",
]

# As in the package above: importing torch takes seconds, and names are fetched when first used.
_HOME = {
    "CheckpointError": "shardwise.errors",
    "Handle": "shardwise.checkpoint.background",
    "async_save": "shardwise.checkpoint.api",
    "is_complete": "shardwise.checkpoint.commit",
    "keep_last": "shardwise.checkpoint.commit",
    "latest": "shardwise.checkpoint.commit",
    "load": "shardwise.checkpoint.api",
    "save": "shardwise.checkpoint.api",
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
