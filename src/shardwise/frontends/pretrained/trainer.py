"""Checkpoints of transformers' ``Trainer`` from which another number of ranks can resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from shardwise import checkpoint
from shardwise.base.errors import CheckpointError

_FOLDER = "shardwise"


class TrainerCheckpoints(TrainerCallback):
    """Lets ``Trainer`` and ``SFTTrainer`` resume a sharded model, on any number of ranks.

    ::

        from shardwise.frontends.pretrained.trainer import TrainerCheckpoints

        trainer = Trainer(
            model=shardwise.from_pretrained("Qwen/Qwen3-0.6B").train(),
            args=TrainingArguments(..., save_only_model=True),
            train_dataset=dataset,
            callbacks=[TrainerCheckpoints()],
        )
        trainer.train(resume_from_checkpoint="out/checkpoint-500")  # or True: the last one

    Each checkpoint of the trainer gets a folder ``shardwise`` with the shards of the model and of
    the optimizer, and the schedule; see :mod:`shardwise.checkpoint`. Resuming loads them, sharded
    as the model is now, by our ``fully_shard`` or by torch's. The trainer itself skips the examples
    that were seen, so a step has to have as many examples as before: with other ranks, change
    ``per_device_train_batch_size`` or ``gradient_accumulation_steps``, or pass
    ``ignore_data_skip=True``. States of random number generators are not kept.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None  # whose trainer was made with this

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Let the trainer load a checkpoint without the tensors that are sharded.

        Raises:
            ValueError: the trainer would save an optimizer of which it sees one rank's shards.
        """
        if args.save_strategy != "no" and not args.save_only_model:
            raise ValueError(
                "TrainerCheckpoints: found save_only_model=False, expected True in the arguments "
                "of the trainer: it cannot save the shards of an optimizer, which this does"
            )
        self._model = model = given["model"]
        sharded = {name for name, param in model.named_parameters() if isinstance(param, DTensor)}

        def leave_out(module: nn.Module, saved: dict[str, Any], prefix: str, *_: Any) -> None:
            for name in [each for each in saved if prefix + each in sharded]:
                if not isinstance(saved[name], DTensor):
                    del saved[name]

        model.register_load_state_dict_pre_hook(leave_out)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save the shards beside what the trainer has saved, which replaces an earlier run's."""
        if args.process_index == 0:
            shutil.rmtree(_folder(args, state), ignore_errors=True)
        extra = {"scheduler": given["lr_scheduler"].state_dict(), "examples": _examples(args)}
        checkpoint.save(_folder(args, state), given["model"], _inner(given["optimizer"]), extra)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Load the shards, if the trainer resumes.

        Raises:
            CheckpointError: there are none, or they are damaged.
            ValueError: a step has another number of examples, so others would be skipped; or the
                trainer was made without this callback.
        """
        if self._model is None:
            raise ValueError(
                "TrainerCheckpoints: found a trainer that was made without it, as add_callback "
                "does, expected callbacks=[TrainerCheckpoints()] where the trainer is made"
            )
        if not state.global_step:
            return
        folder = _folder(args, state)
        if not checkpoint.is_complete(folder):
            raise CheckpointError(
                f"{folder}: found no checkpoint, expected that of step {state.global_step}; it is "
                "saved where the trainer has TrainerCheckpoints among its callbacks"
            )
        extra = checkpoint.load(folder, given["model"], _inner(given["optimizer"]))
        found, before = _examples(args), extra["examples"]
        if found != before and not args.ignore_data_skip:
            raise ValueError(
                f"TrainerCheckpoints: found {found} examples in a step, expected {before} as "
                f"before step {state.global_step}: change per_device_train_batch_size or "
                "gradient_accumulation_steps, or pass ignore_data_skip=True"
            )
        given["lr_scheduler"].load_state_dict(extra["scheduler"])


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / _FOLDER


def _examples(args: Any) -> int:
    """The examples of an optimizer step, on all ranks."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that Accelerate has wrapped."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found
