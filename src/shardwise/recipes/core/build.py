"""What recipes build their tasks from: sharded models, optimizers and learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise import FSDPModule, MixedPrecisionPolicy, fully_shard
from shardwise.recipes.core.config import AdamWConfig, Precision, SgdConfig, ShardingConfig
from shardwise.recipes.core.recipe import Place
from shardwise.sharding.state import gather_in_order, groups_of, states_of
from shardwise.transport.peers import Peers

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


def shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    config: ShardingConfig,
    place: Place,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
) -> FSDPModule:
    """Shard every unit, then the rest.

    Batch norm computes in float32 whatever the rest computes in, as its statistics are.

    Args:
        model: on the meta device, or the same on every rank.
        units: modules of it that are to be gathered one at a time, inner ones first.
        config: dtypes and transport.
        place: mesh and strategy.
        placement: along which dimension a parameter is cut; by default the first.

    Returns:
        ``model``.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.param_dtype], reduce_dtype=DTYPES[config.reduce_dtype]
    )
    # Inputs stay as they are: batch norm takes bfloat16 beside float32 parameters.
    full = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    transport = None if config.transport is None else config.transport.value
    mesh = place.plan.sharding_mesh(place.mesh)
    taken: set[nn.Module] = set()
    for module in (*units, model):
        # The root's own parameters (embedding, head) are needed at both ends of the forward.
        reshard = place.plan.reshard_after_forward and module is not model
        groups: list[tuple[nn.Module | list[nn.Module], MixedPrecisionPolicy]] = []
        norms: list[nn.Module] = [norm for norm in batch_norms(module) if norm not in taken]
        if norms and config.param_dtype is not Precision.FP32:
            taken.update(norms)
            groups.append((norms, full))
        for part, policy in (*groups, (module, precision)):
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=reshard,
                shard_placement_fn=placement,
                mp_policy=policy,
                transport=transport,
            )
    assert isinstance(model, FSDPModule)
    if any(group.mesh.shard.overlaps_compute() for group in groups_of(model)):
        # Trainings write to parameters between steps only, so gathering early is safe.
        gather_in_order(model)
    return model


def make_adamw(model: nn.Module, config: AdamWConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only, not on norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        fused=True,  # one kernel for all shards; a shard may be small, a call is not free
    )


def make_sgd(model: nn.Module, config: SgdConfig) -> torch.optim.SGD:
    """Return stochastic gradient descent with weight decay on all parameters."""
    return torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


FLOOR = 0.1  # the learning rate at the end, as a part of its peak


def warmup_cosine(config: AdamWConfig, steps: int) -> Callable[[float], float]:
    """Return a schedule: linear warmup, then cosine decay to a tenth of the peak.

    Args:
        config: peak and warm-up.
        steps: of the whole run.

    Returns:
        The learning rate of step 1, 2, .. ``steps``.
    """
    # A run shorter than its warm-up still sees a peak.
    warmup = min(config.warmup, max(1, steps // 2)) if config.warmup else 0

    def lr(step: float) -> float:
        if step <= warmup:
            return config.lr * step / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return config.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))

    return lr


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


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


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """Return the batch norms of a model that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, BatchNorm) and m.track_running_stats]


class RunningStatistics:
    """The running means and variances of a model's batch norms, equal on all ranks.

    In training, every rank normalizes by the statistics of its own part of the batch, and moves its
    running mean and variance toward them, so ranks drift apart. Here the running statistics are
    averaged after every step. A running value is a linear function of the statistics, so the
    average is what the mean over ranks would have given: all data count, and evaluations and
    checkpoints see the same values on every rank. (DDP keeps those of rank 0, and so of one part of
    the data.)

    Args:
        model: what has batch norms, or none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @torch.no_grad()
    def average(self) -> None:
        """Average over all ranks of the default process group. Every rank calls it."""
        # Asked each time: materializing a model replaces its buffers.
        mine = [
            value
            for norm in batch_norms(self._model)
            for value in (norm.running_mean, norm.running_var)
            if value is not None
        ]
        if not mine or dist.get_world_size() == 1:
            return
        flat = torch.cat([value.flatten() for value in mine])
        with Peers().collective("the average of running statistics"):
            dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for value, part in zip(mine, torch.split(flat, [v.numel() for v in mine]), strict=True):
            value.copy_(part)


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
        return group.mesh.shard.name if outer is None else f"{outer.name}/{group.mesh.shard.name}"
    return "none"
