"""Optimizers on sharded models: ours and torch's on ours, and their peers on torch's FSDP2.

All of one kind get the same settings, those that ``shardwise train lm`` takes by default: learning
rate, betas, momentum, and weight decay of matrices only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.app.recipes.core.build import make_optimizer
from shardwise.insight.schema.training import OptimizerConfig, OptimizerName
from shardwise.optim import muon_groups

Params = list[dict[str, Any]]
TITLES = {
    "ours-adamw": "torch AdamW, fused",
    "fsdp2-adamw": "torch AdamW, fused",
    "ours-adamw8bit": "shardwise AdamW8bit",
    "fsdp2-adamw8bit": "torchao AdamW8bit",
    "ours-muon": "shardwise Muon",
    "fsdp2-muon": "muon-fsdp2",
    "ours-lion": "shardwise Lion",
    "fsdp2-lion": "lion-pytorch",
    "ours-adafactor": "shardwise Adafactor",
    "ours-sgd": "torch SGD, momentum",
    "fsdp2-sgd": "torch SGD, momentum",
}
"""Contenders, by what shards the model and what ``shardwise train`` calls the optimizer."""


def settings_of(name: str, lr: float) -> OptimizerConfig:
    """Return the settings of a contender.

    Args:
        name: the contender.
        lr: the learning rate of AdamW; that of others follows from it.
    """
    kind = OptimizerName(name.partition("-")[2])
    return replace(OptimizerConfig(lr=lr).usual_for(kind), algorithm=kind)


def make(name: str, model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer of a contender."""
    return _PEERS.get(name, make_optimizer)(model, settings)


def installed() -> list[str]:
    """Return the contenders whose packages are there."""
    return [
        name
        for name in TITLES
        if name not in _PACKAGES or importlib.util.find_spec(_PACKAGES[name]) is not None
    ]


def _torchao(model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore]

    groups = _decaying(model, settings)
    made: torch.optim.Optimizer = AdamW8bit(groups, lr=settings.lr, betas=settings.betas)
    return made


def _lion_pytorch(model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    from lion_pytorch import Lion  # type: ignore[import-not-found, unused-ignore]

    groups = _decaying(model, settings)
    made: torch.optim.Optimizer = Lion(groups, lr=settings.lr, betas=settings.betas)
    return made


def _muon_fsdp2(model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    from muon_fsdp2 import Muon  # type: ignore[import-not-found, unused-ignore]

    groups = []
    for found in muon_groups(model):
        group = {"params": [param for _, param in found["params"]], "lr": settings.lr}
        group["weight_decay"] = found.get("weight_decay", settings.weight_decay)
        if found["algorithm"] == "muon":
            group |= {"use_muon": True, "momentum": 0.95, "rms_scale": True}
        else:
            group |= {"use_muon": False, "betas": settings.betas, "eps": 1e-8}
        groups.append(group)
    made: torch.optim.Optimizer = Muon(groups)
    return made


def _decaying(model: nn.Module, settings: OptimizerConfig) -> Params:
    """Return the parameter groups that AdamW has, with their weight decay."""
    adamw = make_optimizer(model, replace(settings, algorithm=OptimizerName.ADAMW))
    return [{key: each[key] for key in ("params", "weight_decay")} for each in adamw.param_groups]


_PEERS: dict[str, Callable[[nn.Module, OptimizerConfig], torch.optim.Optimizer]] = {
    "fsdp2-adamw8bit": _torchao,
    "fsdp2-muon": _muon_fsdp2,
    "fsdp2-lion": _lion_pytorch,
}
_PACKAGES = {
    "fsdp2-adamw8bit": "torchao",
    "fsdp2-muon": "muon_fsdp2",
    "fsdp2-lion": "lion_pytorch",
}
