"""Checkpoints of transformers' ``Trainer`` from which another number of ranks can resume."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from shardwise import checkpoint
from shardwise._torch import dtensor
from shardwise._torch.unread import Unread
from shardwise.base.boxes import narrow
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.checkpoint.ranks.loading import own_part

__all__ = ["TrainerCheckpoints"]

_FOLDER = "shardwise"
_SAVED_TO, _SAVED_BY = "saved_to", "saved_by"


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
        self._name = ""  # of the run, on all ranks

    def state(self) -> dict[str, Any]:
        """Return what the trainer saves of this in a checkpoint: where the shards are, and whose.

        A trainer that restores its callbacks makes another one of it; the model has the hook.
        """
        saved_to = None if self._run is None else str(_folder(*self._run).absolute())
        known = {_SAVED_TO: saved_to, _SAVED_BY: self._name}
        return {"args": {}, "attributes": {"_is_made_with_trainer": True, **known}}

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
        extra = {
            "scheduler": given["lr_scheduler"].state_dict(),
            "examples": _examples(args),
            _SAVED_BY: self._name,
        }
        checkpoint.save(_folder(args, state), given["model"], _inner(given["optimizer"]), extra)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Load the shards, if the trainer resumes.

        Raises:
            CheckpointError: there are none, they are damaged, or another run has saved them.
            ValueError: a step has another number of examples, so others would be skipped; or the
                trainer was made without this callback.
        """
        if not self._is_made_with_trainer:
            raise ValueError(
                "TrainerCheckpoints: found a trainer that was made without it, as add_callback "
                "does, expected callbacks=[TrainerCheckpoints()] where the trainer is made"
            )
        self._run = args, state
        ranks = Ranks(group_for(None))
        self._name = ranks.first("naming the run", lambda: secrets.token_hex(8))
        if not state.global_step:
            return
        own = state.stateful_callbacks.get(type(self).__name__)
        folder = ranks.first(
            f"resuming from step {state.global_step}", lambda: _asked_for(own, args, state)
        )
        extra = checkpoint.load(folder, given["model"], _inner(given["optimizer"]))
        if extra.get(_SAVED_BY) != _recorded(own, _SAVED_BY):
            raise CheckpointError(
                f"{folder}: is of another run than the trainer's own files, which an interrupted "
                "save or a copy leaves. Resume from an earlier checkpoint; or if its run was "
                "moved, set output_dir to where it is now"
            )
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


def _asked_for(own: Any, args: Any, state: Any) -> Path:
    """The shards of the checkpoint that the trainer resumes from, which may be of another folder.

    The trainer does not say which it is. But it has read its state from there, with the place of
    the shards. If they are there no longer, they may have been moved.

    Raises:
        CheckpointError: there are none.
    """
    recorded, here = _recorded(own, _SAVED_TO), _folder(args, state)
    if recorded is not None and checkpoint.is_complete(recorded):
        return Path(recorded)
    if not checkpoint.is_complete(here):
        raise CheckpointError(
            f"{recorded or here}: found no checkpoint; it is saved where the trainer has "
            "TrainerCheckpoints among its callbacks. If that was interrupted, resume from an "
            "earlier one; if its run was moved, set output_dir to where it is now"
        )
    return here


def _recorded(own: Any, what: str) -> str | None:
    """What a trainer's state says of the shards: where they are, or whose."""
    if isinstance(own, list) and own:  # of several callbacks, the last one has saved last
        own = own[-1]
    found = own.get("attributes", {}).get(what) if isinstance(own, dict) else None
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
