"""Optimizers that know about shards."""

from typing import TYPE_CHECKING

from shardwise._lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.errors import StepInterruptedError
    from shardwise.optim.clipping import ClipBy, NonFinite
    from shardwise.optim.step_in_backward import OptimizerInBackward, in_backward

__all__ = ["ClipBy", "NonFinite", "OptimizerInBackward", "StepInterruptedError", "in_backward"]

_HOME = {
    "ClipBy": "shardwise.optim.clipping",
    "NonFinite": "shardwise.optim.clipping",
    "OptimizerInBackward": "shardwise.optim.step_in_backward",
    "StepInterruptedError": "shardwise.errors",
    "in_backward": "shardwise.optim.step_in_backward",
}


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
