"""Fine-tuning as one process does it with ``transformers`` alone, on the batches of given ranks."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from shardwise.app.recipes.text.config import LmConfig
from shardwise.app.recipes.text.conversations import TargetBatch
from shardwise.insight.schema.training import OptimizerConfig, ScheduleName
from tests.recipes.small import train_config

#: The part of a microbatch that a rank takes: step, microbatch, rank -> batch.
BatchOf = Callable[[int, int, int], TargetBatch]


def plain_losses(config: LmConfig, world_size: int, batch_of: BatchOf) -> list[float]:
    """Train as a configuration says, without clipping; return the loss of every step.

    Gradients of microbatches are added for each rank, and then over ranks, as ranks do it.
    """
    train = config.train
    assert train.steps is not None and train.optimizer.clip_grad == 0
    assert config.pretrained is not None
    model = AutoModelForCausalLM.from_pretrained(config.pretrained, dtype=torch.float32)
    model.train()
    if config.lora is not None:
        model = _with_adapters(model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _adamw(trained, train.optimizer)
    losses = []
    for step in range(1, train.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = _lr(config, step)
        of_ranks = [
            [batch_of(step, micro, rank) for micro in range(train.accumulate)]
            for rank in range(world_size)
        ]
        count = sum(batch.target_count for of_rank in of_ranks for batch in of_rank)
        loss, gradients = 0.0, list[Any]()
        for batches in of_ranks:
            mine = torch.zeros(())
            for batch in batches:
                given = {} if batch.positions is None else {"position_ids": batch.positions}
                logits = model(input_ids=batch.tokens, use_cache=False, **given).logits
                found = model.loss_function(
                    logits,
                    None,
                    model.config.vocab_size,
                    num_items_in_batch=count,
                    shift_labels=batch.targets,
                )
                found.backward()
                mine += found.detach()
            loss += mine.item()
            gradients.append([parameter.grad for parameter in trained])
            optimizer.zero_grad()
        for parameter, *of_parameter in zip(trained, *gradients, strict=True):
            parameter.grad = sum(of_parameter[1:], of_parameter[0])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def _with_adapters(model: Any, config: LmConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    assert config.lora == "r=16,alpha=32"
    torch.manual_seed(config.train.seed)
    with warnings.catch_warnings():  # peft asks transformers for a former name
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def _adamw(parameters: Sequence[nn.Parameter], config: Any) -> torch.optim.AdamW:
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=config.betas, fused=True
    )


def _lr(config: LmConfig, step: int) -> float:
    """Constant, after a linear warm-up."""
    optimizer: Any = config.train.optimizer
    return float(optimizer.lr * min(1.0, step / optimizer.warmup))


def tuned(folder: Path, pretrained: Path, out: str, **changes: Any) -> LmConfig:
    """The configuration of a short fine-tuning with a constant learning rate, without clipping.

    Args:
        folder: where the run goes.
        pretrained: what to continue from.
        out: name of the run's folder.
        changes: settings by their innermost names.
    """
    given = {"steps": 4, "batch_size": 2, **changes}
    own = {f.name for f in dataclasses.fields(LmConfig)} - {"train"}
    mine = {name: given.pop(name) for name in list(given) if name in own}
    optimizer = OptimizerConfig(lr=1e-2, warmup=2, clip_grad=0.0, schedule=ScheduleName.CONSTANT)
    config = LmConfig(
        model=str(pretrained),
        pretrained=str(pretrained),
        train=train_config(folder / out, given, optimizer),
        **{"seq_length": 64, "sample_tokens": 0, **mine},
    )
    assert not given, f"unknown settings: {sorted(given)}"
    return config
