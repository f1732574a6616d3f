"""Optimizers that know about shards."""

from typing import TYPE_CHECKING

from shardwise._lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.errors import OffloadError, StepInterruptedError
    from shardwise.optim.adamw8bit import AdamW8bit
    from shardwise.optim.clipping import ClipBy, NonFinite
    from shardwise.optim.muon import Muon
    from shardwise.optim.offloaded.optimizer import OffloadedOptimizer, offload
    from shardwise.optim.split import muon_groups
    from shardwise.optim.step_in_backward import OptimizerInBackward, in_backward

__all__ = [
    "AdamW8bit",
    "ClipBy",
    "Muon",
    "NonFinite",
    "OffloadError",
    "OffloadedOptimizer",
    "OptimizerInBackward",
    "StepInterruptedError",
    "in_backward",
    "muon_groups",
    "offload",
]

_HOME = {
    "AdamW8bit": "shardwise.optim.adamw8bit",
    "ClipBy": "shardwise.optim.clipping",
    "Muon": "shardwise.optim.muon",
    "NonFinite": "shardwise.optim.clipping",
    "OffloadError": "shardwise.errors",
    "OffloadedOptimizer": "shardwise.optim.offloaded.optimizer",
    "OptimizerInBackward": "shardwise.optim.step_in_backward",
    "StepInterruptedError": "shardwise.errors",
    "in_backward": "shardwise.optim.step_in_backward",
    "muon_groups": "shardwise.optim.split",
    "offload": "shardwise.optim.offloaded.optimizer",
}


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
