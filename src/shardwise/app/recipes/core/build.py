"""What recipes build their tasks from: sharded models, optimizers and learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import FSDPModule, OffloadPolicy, fully_shard
from shardwise.app.recipes.core.recipe import TrainContext
from shardwise.frontends.blocks import batch_norms
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.program import Program, policy_of
from shardwise.insight.schema.training import OptimizerConfig, ScheduleName, TrainConfig
from shardwise.optim.reductions import Reductions
from shardwise.sharding.state import states_of
from shardwise.transport.base import Transport
from shardwise.transport.peers import Peers


def program_of(
    blueprint: Blueprint,
    train: TrainConfig,
    place: TrainContext,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    after_step: Callable[[nn.Module], None] | None = None,
) -> Program:
    """Return what a rank trains.

    Args:
        blueprint: the model, on the meta device or the same on every rank.
        train: how it is trained.
        place: mesh and strategy.
        loss: of the model on a batch, a scalar.
        after_step: makes equal on all ranks what is not sharded.
    """
    return Program(
        blueprint=blueprint,
        config=train.sharding,
        plan=place.plan,
        loss=loss,
        optimizer=train.optimizer,
        stepping=train.stepping,
        max_norm=train.max_norm,
        after_step=after_step,
    )


def shard(program: Program, place: TrainContext) -> FSDPModule:
    """Shard the model of a program, in place, and return it."""
    program.prepare()
    offload: OffloadPolicy = OffloadPolicy()
    if (kept := program.config.offload_parameters) is not None:
        offload = policy_of(kept)
    program.shard(place.mesh, offload)
    assert isinstance(program.model, FSDPModule)
    return program.model


BACKEND = "inductor"  # of torch.compile
VARIANTS = 4  # of each compiled block: training and evaluation, full and last batches


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile every block by itself, after it was sharded.

    The hooks of sharding stay what they are: a block is compiled between them. All blocks of a
    kind share their code, and each may be specialized for what differs, such as its number.
    """
    limits = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS * len(blocks))
    for block in blocks:
        block.compile(backend=BACKEND)


FLOOR = 0.1  # the learning rate at the end, as a part of its peak, unless --min-lr says another
DECAY = 0.1  # the part of a run in which warmup-stable-decay decays, unless --decay-steps does


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[float], float]:
    """Return a schedule: linear warmup, the peak for as long as nothing decays, and the decay.

    ``cosine`` and ``linear`` decay from the end of the warmup on, ``warmup-stable-decay`` in the
    last tenth of the run by ``1 - sqrt(part of the decay that is done)``, which Hägele et al.
    (2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations") found to be
    better than a line. ``decay_steps`` begins any of them at another step, at the earliest after
    the warmup. Until then a run can be resumed with more ``steps`` as if it had always had these.

    Args:
        config: peak, warmup and decay.
        steps: of the whole run.

    Returns:
        The learning rate of step 1, 2, .. ``steps``.
    """
    # A run shorter than its warm-up still sees a peak.
    warmup = min(config.warmup, max(1, steps // 2)) if config.warmup else 0
    decay = config.decay_steps
    if decay is None and config.schedule is ScheduleName.WARMUP_STABLE_DECAY:
        decay = max(1, round(DECAY * steps))
    begin = warmup if decay is None else max(warmup, steps - decay)
    peak = config.lr
    least = FLOOR * peak if config.min_lr is None else config.min_lr

    def lr(step: float) -> float:
        if step <= warmup:
            return peak * step / warmup
        done = min(1.0, max(0.0, (step - begin) / max(1, steps - begin)))
        return least + (peak - least) * _REMAINING[config.schedule](done)

    return lr


#: The part of the way from the lowest rate to the peak that is left, by the part of the decay that
#: is done: from 1 at 0 to 0 at 1.
_REMAINING: dict[ScheduleName, Callable[[float], float]] = {
    ScheduleName.COSINE: lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    ScheduleName.LINEAR: lambda done: 1 - done,
    ScheduleName.WARMUP_STABLE_DECAY: lambda done: 1 - math.sqrt(done),
    ScheduleName.CONSTANT: lambda done: 1.0,
}


@contextmanager
def kept_between_forwards(model: nn.Module) -> Iterator[None]:
    """Keep parameters unsharded over several forwards that no backward follows."""
    with ExitStack() as stack:
        for state in states_of(model):
            top = state.modules[0]
            if isinstance(top, FSDPModule) and any(
                not group.options.reshard_after_forward for group in state.groups
            ):
                stack.enter_context(top.keep_unsharded(recurse=False))
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Compute without dropout and gradients; see also :func:`kept_between_forwards`."""
    training = model.training
    try:
        model.eval()
        with torch.no_grad(), kept_between_forwards(model):
            yield
    finally:
        model.train(training)


@torch.no_grad()
def average_running_statistics(model: nn.Module) -> None:
    """Make the running means and variances of batch norms equal on all ranks. Every rank calls it.

    In training, every rank normalizes by the statistics of its own part of the batch, and moves its
    running mean and variance toward them, so ranks drift apart. Here the running statistics are
    averaged, after every step. A running value is a linear function of the statistics, so the
    average is what the mean over ranks would have given: all data count, and evaluations and
    checkpoints see the same values on every rank. (DDP keeps those of rank 0, and so of one part of
    the data.)

    Args:
        model: what has batch norms, or none.
    """
    mine = [
        value
        for norm in batch_norms(model)
        for value in (norm.running_mean, norm.running_var)
        if value is not None
    ]
    if not mine or dist.get_world_size() == 1:
        return
    ranks = Peers()
    statistics = Reductions("running statistics")
    for value in mine:
        statistics.add(value, [ranks.group])
    statistics.run()
    for value in mine:
        value /= ranks.size


def count(parameters: Iterable[torch.Tensor]) -> int:
    """Return the number of elements; sharded parameters count in full."""
    return sum(p.numel() for p in parameters)


def shard_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that this rank holds."""
    locals_ = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(t.numel() * t.element_size() for t in locals_)


def transport_name(model: nn.Module) -> str:
    """Return the transport of each dimension of the mesh, outermost first."""
    state = fully_shard.state(model)  # type: ignore[attr-defined]
    for group in state.groups if state is not None else []:
        outer = group.mesh.replicate
        names = [_name_of(each) for each in (outer, group.mesh.shard) if each is not None]
        return "/".join(names)
    return "none"


def _name_of(transport: Transport) -> str:
    return transport.name if transport.wire.is_plain else f"{transport.name} ({transport.wire})"
