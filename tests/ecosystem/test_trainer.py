"""transformers' ``Trainer`` and TRL's ``SFTTrainer`` on models that were sharded as they loaded."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.app.recipes.text.data import SEPARATOR, byte_tokenizer
from shardwise.pretrained.trainer import TrainerCheckpoints
from tests.pretrained.small import assert_same, full_tensors, save_llama
from tests.worlds import Ranks

pytest.importorskip("accelerate", reason="needs accelerate: install .[ecosystem]")
distributed = pytest.importorskip(
    "transformers.distributed", reason="needs transformers>=5.20: install .[ecosystem]"
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what others warn of is theirs
    pytest.mark.skipif(
        not hasattr(distributed.DistributedConfig(), "fsdp_size"),
        reason="this transformers has no DistributedConfig(fsdp_size=...): install .[ecosystem]",
    ),
]

Make = Callable[[Path, int, "Loads"], Any]


class Loads(enum.Enum):
    """Whose ``from_pretrained`` loads the model of several ranks."""

    SHARDWISE = "shardwise"
    TRANSFORMERS = "transformers"


STEPS = 3
TEXTS = [f"{number} shards are gathered, and {number + 1} reduced" for number in range(32)]


def _load(folder: Path, world_size: int, loads: Loads) -> Any:
    """On one rank transformers' own model; on several, one that is sharded as it loads."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if world_size == 1:
        return AutoModelForCausalLM.from_pretrained(folder)
    if loads is Loads.SHARDWISE:
        return shardwise.from_pretrained(folder).train()
    with shardwise.patch_torch():
        return AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(fsdp_size=world_size)
        )


def _arguments(world_size: int, out: Path) -> dict[str, Any]:
    """The same examples per step in every world, in two microbatches."""
    return {
        "output_dir": str(out),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // world_size,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
    }


def _by_trainer(folder: Path, world_size: int, loads: Loads) -> Any:
    from transformers import Trainer, TrainingArguments

    tokens = torch.randint(0, SEPARATOR, (32, 12), generator=torch.Generator().manual_seed(0))
    examples = [{"input_ids": each, "labels": each} for each in tokens]
    return Trainer(
        model=_load(folder / "model", world_size, loads),
        args=TrainingArguments(**_arguments(world_size, folder / "trainer")),
        train_dataset=examples,  # type: ignore[arg-type]
    )


def _by_sft_trainer(folder: Path, world_size: int, loads: Loads, **more: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    own = {"max_length": 32, "gradient_checkpointing": False, "dataset_num_proc": None}
    return SFTTrainer(
        **more,
        model=_load(folder / "model", world_size, loads),
        args=SFTConfig(**_arguments(world_size, folder / "sft"), **own),
        train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
        processing_class=byte_tokenizer(),
    )


def _trained(
    rank: int, world_size: int, folder: Path, make: Make, loads: Loads
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, and save; return losses and parameters."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.redirect_stdout(None):
        trainer = make(folder, world_size, loads)
        trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    if world_size > 1:
        assert isinstance(model, shardwise.FSDPModule)
        for module in (model, *model.model.layers):
            assert shardwise.fully_shard.state(module).groups is not None
        assert all(isinstance(each, DTensor) for each in model.parameters())
        trainer.save_model(str(folder / make.__name__))
        shardwise.save_pretrained(model, folder / f"{make.__name__}-ours")
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, full_tensors(model)


def _same_as_alone(ranks: Ranks, folder: Path, make: Make, *ways: Loads) -> None:
    from transformers import AutoModelForCausalLM

    save_llama(folder / "model", vocab_size=SEPARATOR + 1, use_cache=False)
    ((expected, parameters),) = ranks(_trained, 1, folder, make, ways[0])
    assert len(expected) == STEPS
    for loads in ways:
        out = folder / loads.value
        out.mkdir()
        (out / "model").symlink_to(folder / "model")
        first, second = ranks(_trained, 2, out, make, loads)
        assert first[0] == second[0] == pytest.approx(expected, rel=1e-5)
        for name, found in first[1].items():
            torch.testing.assert_close(found, parameters[name], rtol=1e-4, atol=1e-5)
        for name in (make.__name__, f"{make.__name__}-ours"):
            assert_same(full_tensors(AutoModelForCausalLM.from_pretrained(out / name)), first[1])


def test_trainer_trains_a_sharded_model(ranks: Ranks, tmp_path: Path) -> None:
    _same_as_alone(ranks, tmp_path, _by_trainer, *Loads)


def test_sft_trainer_trains_a_sharded_model(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs trl: install .[ecosystem]")
    _same_as_alone(ranks, tmp_path, _by_sft_trainer, *Loads)


def _resumed(rank: int, world_size: int, folder: Path, resume: str | None) -> list[float]:
    """Train by ``SFTTrainer`` with checkpoints, or go on from one; return losses by step."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.redirect_stdout(None):
        callbacks = [TrainerCheckpoints()]
        trainer = _by_sft_trainer(folder, world_size, Loads.SHARDWISE, callbacks=callbacks)
        args = trainer.args
        args.max_steps, args.save_steps, args.save_only_model = 6, 2, True
        args.save_strategy = type(args.save_strategy).STEPS
        trainer.train(resume_from_checkpoint=resume and str(folder / "sft" / resume))
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def test_sft_trainer_resumes_on_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """In the second epoch of 32 examples, 8 in a step."""
    pytest.importorskip("trl", reason="needs trl: install .[ecosystem]")
    save_llama(tmp_path / "model", vocab_size=SEPARATOR + 1, use_cache=False)
    losses = ranks(_resumed, 2, tmp_path, None)[0]
    assert len(losses) == 6
    for world_size in (4, 1, 2):
        found = ranks(_resumed, world_size, tmp_path, "checkpoint-4")[0]
        assert found == pytest.approx(losses, rel=1e-4), world_size
