"""transformers' ``Trainer`` resumes sharded models on another number of ranks."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import shardwise
from shardwise.pretrained.trainer import TrainerCheckpoints
from tests.harness import run_ranks
from tests.pretrained.small import save_llama

pytest.importorskip("accelerate", reason="needs accelerate: install .[ecosystem]")

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs

STEPS, EXAMPLES, BATCH = 7, 16, 4
RUNTIMES = {"ours": shardwise.fully_shard, "torch's": torch.distributed.fsdp.fully_shard}
ALONE = "ours, on one rank"
ADDS_LATER = {"max_steps": 1}


def _train(
    rank: int, world_size: int, folder: Path, runtime: str, options: Mapping[str, Any], resume: Any
) -> tuple[list[float], str]:
    """Train; return losses by step, or what was refused."""
    adds_later = options == ADDS_LATER
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    if world_size == 1 and runtime in RUNTIMES:
        model: Any = LlamaForCausalLM.from_pretrained(folder / "model").train()
    else:
        shard = RUNTIMES.get(runtime, shardwise.fully_shard)
        model = shardwise.from_pretrained(folder / "model", shard=shard).train()
    tokens = torch.randint(0, 64, (EXAMPLES, 12), generator=torch.Generator().manual_seed(0))
    given = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // world_size,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_steps": 2,
        "save_only_model": True,
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }
    try:
        with contextlib.redirect_stdout(None):
            trainer = Trainer(
                model=model,
                args=TrainingArguments(**given),
                train_dataset=[{"input_ids": t, "labels": t} for t in tokens],  # type: ignore[arg-type]
                callbacks=[] if adds_later else [TrainerCheckpoints()],
            )
            if adds_later:
                trainer.add_callback(TrainerCheckpoints())
            trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    except (ValueError, shardwise.ShardwiseError) as error:
        return [], str(error)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], ""


@pytest.mark.parametrize(
    ("runtime", "world_sizes"),
    [
        ("ours", (4, 1, 2)),
        ("torch's", (4,)),
        pytest.param("torch's", (1, 2), marks=pytest.mark.long),
    ],
)
def test_resumes_on_other_numbers_of_ranks(
    runtime: str, world_sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """In the middle of the second epoch: the optimizer, the schedule and the place in the data."""
    save_llama(tmp_path / "model", vocab_size=64)
    losses, _ = run_ranks(_train, 2, tmp_path, runtime, {}, None)[0]
    assert len(losses) == STEPS
    for world_size in world_sizes:
        found, error = run_ranks(_train, world_size, tmp_path, runtime, {}, "out/checkpoint-6")[0]
        assert not error
        assert found == pytest.approx(losses, rel=1e-4), world_size


def test_what_would_go_wrong_later_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", vocab_size=64)
    one_epoch = {"max_steps": 2}
    assert run_ranks(_train, 2, tmp_path, "ours", one_epoch, None)[0][0]
    error = run_ranks(_train, 2, tmp_path, "ours", ADDS_LATER, None)[0][1]
    assert "found a trainer that was made without it" in error
    more = {"gradient_accumulation_steps": 2, "max_steps": 4}
    for options, message in (
        ({"save_only_model": False}, "save_only_model=True"),  # transformers says it first
        (more, "found 8 examples in a step, expected 4"),
    ):
        error = run_ranks(_train, 2, tmp_path, "ours", options, "out/checkpoint-2")[0][1]
        assert message in error
    skip = {**more, "ignore_data_skip": True}
    assert run_ranks(_train, 2, tmp_path, "ours", skip, "out/checkpoint-2")[0][0]
    for file in (tmp_path / "out" / "checkpoint-2" / "shardwise").iterdir():
        file.unlink()
    error = run_ranks(_train, 2, tmp_path, "ours", {"max_steps": 4}, "out/checkpoint-2")[0][1]
    assert "resuming from step 2" in error
    assert "found no checkpoint" in error


@pytest.mark.parametrize("runtime", ["ours", pytest.param("torch's", marks=pytest.mark.long)])
def test_resumes_from_the_checkpoint_that_was_asked_for(runtime: str, tmp_path: Path) -> None:
    """``output_dir`` has one of the same step, of another run."""
    save_llama(tmp_path / "model", vocab_size=64)
    losses, _ = run_ranks(_train, 2, tmp_path, runtime, {}, None)[0]
    other = {"output_dir": str(tmp_path / "other")}
    assert run_ranks(_train, 2, tmp_path, runtime, {**other, "learning_rate": 0.1}, None)[0][0]
    found, error = run_ranks(_train, 2, tmp_path, runtime, other, "out/checkpoint-4")[0]
    assert not error
    assert found == losses
    (tmp_path / "out").rename(tmp_path / "moved")
    found, error = run_ranks(_train, 2, tmp_path, runtime, other, "moved/checkpoint-4")[0]
    assert "is of another run" in error
    moved = {"output_dir": str(tmp_path / "moved")}
    assert run_ranks(_train, 2, tmp_path, runtime, moved, "moved/checkpoint-4")[0] == (losses, "")


def _is_alone(rank: int, world_size: int, folder: Path) -> None:
    first = {"max_steps": 2}
    losses, error = _train(rank, 1, folder, ALONE, {}, None)
    assert not error
    restored = {"restore_callback_states_from_checkpoint": True}
    assert _train(rank, 1, folder, ALONE, restored, "out/checkpoint-4") == (losses, "")
    shutil.copytree(folder / "out" / "checkpoint-2", folder / "safe" / "checkpoint-2")
    assert not _train(rank, 1, folder, ALONE, {**first, "learning_rate": 0.1}, None)[1]
    error = _train(rank, 1, folder, ALONE, {}, "safe/checkpoint-2")[1]
    assert "is of another run than the trainer's own files" in error
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainerCheckpoints, "on_save", lambda *_, **__: None)  # as if killed there
        assert not _train(rank, 1, folder, ALONE, first, None)[1]
    error = _train(rank, 1, folder, ALONE, {}, "out/checkpoint-2")[1]
    assert "is of another run than the trainer's own files" in error


def test_shards_of_another_run_are_refused(tmp_path: Path) -> None:
    """A copy whose run was trained anew, and a save that was interrupted; on one rank."""
    save_llama(tmp_path / "model", vocab_size=64)
    run_ranks(_is_alone, 1, tmp_path)


def _ends_with_the_best(rank: int, world_size: int, folder: Path, runtime: str) -> None:
    model: Any = shardwise.from_pretrained(folder / "model", shard=RUNTIMES[runtime]).train()
    tokens = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(0))
    data: Any = [{"input_ids": t, "labels": t} for t in tokens]
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "best"),
        "use_cpu": True,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "save_only_model": True,
        "load_best_model_at_end": True,
        "greater_is_better": True,  # by the loss: the first
        "report_to": "none",
        "disable_tqdm": True,
    }
    with contextlib.redirect_stdout(None):
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**arguments),
            train_dataset=data,
            eval_dataset=data,
            callbacks=[TrainerCheckpoints()],
        )
        trainer.train()
    best = load_file(folder / "best" / "checkpoint-2" / "model.safetensors")
    assert trainer.state.best_model_checkpoint == str(folder / "best" / "checkpoint-2")
    found = {name: each.full_tensor() for name, each in model.named_parameters()}
    assert all(torch.equal(best[name], each) for name, each in found.items())
    model.load_state_dict({name: torch.full_like(each, 7) for name, each in found.items()})
    assert all((each.full_tensor() == 7).all() for each in model.parameters())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_best_model_is_loaded_at_the_end(runtime: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "model", vocab_size=64)
    run_ranks(_ends_with_the_best, 2, tmp_path, runtime)
