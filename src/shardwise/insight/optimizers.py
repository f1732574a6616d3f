"""The optimizers that trainings, plans and proofs make, by configurations and by names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise import optim
from shardwise.base.errors import UserError
from shardwise.insight.schema.training import (
    MOMENTA,
    OptimizerConfig,
    OptimizerName,
    SgdConfig,
    rules_of,
)

#: An optimizer as it is asked for: see :func:`optimizer_for`.
Asked: TypeAlias = OptimizerConfig | SgdConfig | str | Callable[[list[Any]], Any]

_LR = 1e-3  # where only the name of an optimizer is given
#: What plans and proofs name beside the optimizers of trainings, or in another sense.
_OTHERS: Mapping[str, OptimizerConfig | Callable[[list[Any]], Any]] = {
    "sgd": OptimizerConfig(algorithm=OptimizerName.SGD, lr=_LR, momentum=0.0),
    "sgd-momentum": OptimizerConfig(algorithm=OptimizerName.SGD, lr=_LR),
    "adam": functools.partial(torch.optim.Adam, fused=True),
    "adagrad": torch.optim.Adagrad,
    "none": lambda _: None,
}


def optimizer_for(model: nn.Module, asked: Asked) -> torch.optim.Optimizer | None:
    """Make an optimizer over all trained parameters, in whichever way it is asked for.

    Args:
        model: after it was sharded.
        asked: a configuration; a name, as ``shardwise plan --help`` lists them; or a function from
            trained parameters to an optimizer.

    Returns:
        ``None`` if nothing is trained, or none is asked for.

    Raises:
        UserError: a pattern of ``--param-group`` does not fit the model.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return None
    if isinstance(asked, str):
        asked = _OTHERS.get(asked) or _usual(OptimizerName(asked))
    if isinstance(asked, OptimizerConfig | SgdConfig):
        return make_optimizer(model, asked)
    made: torch.optim.Optimizer | None = asked(trained)
    return made


def _usual(algorithm: OptimizerName) -> OptimizerConfig:
    return OptimizerConfig(algorithm=algorithm, lr=_LR).usual_for(algorithm)


def make_optimizer(model: nn.Module, config: OptimizerConfig | SgdConfig) -> torch.optim.Optimizer:
    """Return the optimizer that a configuration names, over all trained parameters.

    Raises:
        UserError: a pattern of ``--param-group`` does not fit the model.
    """
    if isinstance(config, SgdConfig):
        return torch.optim.SGD(
            _divided(model, config),
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
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
                _divided(model, config, optim.muon_groups(model, adamw={"betas": config.betas})),
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
    return _divided(model, config, groups)


#: The key of a parameter group for its peak learning rate, where that is not the one of all.
_PEAK = "peak_lr"


def _divided(
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
