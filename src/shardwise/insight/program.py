"""A training as it is computed: trainings, plans, proofs and calibrations run the same one.

What differs is what carries it: the processes of a job, or one rank whose world is only pretended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise import optim
from shardwise.base.observe import Activity
from shardwise.base.offload import DiskOffloadPolicy
from shardwise.base.places import folder_of_place
from shardwise.frontends.blocks import checkpoint_blocks, shard_blocks, store_in
from shardwise.frontends.strategies import Runtime, ShardingPlan
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.optimizers import Asked, optimizer_for
from shardwise.insight.schema.sharding import (
    Gathers,
    PrecisionName,
    Stepping,
    StrategyConfig,
)
from shardwise.optim.norms import clip_grad_norm_
from shardwise.pretrained.precision import keeping_float32, kept_in_float32

#: ``None``: as the model was built.
DTYPES: Mapping[PrecisionName | None, Any] = {
    PrecisionName.FP32: torch.float32,
    PrecisionName.BF16: torch.bfloat16,
    None: None,
}


def policy_of(place: str) -> OffloadPolicy:
    """Return what keeps something at a place, ``"host"`` or ``"disk:FOLDER"``.

    Raises:
        ValueError: it is neither.
    """
    folder = folder_of_place(place)
    return CPUOffloadPolicy() if folder is None else DiskOffloadPolicy(folder)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model, how it is sharded, its loss and its optimizer; :class:`TrainingStep` takes a step.

    :meth:`prepare` and :meth:`shard` change the model in place. Every rank calls all methods, in
    this order.

    Attributes:
        blueprint: the model itself, on the meta device or the same on every rank, and its blocks.
        config: dtypes, wires, what is recomputed, where states are kept.
        plan: what is sharded.
        loss: computes the loss of the model on a batch, a scalar.
        optimizer: what updates parameters; see :func:`.optimizer_for`.
        stepping: when it does.
        max_norm: the largest norm of the gradients; ``math.inf``: it is computed, and nothing is
            clipped; ``None``: it is not computed.
        gathers: how often parameters that stay in memory after forward are gathered.
        after_step: called with the model after each step: makes equal on all ranks what is not
            sharded.
        runtime: whose ``fully_shard`` shards it.
    """

    blueprint: Blueprint
    config: StrategyConfig
    plan: ShardingPlan
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Asked
    stepping: Stepping
    max_norm: float | None
    gathers: Gathers = Gathers.EVERY_MICROBATCH
    after_step: Callable[[nn.Module], None] | None = None
    runtime: Runtime = Runtime.SHARDWISE

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.blueprint.model

    def prepare(self, activations: OffloadPolicy | None = None) -> None:
        """Choose the dtype of shards and what is recomputed, for a model that is not sharded yet.

        Batch norms stay in float32 whatever the rest has, as their statistics do. So do parameters
        that ``transformers`` keeps in float32.

        Args:
            activations: where inputs of blocks go, in place of what the configuration says.
        """
        config, blueprint = self.config, self.blueprint
        blocks = blueprint.blocks if blueprint.recomputed is None else blueprint.recomputed
        place = config.place_of_activations
        policy = activations or (None if place is None else policy_of(place))
        checkpoint_blocks(blocks, config.activation_checkpointing, config.recompute_every, policy)
        dtype = DTYPES[config.shard_dtype]
        if dtype is not None:
            store_in(self.model, dtype, kept_in_float32(self.model, dtype))

    def shard(self, mesh: DeviceMesh, offload_policy: OffloadPolicy | None = None) -> None:
        """Shard every block, then the rest.

        Args:
            mesh: of data parallelism, as ``plan`` says.
            offload_policy: as for ``fully_shard``.
        """
        config = self.config
        reduce_dtype = config.reduce_dtype or config.compute_dtype
        precision = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.compute_dtype], reduce_dtype=DTYPES[reduce_dtype]
        )
        shard_blocks(
            self.model,
            self.blueprint.blocks,
            mesh=self.plan.sharding_mesh(mesh),
            reshard_after_forward=self.plan.reshard_after_forward,
            precision=keeping_float32(self.model, precision),
            placement=self.blueprint.placement,
            transport=config.transport_argument,
            offload_policy=offload_policy,
            wire=config.collective_wire.argument,
            runtime=self.runtime,
        )

    def make_optimizer(
        self, offload: Callable[..., torch.optim.Optimizer] | None = None
    ) -> torch.optim.Optimizer | None:
        """Make the optimizer over the shards; ``None`` if there is nothing to update.

        Args:
            offload: keeps states elsewhere, if they are to be; :func:`shardwise.optim.offload` if
                ``None``.
        """
        made = optimizer_for(self.model, self.optimizer)
        if made is None:
            return None
        if self.config.offload is not None:
            masters = DTYPES[self.config.master_dtype]
            made = (offload or optim.offload)(made, self.config.offload, masters=masters)
        if self.stepping is Stepping.AFTER_BACKWARD:
            return made
        inner = made
        return optim.in_backward(self.model, lambda _: inner, max_norm=self.max_norm)


class Updater(Protocol):
    """What updates parameters: an optimizer, or what stands for one."""

    def step(self) -> Any:
        """Update the parameters."""

    def zero_grad(self) -> None:
        """Drop the gradients."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One optimizer step. The parts are called in this order, by every rank.

    Attributes:
        program: what is trained; the model is sharded by our ``fully_shard`` or by torch's, or not
            at all.
        optimizer: what :meth:`Program.make_optimizer` made, or what is around it; ``None``: nothing
            updates the parameters.
        around: entered around each ``FORWARD`` and ``BACKWARD`` of a microbatch.
    """

    program: Program
    optimizer: Updater | None
    around: Callable[[Activity], AbstractContextManager[object]] = lambda _: nullcontext()

    def backward(
        self, batches: Iterable[Any], count: int, divisor: float
    ) -> Iterator[torch.Tensor]:
        """Run forward and backward over microbatches; gradients are reduced in the last backward.

        One microbatch for each loss that is asked for; ask for all of them.

        Args:
            batches: the microbatches, each made when it is needed.
            count: how many there are.
            divisor: what each loss is divided by.

        Yields:
            The losses, as computed: scalars without a graph.
        """
        gathers, sharded = self.program.gathers, cast("Any", self.program.model)
        is_sharded = hasattr(sharded, "set_requires_gradient_sync")
        for number, batch in enumerate(batches):
            last = number == count - 1
            if gathers is Gathers.EVERY_MICROBATCH and is_sharded:
                sharded.set_requires_gradient_sync(last)
            with self.around(Activity.FORWARD):
                loss = self.program.loss(sharded, batch)
            if gathers is Gathers.EVERY_STEP:
                # After forward, which takes what the backward before has left in memory.
                sharded.set_requires_gradient_sync(last)
                sharded.set_reshard_after_backward(last)
                sharded.set_is_last_backward(last)
            with self.around(Activity.BACKWARD):
                (loss / divisor).backward()  # type: ignore[no-untyped-call]
            loss = loss.detach()
            yield loss
            del loss  # its memory is free for the next microbatch

    def norm(self) -> torch.Tensor | None:
        """Clip the gradients, unless backward did; return their norm before, if it is computed."""
        program = self.program
        if program.max_norm is None:
            return None
        if program.stepping is Stepping.IN_BACKWARD:
            in_backward: Any = self.optimizer
            norm: torch.Tensor = in_backward.grad_norm
            return norm
        return clip_grad_norm_(list(program.model.parameters()), program.max_norm)

    def update(self) -> None:
        """Update the parameters, and drop the gradients."""
        program = self.program
        if self.optimizer is None:
            program.model.zero_grad()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if program.after_step is not None:
            program.after_step(program.model)
