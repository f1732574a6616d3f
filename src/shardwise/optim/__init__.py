"""Optimizers that know about shards."""

from typing import TYPE_CHECKING

from shardwise.base.lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.base.errors import OffloadError, StepInterruptedError
    from shardwise.optim.adafactor import Adafactor
    from shardwise.optim.adamw8bit import AdamW8bit
    from shardwise.optim.groups import muon_groups, param_groups
    from shardwise.optim.lion import Lion
    from shardwise.optim.muon import Muon
    from shardwise.optim.norms import ClipBy, NonFinite
    from shardwise.optim.offloaded.optimizer import OffloadedOptimizer, offload
    from shardwise.optim.on_shards import OptimizerOnShards, local, whole
    from shardwise.optim.step_in_backward import OptimizerInBackward, in_backward
    from shardwise.sharding.local_step import step_on_shards

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
    "OptimizerOnShards",
    "StepInterruptedError",
    "in_backward",
    "local",
    "muon_groups",
    "offload",
    "param_groups",
    "step_on_shards",
    "whole",
]


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__)
