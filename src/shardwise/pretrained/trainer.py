"""Checkpoints of transformers' ``Trainer`` from which another number of ranks can resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from shardwise import checkpoint
from shardwise._torch import dtensor
from shardwise._torch.unread import Unread
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.ranks.loading import own_part

__all__ = ["TrainerCheckpoints"]

_FOLDER = "shardwise"
_SAVED_TO = "saved_to"


class TrainerCheckpoints(TrainerCallback, ExportableState):
    """Lets ``Trainer`` and ``SFTTrainer`` resume a sharded model, on any number of ranks.

    ::

        from shardwise.pretrained.trainer import TrainerCheckpoints

        trainer = Trainer(
            model=shardwise.from_pretrained("Qwen/Qwen3-0.6B").train(),
            args=TrainingArguments(..., save_only_model=True),
            train_dataset=dataset,
            callbacks=[TrainerCheckpoints()],
        )
        trainer.train(resume_from_checkpoint="out/checkpoint-500")  # or True: the last one

    Each checkpoint of the trainer gets a folder ``shardwise`` with the shards of the model and of
    the optimizer, and the schedule; see :mod:`shardwise.checkpoint`. Resuming loads them, sharded
    as the model is now, by our ``fully_shard`` or by torch's, from any folder of a trainer.
    ``load_best_model_at_end=True`` works. The trainer itself skips the examples that were seen, so
    a step has to have as many examples as before: with other ranks, change
    ``per_device_train_batch_size`` or ``gradient_accumulation_steps``, or pass
    ``ignore_data_skip=True``. States of random number generators are not kept.
    """

    def __init__(self) -> None:
        self._is_made_with_trainer = False
        self._run: tuple[Any, Any] | None = None  # its arguments and its state

    def state(self) -> dict[str, Any]:
        """Return what the trainer saves of this in a checkpoint: where the shards are."""
        saved_to = None if self._run is None else str(_folder(*self._run).absolute())
        return {"args": {}, "attributes": {_SAVED_TO: saved_to}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TrainerCheckpoints:
        """Make another one for a trainer that restores its callbacks from a checkpoint."""
        made = cls()
        made._is_made_with_trainer = True  # its model has the hook already
        return made

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Let full tensors load into shards: the trainer's own files have them.

        Raises:
            ValueError: the trainer would save an optimizer of which it sees one rank's shards.
        """
        if args.save_strategy != "no" and not args.save_only_model:
            raise ValueError(
                "TrainerCheckpoints: found save_only_model=False, expected True in the arguments "
                "of the trainer: it cannot save the shards of an optimizer, which this does"
            )
        self._is_made_with_trainer = True
        given["model"].register_load_state_dict_pre_hook(_shard_full_tensors)

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
        if not self._is_made_with_trainer:
            raise ValueError(
                "TrainerCheckpoints: found a trainer that was made without it, as add_callback "
                "does, expected callbacks=[TrainerCheckpoints()] where the trainer is made"
            )
        self._run = args, state
        if not state.global_step:
            return
        folder = _asked_for(args, state)
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


def _asked_for(args: Any, state: Any) -> Path:
    """The shards of the checkpoint that the trainer resumes from, which may be of another run.

    The trainer does not say which it is. But it has read its state from there, with the place of
    the shards. If a run was moved since, its folder is known by the same record.

    Raises:
        CheckpointError: the shards are not there.
    """
    recorded, here = _saved_to(state.stateful_callbacks), _folder(args, state)
    if recorded is None or recorded == str(here.absolute()):
        return here
    if checkpoint.is_complete(recorded):
        return Path(recorded)
    try:
        of_here = json.loads((here.parent / TRAINER_STATE_NAME).read_text())["stateful_callbacks"]
    except (OSError, ValueError, KeyError):
        of_here = {}
    if _saved_to(of_here) != recorded:
        raise CheckpointError(
            f"{recorded}: found no checkpoint, expected that of step {state.global_step}, which "
            f"was saved there; {here} is of another run. If its run was moved, set output_dir to "
            "where it is now"
        )
    return here


def _saved_to(callbacks: Any) -> str | None:
    """What a saved state of a trainer says of where the shards are."""
    own = callbacks.get(TrainerCheckpoints.__name__) if isinstance(callbacks, dict) else None
    found = own.get("attributes", {}).get(_SAVED_TO) if isinstance(own, dict) else None
    return found if isinstance(found, str) else None


def _shard_full_tensors(model: nn.Module, saved: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace full tensors of a state dict by this rank's shards, as the model is sharded now."""
    for name, param in model.named_parameters(remove_duplicate=False):
        full = saved.get(prefix + name)
        if not isinstance(full, torch.Tensor) or isinstance(full, DTensor | Unread):
            continue
        if isinstance(param, DTensor) and full.shape == param.shape:
            box, local = own_part(param)
            rows = narrow(full, box).to(local.device, copy=True)
            saved[prefix + name] = dtensor.placed_as(param, rows)


def _examples(args: Any) -> int:
    """The examples of an optimizer step, on all ranks."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that Accelerate has wrapped."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found
