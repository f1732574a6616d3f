"""Optimizers that know about shards."""

from typing import TYPE_CHECKING

from shardwise.base.lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.base.errors import OffloadError, StepInterruptedError
    from shardwise.optim.adafactor import Adafactor
    from shardwise.optim.adamw8bit import AdamW8bit
    from shardwise.optim.clipping import ClipBy, NonFinite
    from shardwise.optim.lion import Lion
    from shardwise.optim.muon import Muon
    from shardwise.optim.offloaded.optimizer import OffloadedOptimizer, offload
    from shardwise.optim.patterns import param_groups
    from shardwise.optim.split import muon_groups
    from shardwise.optim.step_in_backward import OptimizerInBackward, in_backward

__all__ = [
    "Adafactor",
    "AdamW8bit",
    "ClipBy",
    "Lion",
    "Muon",
    "NonFinite",
    "OffloadError",
    "OffloadedOptimizer",
    "OptimizerInBackward",
    "StepInterruptedError",
    "in_backward",
    "muon_groups",
    "offload",
    "param_groups",
]

_HOME = {
    "Adafactor": "shardwise.optim.adafactor",
    "AdamW8bit": "shardwise.optim.adamw8bit",
    "ClipBy": "shardwise.optim.clipping",
    "Lion": "shardwise.optim.lion",
    "Muon": "shardwise.optim.muon",
    "NonFinite": "shardwise.optim.clipping",
    "OffloadError": "shardwise.base.errors",
    "OffloadedOptimizer": "shardwise.optim.offloaded.optimizer",
    "OptimizerInBackward": "shardwise.optim.step_in_backward",
    "StepInterruptedError": "shardwise.base.errors",
    "in_backward": "shardwise.optim.step_in_backward",
    "muon_groups": "shardwise.optim.split",
    "offload": "shardwise.optim.offloaded.optimizer",
    "param_groups": "shardwise.optim.patterns",
}


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
