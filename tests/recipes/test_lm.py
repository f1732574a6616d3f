"""A language model trained over ranks: any strategy, any world, stopped and resumed.

The ranks come from the harness, so that no test waits for torch and transformers to be imported;
the command line itself is tested in tests/cli.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import resource
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.app.recipes import lm
from shardwise.app.recipes.core.checkpointing import Checkpoints
from shardwise.app.recipes.core.loop import Loop
from shardwise.app.recipes.core.model import Sampling, build, generate_tokens
from shardwise.app.recipes.core.position import Position
from shardwise.app.recipes.core.training import begin_and_train, build_run, place_for
from shardwise.app.recipes.text import batches
from shardwise.app.recipes.text.config import LmConfig
from shardwise.app.recipes.text.data import Sequences
from shardwise.base import devices
from shardwise.base.scratch import file as scratch_file
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.ranks.saving import Saving
from shardwise.elastic.rank import StopSignals
from shardwise.elastic.world import World
from shardwise.frontends.strategies import Strategy
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.sharding import PrecisionName, Stepping
from shardwise.insight.schema.training import Existing, Logits, ScheduleName
from shardwise.runs.metrics_file import read_metrics
from tests.recipes.corpora import texts, write_jsonl, write_tokenizer
from tests.recipes.running import as_after, train, train_here, train_one, warning_in
from tests.recipes.small import MODEL, losses, small_config, validation, write_model
from tests.waiting import wait_until
from tests.worlds import Ranks


def train_until(
    rank: int, world_size: int, config: LmConfig, step: int, signum: int, on: int
) -> str:
    """Train, and send one rank a signal while a step is under way."""
    batch = Sequences.batch

    def signalling(self: Sequences, position: int, count: int) -> torch.Tensor:
        if rank == on and position // config.train.examples_per_step(world_size) == step - 1:
            os.kill(os.getpid(), signum)
        return batch(self, position, count)

    Sequences.batch = signalling  # type: ignore[method-assign]
    return train_one(rank, world_size, config)


# -- strategies and worlds -------------------------------------------------------------------------


def test_steps_in_backward_learn_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """Clipping by the norm of the step before would give other numbers."""
    configs = [
        small_config(
            tmp_path, when.value, stepping=when, strategy=Strategy.SHARD_GRAD_OP,
            clip_grad=0.0, accumulate=2, steps=3,
        )
        for when in Stepping
    ]  # fmt: skip
    ranks(train, 2, *configs)
    after, inside = map(losses, configs)
    assert [loss for _, loss, _ in inside] == [loss for _, loss, _ in after]
    for found, expected in zip(inside, after, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)  # the norm adds up group by group


def test_logits_in_chunks_learn_the_same(ranks: Ranks, tmp_path: Path) -> None:
    model = str(write_model(tmp_path, attention_dropout=0.0, tie_word_embeddings=True))

    def config(logits: Logits) -> LmConfig:
        return small_config(tmp_path, logits.value, model=model, accumulate=2, logits=logits)

    whole, chunks = map(config, (Logits.WHOLE, Logits.CHUNKS))
    ranks(train, 2, whole, chunks)
    for found, expected in zip(losses(chunks), losses(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert validation(chunks) == [(4, pytest.approx(validation(whole)[0][1], rel=1e-5))]


def test_the_world_and_the_mesh_do_not_change_what_is_learned(ranks: Ranks, tmp_path: Path) -> None:
    # 8 sequences a step, however they are dealt out.
    model = str(write_model(tmp_path, attention_dropout=0.0))

    def config(name: str, **settings: Any) -> LmConfig:
        return small_config(tmp_path, name, model=model, steps=2, **settings)

    one = config("one", batch_size=4, accumulate=2)
    four = [  # tests of runs that go on over another world shard over four ranks, and over one
        config("hybrid", batch_size=1, accumulate=2, strategy=Strategy.HYBRID_SHARD, replicas=2),
        config("hybrid-zero2", batch_size=2, strategy=Strategy.HYBRID_SHARD_ZERO2, replicas=2),
    ]
    ranks(train, 1, one)
    ranks(train, 4, *four)
    for each in four:
        for found, expected in zip(losses(each), losses(one), strict=True):
            assert found == pytest.approx(expected, rel=1e-5), each.train.output.out.name


def test_bf16_learns_nearly_the_same_and_all_in_bf16_is_saved_and_resumed_in_bf16(
    ranks: Ranks, tmp_path: Path
) -> None:
    model = str(write_model(tmp_path, attention_dropout=0.0))
    settings: dict[str, Any] = {"model": model, "shard_dtype": PrecisionName.BF16, "steps": 3}
    fp32 = small_config(tmp_path, "fp32", model=model, steps=3)
    bf16 = small_config(tmp_path, "bf16", model=model, steps=3, param_dtype=PrecisionName.BF16)
    whole = small_config(tmp_path, "whole", checkpoint_every=2, **settings)
    ranks(train, 2, fp32, bf16, whole)
    for config, rel in ((bf16, 2e-2), (whole, 3e-2)):
        for found, expected in zip(losses(config), losses(fp32), strict=True):
            assert found[1] == pytest.approx(expected[1], rel=rel)
        assert losses(config) != losses(fp32)
    manifest = read_manifest(Checkpoints(whole.files.checkpoints).path(3))
    kept = {each.dtype for each in manifest.tensors if each.shape}
    assert kept == {"BF16", "U8"}, "U8: the states of random generators"
    assert json.loads(whole.files.model_config.read_text())["dtype"] == "bfloat16"
    again = small_config(tmp_path, "again", existing=Existing.RESUME, **settings)
    as_after(2, whole, again)
    ranks(train, 2, again)
    assert losses(again) == losses(whole)


def _train_offloaded(rank: int, world_size: int, *configs: LmConfig) -> list[str]:
    scratch_file.SMALLEST = 1  # keep everything elsewhere
    return train(rank, world_size, *configs)


def test_states_on_a_disk_change_nothing_and_a_run_may_be_resumed_with_them_in_memory(
    ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    disk: dict[str, Any] = {"offload": f"disk:{tmp_path / 'scratch'}"}
    inside = {"stepping": Stepping.IN_BACKWARD, "steps": 2}
    bf16 = {"shard_dtype": PrecisionName.BF16, "master_dtype": PrecisionName.FP32, "steps": 2}
    memory = small_config(tmp_path, "memory", **inside)
    whole = small_config(
        tmp_path, "whole", checkpoint_every=1, async_checkpoint=True, **inside, **disk
    )
    everything = {**disk, "offload_parameters": disk["offload"]}
    masters = small_config(tmp_path, "masters", checkpoint_every=1, **bf16, **everything)
    same = small_config(tmp_path, "same", offload="host", **bf16)
    ranks(_train_offloaded, 2, memory, whole, masters, same)
    assert losses(whole) == losses(memory)
    assert losses(masters) == losses(same)
    assert list((tmp_path / "scratch").iterdir()) == []
    again = []
    for run, settings in ((whole, inside), (masters, {**bf16, **everything})):
        name = f"{run.train.output.out.name}-again"
        config = small_config(tmp_path, name, existing=Existing.RESUME, **settings)
        as_after(1, run, config)
        again.append(config)
    ranks(_train_offloaded, 2, *again)
    assert losses(again[0]) == losses(whole)
    assert losses(again[1]) == losses(masters)


def test_the_loss_falls(ranks: Ranks, tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=30, lr=4e-2, batch_size=4, eval_every=10)
    ranks(train, 2, config)
    by_step = [loss for _, loss, _ in losses(config)]
    assert by_step[0] == pytest.approx(5.6, abs=0.3), "an untrained model guesses evenly"
    assert by_step[-1] < 3.2
    assert [step for step, _ in validation(config)] == [10, 20, 30]
    assert validation(config)[-1][1] < 3.2


# -- stopping and resuming -------------------------------------------------------------------------


def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_been(
    ranks: Ranks, tmp_path: Path
) -> None:
    whole = small_config(tmp_path, "whole", steps=4, checkpoint_every=0, accumulate=2)
    ranks(train, 2, whole)
    stopped = small_config(
        tmp_path, "stopped", steps=4, checkpoint_every=1, accumulate=2, async_checkpoint=True
    )
    # Only one rank hears the signal; all stop after the same step.
    told = ranks(train_until, 2, stopped, 2, signal.SIGTERM, 1)
    assert told[0] == told[1]
    assert "Stopped by SIGTERM after step 2 of 4, which is saved" in told[0]
    assert "--resume" in told[0]
    resumed = small_config(
        tmp_path, "stopped", steps=4, checkpoint_every=0, accumulate=2, existing=Existing.RESUME
    )
    assert ranks(train, 2, resumed) == [["finished"], ["finished"]]
    assert losses(resumed) == losses(whole)
    assert validation(resumed) == validation(whole)
    sessions = resumed.files.read()["sessions"]
    assert [(s["status"], s["from_step"]) for s in sessions] == [("stopped", 0), ("finished", 2)]


def test_a_run_that_was_killed_drops_what_came_after_its_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"steps": 4, "checkpoint_every": 1, "async_checkpoint": True}
    config = small_config(tmp_path, **settings)
    outcomes = ranks(train_until, 2, config, 3, signal.SIGKILL, 0, expect_failures=True, timeout=30)
    assert outcomes[0].exitcode == -signal.SIGKILL
    assert losses(config)[-1][0] == 2
    last = Checkpoints(config.files.checkpoints).steps()[-1]
    assert last in (1, 2), "of step 2 it was being saved; that of step 1 is whole"
    again = small_config(tmp_path, existing=Existing.RESUME, **settings)
    ranks(train, 2, again)
    assert again.files.read()["sessions"][-1]["from_step"] == last
    assert [step for step, _, _ in losses(again)] == [1, 2, 3, 4]


def _train_beside_a_gpu(rank: int, world_size: int, config: LmConfig) -> str:
    with (
        mock.patch.object(devices, "count", return_value=1),
        mock.patch.object(devices, "default_type", return_value="cuda"),
    ):
        return train_one(rank, world_size, config)


def test_ranks_on_cpus_name_the_accelerators_that_they_leave_idle(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks(_train_beside_a_gpu, 2, small_config(tmp_path, steps=1))
    assert warning_in(capfd) == (
        "warning    2 ranks on this host train on CPUs, as it has 1 cuda device; "
        "--nproc 1 trains there"
    )


def test_a_complete_run_without_its_results_goes_on_to_make_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(train, 1, small_config(tmp_path, steps=2, sample_tokens=5))
    again = small_config(tmp_path, steps=2, sample_tokens=5, existing=Existing.RESUME)
    out = again.train.output.out
    record = out / "run.json"  # as if it had been killed after its last checkpoint
    text = record.read_text()
    assert '"finished"' in text
    record.write_text(text.replace('"finished"', '"running"'))
    (out / "sample.txt").unlink()
    (out / "report.html").unlink()

    assert ranks(train, 1, again) == [["finished"]]
    assert (out / "sample.txt").exists()
    assert (out / "report.html").exists()
    assert [step for step, _, _ in losses(again)] == [1, 2], "no step was made again"


def test_a_run_goes_on_over_another_world_with_the_same_data(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Over fewer ranks; streamed documents go on over more, below."""
    # 4 sequences a step, however they are dealt out.
    model = str(write_model(tmp_path, attention_dropout=0.0))

    def config(name: str, **settings: Any) -> LmConfig:
        given = {"model": model, "steps": 4, "checkpoint_every": 2, **settings}
        return small_config(tmp_path, name, **given)

    whole = config("whole", async_checkpoint=True)
    ranks(train, 2, whole)
    resumed = config("resumed", batch_size=4, existing=Existing.RESUME)
    as_after(2, whole, resumed)
    capfd.readouterr()
    ranks(train, 1, resumed)
    said = capfd.readouterr().out
    assert "examples from here on" not in said, "a step has as many examples as before"
    assert [s["from_step"] for s in resumed.files.read()["sessions"]] == [0, 2]
    for mine, expected in zip(losses(resumed), losses(whole), strict=True):
        assert mine == pytest.approx(expected, rel=1e-5)
    found = Checkpoints(resumed.files.checkpoints)
    assert found.position(4).examples == 4 * 4, "the position in the data went on"
    ranks(train, 1, config("resumed", steps=5, batch_size=2, existing=Existing.RESUME))
    said = "warning    a step has 2 examples from here on, and had 4 before"
    assert warning_in(capfd).startswith(said)


def test_streamed_documents_go_on_exactly_over_another_world(ranks: Ranks, tmp_path: Path) -> None:
    model = str(write_model(tmp_path, attention_dropout=0.0))
    write_jsonl(tmp_path / "corpus.jsonl.zst", texts(300))
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))

    def config(name: str, **settings: Any) -> LmConfig:
        small = small_config(
            tmp_path, name, model=model, steps=4, checkpoint_every=2, sample_tokens=4, **settings
        )
        return dataclasses.replace(
            small,
            data=(str(tmp_path / "corpus.jsonl.zst"),),
            tokenizer=tokenizer,
            batch_tokens=4 * 16,
            peak_flops=1e12,
        )

    whole = config("whole")
    ranks(train, 1, whole)
    assert whole.files.read()["data"]["tokenizer"] == tokenizer
    for record in read_metrics(whole.files.metrics):
        if "loss" in record:
            assert 0 < record["mfu"] < 1
    # A step has 4 sequences: 4 of one rank, or 2 of each. Fewer ranks: tests/recipes/test_hub.py.
    resumed = config("resumed", existing=Existing.RESUME)
    as_after(2, whole, resumed)
    ranks(train, 2, resumed)
    sessions = resumed.files.read()["sessions"]
    assert [(s["from_step"], s["examples_per_step"]) for s in sessions] == [(0, 4), (2, 4)]
    for mine, expected in zip(losses(resumed), losses(whole), strict=True):
        assert mine == pytest.approx(expected, rel=1e-5)


# -- checkpoints -----------------------------------------------------------------------------------


def train_with_losses(rank: int, world_size: int, config: LmConfig, told: dict[int, float]) -> str:
    """Train; evaluations find other losses than they would, by the number of steps before."""
    loss = batches.ValidationLoss.__call__

    def scripted(self: batches.ValidationLoss) -> dict[str, float]:
        loss(self)
        done = Loop.newest  # type: ignore[attr-defined]
        return {"validation_loss": told[done]}

    evaluate = Loop._evaluate

    def noting(self: Loop, position: Position) -> dict[str, float]:
        Loop.newest = position.step  # type: ignore[attr-defined]
        return evaluate(self, position)

    batches.ValidationLoss.__call__ = scripted  # type: ignore[method-assign]
    Loop._evaluate = noting  # type: ignore[method-assign]
    return train_one(rank, world_size, config)


@pytest.mark.parametrize("how", [pytest.param("sync", marks=pytest.mark.long), "async"])
def test_the_best_checkpoint_is_saved_and_kept(ranks: Ranks, tmp_path: Path, how: str) -> None:
    told = {1: 5.0, 2: 3.0, 3: 4.0, 4: math.nan, 5: 3.5, 6: 3.0, 7: 2.0, 8: 9.0, 9: 2.5}
    settings: dict[str, Any] = {
        "checkpoint_every": 4, "eval_every": 1, "keep_last": 1, "keep_best": True,
        "async_checkpoint": how == "async",
    }  # fmt: skip
    first = small_config(tmp_path, steps=6, **settings)
    assert ranks(train_with_losses, 2, first, told) == ["finished"] * 2
    assert Checkpoints(first.files.checkpoints).steps() == [2, 6]
    assert first.files.read()["best"] == {"step": 2, "validation_loss": 3.0}
    # What it goes on from is the last, not the best; what was best before still is.
    longer = small_config(tmp_path, steps=9, existing=Existing.RESUME, **settings)
    assert ranks(train_with_losses, 2, longer, {**told, 7: 3.0}) == ["finished"] * 2
    assert longer.files.read()["sessions"][-1]["from_step"] == 6
    assert Checkpoints(longer.files.checkpoints).steps() == [9], "the last step was the best"
    assert longer.files.read()["best"] == {"step": 9, "validation_loss": 2.5}


def train_while_saving(rank: int, world_size: int, config: LmConfig) -> list[tuple[int, int]]:
    """Train; a checkpoint of step 2 is written only when step 3 is made. The saves that ran.

    Returns:
        Of each, its step, and how many were under way.
    """
    write, under_way, seen = Saving.write, [0], list[tuple[int, int]]()

    def late(self: Saving) -> None:
        under_way[0] += 1
        seen.append((int(self.path.name.removeprefix("step-")), under_way[0]))
        if seen[-1][0] == 2:  # the training does not wait for its checkpoint
            wait_until(lambda: any(step == 3 for step, _, _ in losses(config)))
        write(self)
        under_way[0] -= 1

    Saving.write = late  # type: ignore[method-assign]
    assert train_one(rank, world_size, config) == "finished"
    return seen


def test_a_training_goes_on_while_one_checkpoint_is_written(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, steps=5, checkpoint_every=2, async_checkpoint=True)
    assert ranks(train_while_saving, 2, config) == [[(2, 1), (4, 1), (5, 1)]] * 2
    shown = capfd.readouterr().out.splitlines()
    found = Checkpoints(config.files.checkpoints)
    assert found.steps() == [4, 5]
    for step in (2, 4, 5):
        before = shown[: shown.index(f"checkpoint step={step} {found.path(step)}")]
        made = sum(line.startswith("step=") for line in before)
        assert made == 5 if step == 5 else made > step, shown


def test_every_other_step_is_printed_and_the_last_one_and_all_are_recorded(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, steps=5, log_every=2)
    assert ranks(train, 1, config) == [["finished"]]
    shown = capfd.readouterr().out.splitlines()
    printed = [line.split()[0] for line in shown if line.startswith("step=")]
    assert printed == ["step=2", "step=4", "step=5"]
    assert [step for step, _, _ in losses(config)] == [1, 2, 3, 4, 5]


def train_on_a_full_disk(rank: int, world_size: int, *configs: LmConfig) -> list[str]:
    """Train; while the second checkpoint is saved, files may not grow any more on one rank."""
    write = Saving.write

    def full(self: Saving) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.path.name == "step-00000002" and rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            write(self)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    Saving.write = full  # type: ignore[method-assign]
    told = [train_one(rank, world_size, config) for config in configs]
    Saving.write = write  # type: ignore[method-assign]
    return told


def full_disk_and_again(rank: int, world_size: int, *configs: LmConfig) -> list[str]:
    """Train until the disk is full, and go on when it is not any more."""
    told = train_on_a_full_disk(rank, world_size, *configs)
    if rank == 0:
        assert all(Checkpoints(config.files.checkpoints).steps() == [1] for config in configs)
    return told + [train_one(rank, world_size, _resumed(config)) for config in configs]


def _resumed(config: LmConfig) -> LmConfig:
    output = dataclasses.replace(config.train.output, existing=Existing.RESUME)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, output=output))


def test_a_full_disk_is_told_and_leaves_the_last_checkpoint_whole(
    ranks: Ranks, tmp_path: Path
) -> None:
    configs = [
        small_config(tmp_path, name, steps=3, checkpoint_every=1, async_checkpoint=name == "async")
        for name in ("sync", "async")
    ]
    for sync, in_background, *again in ranks(full_disk_and_again, 2, *configs):
        for told in (sync, in_background):
            assert "SaveError: checkpoint of step 2: saving" in told
            assert "rank 1:" in told
            assert "shard-00001-of-00002.safetensors: File too large" in told
            assert "step 1 is the last that is saved" in told
        assert again == ["finished", "finished"]
    for config in configs:
        left = list(config.files.checkpoints.glob(".*"))
        assert not left, "half a checkpoint was left behind"


def test_a_damaged_checkpoint_is_named_and_how_to_go_on(ranks: Ranks, tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=2, checkpoint_every=1)
    ranks(train, 2, config)
    again = small_config(tmp_path, steps=3, existing=Existing.AUTO)
    for step in (2, 1):
        folder = Checkpoints(config.files.checkpoints).path(step)
        shard = sorted(folder.glob("*.safetensors"))[1]
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        hint = f"move {folder} away, or delete it, to go on from step 1 (shardwise checkpoint "
        for outcome in ranks(train, 2, again, expect_failures=True):
            assert "UserError: --resume: " in outcome.error
            assert f"{shard}, " in outcome.error
            assert "is damaged" in outcome.error
            assert (f"{hint}verify " if step == 2 else "--overwrite starts over") in outcome.error
        shutil.rmtree(folder)


# -- refusals --------------------------------------------------------------------------------------


def train_as_another_host(rank: int, world_size: int, configs: list[LmConfig]) -> str:
    world = World(rank, world_size, 0, 1)
    with pytest.raises(OptionError) as raised:
        train_here(configs[rank].check(world), world)
    return str(raised.value)


def test_hosts_that_were_asked_for_something_else_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """All that they have to agree on, tests/recipes/test_begin.py shows."""
    first = small_config(tmp_path)
    told = ranks(train_as_another_host, 2, [first, small_config(tmp_path, lr=0.5)])
    assert told == ["--lr: found 0.5 on host 1, expected 0.01, as on host 0"] * 2
    assert not first.files.root.exists(), "nothing was written"


def test_a_diverging_run_ends_and_says_so(ranks: Ranks, tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=9, lr=1e30, checkpoint_every=1)
    [[told], _] = ranks(train, 2, config)
    assert told.startswith("DivergedError: step ")
    assert "expected finite numbers" in told
    assert "is saved; try a lower --lr" in told
    assert config.files.read()["sessions"][-1]["status"] == "failed"


def test_settings_that_transformers_refuses_are_named() -> None:
    for changes, message in (
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"num_attention_heads": 5}, "attention heads"),
        ({"model_type": "vit"}, "for this kind of AutoModel: AutoModelForCausalLM)"),
    ):
        refused = f"--model: found settings that transformers cannot use.*{re.escape(message)}"
        with pytest.raises(OptionError, match=f"(?s){refused}"):
            build({**MODEL, **changes}, 256, 0)


def test_other_models_of_transformers_train_too(ranks: Ranks, tmp_path: Path) -> None:
    # Tied embeddings; biases, and positions that are learned.
    others = {"qwen3": {"tie_word_embeddings": True, "head_dim": 8}, "gpt_neox": {}}
    configs = []
    for model_type, settings in others.items():
        (tmp_path / model_type).mkdir()
        path = write_model(tmp_path / model_type, model_type=model_type, **settings)
        configs.append(
            small_config(
                tmp_path, f"run-{model_type}", model=str(path), steps=8, lr=3e-2, sample_tokens=5
            )
        )
    assert ranks(train, 2, *configs) == [["finished"] * 2] * 2
    for config in configs:
        assert losses(config)[-1][1] < losses(config)[0][1] - 1, config.model


# -- the sample ------------------------------------------------------------------------------------


def draw(rank: int, world_size: int, config: LmConfig, variants: Sequence[Any]) -> list[Any]:
    """Sample from an untrained model in several ways."""
    world = World(rank, world_size, rank, world_size)
    place = place_for(config.train, world, torch.device("cpu"))
    task = lm.assemble(config.check(world), place)
    return [
        list(
            generate_tokens(
                task.module,
                [1, 2, 3],
                count,
                Sampling(temperature=temperature, seed=seed),
                vocab_size=256,
                window=window,
                device=place.device,
            )
        )
        for count, temperature, seed, window in variants
    ]


def test_a_sample_is_the_same_on_every_rank_and_as_long_as_asked(
    ranks: Ranks, tmp_path: Path
) -> None:
    variants = [
        (10, 1.0, 0, 64),
        (10, 1.0, 0, 64),
        (10, 1.0, 1, 64),
        (10, 0.0, 0, 64),
        (10, 0.0, 1, 64),
        (200, 1.0, 0, 64),
        (10, 1.0, 0, 2),
    ]
    first, second = ranks(draw, 2, small_config(tmp_path), variants)
    assert first == second
    again, same, other_seed, likeliest, likeliest_again, long, forgetful = first
    assert again == same != other_seed
    assert likeliest == likeliest_again
    assert long[:10] == again
    assert len(long) == 200, "longer than the model's 64 positions"
    assert all(0 <= token < 256 for token in long)
    assert len(forgetful) == 10


def _train_with_files(rank: int, world_size: int, *runs: tuple[LmConfig, str]) -> None:
    """Train as each configuration says, which a file of options repeats."""
    world = World(rank, world_size, rank, world_size)
    for config, options in runs:
        place = place_for(config.train, world, devices.CPU)
        run = build_run(config.check(world), lm.assemble, place, options)
        begin_and_train(run, None, StopSignals())


def test_what_a_run_goes_on_with_in_another_way_is_said_and_kept(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def config(**changes: Any) -> LmConfig:
        return small_config(tmp_path, existing=Existing.RESUME, **changes)

    first = small_config(tmp_path, steps=2)
    again = (config(steps=3, clip_grad=0.5), "b")
    ranks(_train_with_files, 1, (first, "a"), again, (config(steps=3, clip_grad=0.5), "b"))
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("change", "warning"))] == [
        "change     --steps: 2 before, 3 from here on",
        "change     --clip-grad: 1.0 before, 0.5 from here on",
        "warning    step 2 had a learning rate of 1.00e-03, and would have 5.50e-03 now: losses "
        "differ from those of a run with these options from the start",
    ]
    sessions = first.files.read()["sessions"]
    changes = {"--steps": [2, 3], "--clip-grad": [1.0, 0.5]}
    assert [session["changes"] for session in sessions] == [{}, changes, {}]
    assert first.files.options.read_text() == "b"
    [earlier] = first.files.earlier_options.iterdir()
    assert (earlier.name, earlier.read_text()) == ("session-1.yaml", "a")


def test_a_finished_run_trained_for_longer_is_one_that_was_always_to_be_longer(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where its learning rates do not depend on how long it is."""
    settings: dict[str, Any] = {"schedule": ScheduleName.CONSTANT, "warmup": 1}
    whole = small_config(tmp_path, "whole", steps=4, **settings)
    first = small_config(tmp_path, steps=2, **settings)
    rest = small_config(tmp_path, steps=4, existing=Existing.RESUME, **settings)
    ranks(_train_with_files, 1, (whole, ""), (first, ""), (rest, ""))
    assert losses(rest) == losses(whole)
    assert "warning" not in capfd.readouterr().out


def test_plain_text_has_epochs(ranks: Ranks, tmp_path: Path) -> None:
    """All sequences once, and the last step takes its first ones from the next epoch."""
    config = small_config(tmp_path, steps=None, epochs=1, seq_length=64, batch_size=32)
    inputs = config.check(World(0, 1, 0, 1))
    count = Sequences(inputs.text.train, 64, 0).per_epoch  # type: ignore[union-attr, arg-type]
    assert ranks(train, 1, config) == [["finished"]]
    assert len(losses(config)) == -(-count // 32)
