"""The interface between a recipe and the training loop that all recipes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import FSDPModule
from shardwise.frontends.strategies import ShardingPlan
from shardwise.launch.world import World
from shardwise.recipes.core.checkpointing import Resumable
from shardwise.recipes.core.optim import Schedule
from shardwise.recipes.core.progress import Display
from shardwise.recipes.core.replicas import Replicas


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank trains.

    Attributes:
        world: this rank among all.
        device: where it computes.
        plan: how the model is sharded.
        mesh: over which ranks.
        display: where lines and progress are shown.
    """

    world: World
    device: torch.device
    plan: ShardingPlan
    mesh: DeviceMesh
    display: Display


class Data(Protocol):
    """Training examples in an order that does not depend on the world."""

    def batch(self, position: int, count: int) -> Any:
        """Return examples ``position`` .. ``position + count``, on this rank's device."""


def nothing() -> None:
    """Do nothing, as most recipes after a step and at the end of training."""


def no_more(checkpoint: Path, results: Mapping[str, float]) -> Mapping[str, float]:
    """Return the results as they are."""
    del checkpoint
    return results


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train. Every rank has one, and calls its functions at the same time.

    Attributes:
        title: above the loss curve.
        model_name: for the first line.
        model: after ``fully_shard``.
        model_config: its ``config.json`` as ``transformers`` reads it; None: it is not theirs.
        optimizer: over the model's shards.
        schedule: the learning rate of a step, by the position that the step leads to.
        data: where batches come from.
        loss: maps model and batch to a scalar, the mean over the batch.
        evaluate: evaluates the model on validation data; one of the values may be
            ``validation_loss``, which the curve shows.
        unit: what speed counts: ``tokens``, ``images``.
        units_per_example: units in an example.
        peak_units_per_s: the speed at an MFU of 1; None: not known.
        position: data that save a position of their own; None: the number of examples is enough.
        example: what an example is called, for the first lines: ``sequences x 128 tokens``.
        loss_unit: ``nats per token``.
        introduction: more of the first lines, each a label and a text.
        after_step: makes equal on all ranks what is not sharded.
        close: called after the last batch, or when training failed: stops reading ahead.
        replicas: the replicas, if they train apart.
        finish: called with the last checkpoint and the last evaluation; returns the results to
            record.
    """

    title: str
    model_name: str
    model: FSDPModule
    model_config: str | None = None
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    data: Data
    loss: Callable[[nn.Module, Any], torch.Tensor]
    evaluate: Callable[[], dict[str, float]]
    unit: str
    units_per_example: int = 1
    peak_units_per_s: float | None = None
    position: Resumable | None = None
    example: str
    loss_unit: str
    introduction: Sequence[tuple[str, str]] = ()
    after_step: Callable[[], None] = nothing
    close: Callable[[], None] = nothing
    replicas: Replicas | None = None
    finish: Callable[[Path, Mapping[str, float]], Mapping[str, float]] = no_more

    @property
    def module(self) -> nn.Module:
        """The model, typed as a module."""
        assert isinstance(self.model, nn.Module)
        return self.model
