"""Optimizers over shards, and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from shardwise.recipes.core.config import AdamWConfig, SgdConfig
from shardwise.recipes.core.position import Position

Schedule = Callable[[Position], float]  # of the position that a step leads to

FLOOR = 0.1  # the learning rate at the end, as a part of its peak


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


def count(parameters: Iterable[torch.Tensor]) -> int:
    """Return the number of elements; sharded parameters count in full."""
    return sum(p.numel() for p in parameters)
