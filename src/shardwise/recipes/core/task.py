"""What a recipe hands to the loop that all recipes share."""

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
        plan: how the model is to be sharded.
        mesh: over which ranks.
        display: where to show something.
    """

    world: World
    device: torch.device
    plan: ShardingPlan
    mesh: DeviceMesh
    display: Display


class Data(Protocol):
    """Training examples in an order that does not depend on the world."""

    def batch(self, position: int, count: int) -> Any:
        """Examples ``position`` .. ``position + count`` of the order, on this rank's device."""


def nothing() -> None:
    """What most recipes do after a step, and when training is over."""


def no_more(checkpoint: Path, results: Mapping[str, float]) -> Mapping[str, float]:
    """What a recipe does at the end that has no more to say."""
    del checkpoint
    return results


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train. Every rank has one, and calls its functions at the same time.

    Attributes:
        title: above the loss curve.
        model_name: for the first line.
        model: after ``fully_shard``.
        model_config: its ``config.json`` as ``transformers`` reads it; None: it is none of theirs.
        optimizer: over the model's shards.
        schedule: the learning rate of a step, by the position that the step leads to.
        data: where batches come from.
        loss: maps model and batch to a scalar, the mean over the batch.
        evaluate: judges the model by data it has not seen; one of the values may be
            ``validation_loss``, which the curve shows.
        unit: what speed counts: ``tokens``, ``images``.
        units_per_example: how many there are in an example.
        peak_units_per_s: the speed at which all devices would be used fully; None: not known.
        position: what has to be saved for the data to go on; None where the number of examples
            says it all.
        example: what an example is called, for the first lines: ``sequences x 128 tokens``.
        loss_unit: ``nats per token``.
        introduction: more of the first lines, each a label and a text.
        after_step: brings what is not sharded, and is not the same on all ranks, to agreement.
        close: called when the last batch was taken, or training has failed: ends what reads ahead.
        replicas: how replicas meet, where they train apart.
        finish: called with the last checkpoint and the last evaluation; returns the results to
            write down.
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
        """The model, as the module that it is as well."""
        assert isinstance(self.model, nn.Module)
        return self.model
