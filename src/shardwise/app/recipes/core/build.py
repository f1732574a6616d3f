"""What recipes build their tasks from: sharded models, optimizers and learning rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise import (
    CPUOffloadPolicy,
    DiskOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    optim,
)
from shardwise.app.recipes.core.recipe import Task, TrainContext
from shardwise.base.errors import UserError
from shardwise.base.places import folder_of_place
from shardwise.frontends.blocks import batch_norms, checkpoint_blocks, shard_blocks, store_in
from shardwise.insight.schema.sharding import (
    PrecisionName,
    ShardingConfig,
    Stepping,
    TransportName,
)
from shardwise.insight.schema.training import (
    MOMENTA,
    OptimizerConfig,
    OptimizerName,
    ScheduleName,
    SgdConfig,
    TrainConfig,
    rules_of,
)
from shardwise.optim.reductions import Reductions
from shardwise.pretrained.precision import keeping_float32, kept_in_float32
from shardwise.sharding.state import states_of
from shardwise.transport.base import Transport
from shardwise.transport.peers import Peers

#: None, which a training never has, is for configurations of plans.
DTYPES: dict[PrecisionName | None, Any] = {
    PrecisionName.FP32: torch.float32,
    PrecisionName.BF16: torch.bfloat16,
    None: None,
}


def shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    config: ShardingConfig,
    place: TrainContext,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
    blocks: Sequence[nn.Module] | None = None,
) -> FSDPModule:
    """Shard every unit, then the rest, and have blocks recompute what the configuration says.

    Batch norm is kept and computes in float32 whatever the rest does, as its statistics are. So do
    parameters that ``transformers`` keeps in float32.

    Args:
        model: on the meta device, or the same on every rank.
        units: modules of it that are to be gathered one at a time, inner ones first.
        config: dtypes and transport.
        place: mesh and strategy.
        placement: along which dimension a parameter is cut; by default the first.
        blocks: the modules whose activations may be recomputed; by default the units.

    Returns:
        ``model``.
    """
    checkpoint_blocks(
        units if blocks is None else blocks, config.activation_checkpointing, config.recompute_every
    )
    offload: OffloadPolicy = OffloadPolicy()
    if config.offload_parameters is not None:
        folder = folder_of_place(config.offload_parameters)
        offload = CPUOffloadPolicy() if folder is None else DiskOffloadPolicy(folder)
    dtype = DTYPES[config.shard_dtype]
    store_in(model, dtype, kept_in_float32(model, dtype))
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.compute_dtype], reduce_dtype=DTYPES[config.reduce_dtype]
    )
    shard_blocks(
        model,
        units,
        mesh=place.plan.sharding_mesh(place.mesh),
        reshard_after_forward=place.plan.reshard_after_forward,
        precision=keeping_float32(model, precision),
        placement=placement,
        transport=None if config.transport is TransportName.AUTO else config.transport,
        offload_policy=offload,
        wire=config.collective_wire.argument,
    )
    assert isinstance(model, FSDPModule)
    return model


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


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that a configuration names, over all trained parameters."""
    momentum = MOMENTA.get(config.algorithm, 0.0) if config.momentum is None else config.momentum
    match config.algorithm:
        case OptimizerName.ADAMW:
            return torch.optim.AdamW(
                _decaying(model, config),
                lr=config.lr,
                betas=config.betas,
                fused=True,  # one kernel for all shards; a shard may be small, a call is not free
            )
        case OptimizerName.ADAMW8BIT:
            return optim.AdamW8bit(_decaying(model, config), lr=config.lr, betas=config.betas)
        case OptimizerName.MUON:
            return optim.Muon(
                divided_groups(
                    model, config, optim.muon_groups(model, adamw={"betas": config.betas})
                ),
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=momentum,
                adjust_lr_fn="match_rms_adamw",  # --lr is for AdamW as well
            )
        case OptimizerName.LION:
            return optim.Lion(_decaying(model, config), lr=config.lr, betas=config.betas)
        case OptimizerName.ADAFACTOR:
            return optim.Adafactor(_decaying(model, config), lr=config.lr)
        case OptimizerName.SGD:
            return torch.optim.SGD(_decaying(model, config), config.lr, momentum)


def _decaying(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return parameter groups with weight decay on matrices only, not on norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return divided_groups(model, config, groups)


#: The key of a parameter group for its peak learning rate, where that is not the one of all.
_PEAK = "peak_lr"


def divided_groups(
    model: nn.Module,
    config: OptimizerConfig | SgdConfig,
    groups: Sequence[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Divide parameter groups, or one of all trained parameters, as ``--param-group`` says.

    No values of the model are needed.

    Raises:
        UserError: a pattern does not fit the model.
    """
    rules: dict[str, dict[str, Any]] = rules_of(config.param_groups)
    try:
        divided = optim.param_groups(model, rules, groups=groups)
    except ValueError as error:
        found = str(error).removeprefix("param_groups: ")
        raise UserError(f"--param-group: {found}") from error
    for group in divided:
        if "lr" in group:
            group[_PEAK] = group["lr"]
    return divided


def make_sgd(model: nn.Module, config: SgdConfig) -> torch.optim.SGD:
    """Return stochastic gradient descent with weight decay on all parameters."""
    return torch.optim.SGD(
        divided_groups(model, config),
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


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


def offloading(task: Task, config: TrainConfig) -> Task:
    """Return the task, whose optimizer keeps its states where the configuration says."""
    sharding = config.sharding
    if sharding.offload is None:
        return task
    masters = None if sharding.master_dtype is None else DTYPES[sharding.master_dtype]
    made = optim.offload(task.optimizer, sharding.offload, masters=masters)
    return dataclasses.replace(task, optimizer=made)


def stepping_in_backward(task: Task, config: TrainConfig) -> Task:
    """Return the task, whose groups step in backward if the configuration says so."""
    if config.stepping is Stepping.AFTER_BACKWARD:
        return task
    made = optim.in_backward(task.module, lambda _: task.optimizer, max_norm=config.max_norm)
    return dataclasses.replace(task, optimizer=made)


def set_lr(optimizer: torch.optim.Optimizer, lr: float, peak: float) -> None:
    """Set the learning rate of every parameter group.

    Args:
        optimizer: the optimizer.
        lr: the learning rate of the step.
        peak: the largest one of the training. Groups with a peak of their own get the same part of
            that.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * (group[_PEAK] / peak) if _PEAK in group else lr


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
