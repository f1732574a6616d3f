"""Bad options are told at once, each in one line that says what was found and expected."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwise import checkpoint
from shardwise.app.recipes.core.begin import check_folder, decided
from shardwise.app.recipes.core.position import Position
from shardwise.app.recipes.core.rundir import REPLICAS, RunDir
from shardwise.app.recipes.text.config import (
    LmConfig,
)
from shardwise.base.errors import UserError
from shardwise.checkpoint.disk.commit import partial_of, step_folder
from shardwise.elastic.world import World
from shardwise.frontends.strategies import Strategy
from shardwise.insight.planning.presets import LLAMAS, longest_sequence
from shardwise.insight.schema.option import OptionError, as_json, flatten
from shardwise.insight.schema.sharding import ShardingConfig, resolve_sharding
from shardwise.insight.schema.training import (
    Existing,
    OptimizerConfig,
    OutputConfig,
    ScheduleName,
    TrainConfig,
    check_nproc,
)
from tests.checkpoint.small import make
from tests.recipes.small import small_config


def config(**changes: Any) -> TrainConfig:
    """A good configuration but for the changes, each given by its innermost name."""
    parts: dict[str, Any] = {
        "optimizer": OptimizerConfig(lr=1e-3),
        "output": OutputConfig(out=Path("out")),
        "sharding": ShardingConfig(),
    }
    own = {
        name: changes.pop(name)
        for name in ("steps", "batch_size", "accumulate", "seed")
        if name in changes
    }
    for part, value in parts.items():
        mine = {
            n: v for n, v in changes.items() if n in {f.name for f in dataclasses.fields(value)}
        }
        parts[part] = dataclasses.replace(value, **mine)
    return TrainConfig(**{"steps": 10, "batch_size": 2, **own, **parts})


def test_a_good_configuration_passes() -> None:
    config().check_values()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps: found 0, expected 1 or more"),
        ({"batch_size": 0}, "--batch-size: found 0, expected 1 or more"),
        ({"accumulate": -1}, "--accumulate: found -1, expected 1 or more"),
        ({"seed": -1}, r"--seed: found -1, expected 0 to 9,223,372,036,854,775,807"),
        ({"lr": 0.0}, "--lr: found 0.0, expected a number above 0"),
        ({"lr": float("nan")}, "--lr: found nan"),
        ({"lr": float("inf")}, "--lr: found inf"),
        ({"beta1": 1.0}, "--beta1: found 1.0, expected 0 to 1, without 1"),
        ({"beta2": -0.1}, "--beta2: found -0.1"),
        ({"weight_decay": -1.0}, "--weight-decay: found -1.0"),
        ({"clip_grad": -1.0}, "--clip-grad: found -1.0"),
        ({"warmup": -1}, "--warmup: found -1"),
        ({"decay_steps": 0}, "--decay-steps: found 0, expected 1 or more"),
        ({"min_lr": 2e-3}, r"--min-lr: found 0.002, expected 0 to 0.001, the peak of --lr"),
        ({"min_lr": float("nan")}, "--min-lr: found nan"),
        (
            {"schedule": ScheduleName.CONSTANT, "min_lr": 0.0},
            "--min-lr: found 0.0, expected none with --schedule constant",
        ),
        ({"checkpoint_every": -1}, "--checkpoint-every: found -1"),
        ({"keep_last": 0}, "--keep-last: found 0, expected 1 or more"),
        ({"eval_every": -1}, "--eval-every: found -1"),
        ({"mesh": "dp_shard=2", "replicas": 2}, "--mesh: found --replicas too"),
    ],
)
def test_bad_options_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        config(**changes).check_values()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("sharding", "world_size", "shape"),
    [
        (ShardingConfig(), 2, (2,)),
        (ShardingConfig(mesh="dp_shard=4"), 4, (4,)),
        (ShardingConfig(strategy=Strategy.NO_SHARD), 3, (3, 1)),
        (ShardingConfig(strategy=Strategy.NO_SHARD, mesh="dp_replicate=3"), 3, (3, 1)),
        (ShardingConfig(strategy=Strategy.HYBRID_SHARD, replicas=2), 4, (2, 2)),
        (
            ShardingConfig(strategy=Strategy.HYBRID_SHARD, mesh="dp_replicate=2,dp_shard=3"),
            6,
            (2, 3),
        ),
    ],
)
def test_a_strategy_becomes_a_mesh(
    sharding: ShardingConfig, world_size: int, shape: tuple[int, ...]
) -> None:
    assert resolve_sharding(sharding, world_size).shape == shape


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (
            ShardingConfig(mesh="dp_shard=2"),
            "--mesh: found dp_shard=2, a mesh of 2 ranks, expected one of 4",
        ),
        (
            ShardingConfig(mesh="tp=4"),
            "--mesh: found tp=4, expected dimensions of data parallelism",
        ),
        (
            ShardingConfig(mesh="dp_replicate=2,dp_shard=2"),
            "--mesh: found 2 with strategy full, expected 1, or none given or a hybrid strategy",
        ),
        (ShardingConfig(strategy=Strategy.HYBRID_SHARD), "--strategy: .* say --replicas R"),
        (
            ShardingConfig(strategy=Strategy.HYBRID_SHARD, replicas=3),
            "--replicas: found 3, expected a number that divides the 4 ranks",
        ),
        (ShardingConfig(replicas=2), "--replicas: found 2 with strategy full"),
    ],
)
def test_a_mesh_that_does_not_fit_the_world_is_named(
    sharding: ShardingConfig, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        resolve_sharding(sharding, 4)


@pytest.mark.parametrize(
    ("asked", "strategy", "hosts", "expected"),
    [
        (None, Strategy.FULL_SHARD, 2, True),
        ("host", Strategy.FULL_SHARD, 2, 4),
        ("2", Strategy.FULL_SHARD, 1, 2),
        ("host", Strategy.FULL_SHARD, 1, True),  # all ranks share it
        ("host", Strategy.HYBRID_SHARD, 2, True),
        ("2", Strategy.HYBRID_SHARD, 2, 2),
    ],
)
def test_backward_gathers_from_a_host_or_a_number_of_ranks(
    asked: str | None, strategy: Strategy, hosts: int, expected: bool | int
) -> None:
    sharding = ShardingConfig(strategy=strategy, reshard_after_forward=asked)
    found = resolve_sharding(sharding, 8, hosts).reshard_after_forward
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("asked", "strategy", "hosts", "message"),
    [
        ("3", Strategy.FULL_SHARD, 2, "found 3, expected host or a number from 2 that divides"),
        ("1", Strategy.FULL_SHARD, 2, "the 8 ranks that share parameters"),
        ("many", Strategy.FULL_SHARD, 2, "found many, expected host or a number"),
        ("host", Strategy.FULL_SHARD, 8, "found host, 1 of 8 ranks, expected"),
        ("host", Strategy.SHARD_GRAD_OP, 2, "host with a strategy that keeps full parameters"),
    ],
)
def test_ranks_that_cannot_keep_parameters_are_named(
    asked: str, strategy: Strategy, hosts: int, message: str
) -> None:
    sharding = ShardingConfig(strategy=strategy, reshard_after_forward=asked)
    with pytest.raises(OptionError, match=f"--reshard-after-forward: .*{message}"):
        resolve_sharding(sharding, 8, hosts)


def test_nproc_defaults_to_one_process_or_to_the_world_that_is_there() -> None:
    assert check_nproc(None, None) == 1
    assert check_nproc(3, None) == 3
    assert check_nproc(None, World(0, 4, 0, 2)) == 2
    assert check_nproc(2, World(0, 4, 0, 2)) == 2


def test_nproc_must_not_contradict_the_world() -> None:
    with pytest.raises(OptionError, match="--nproc: found 4, expected 2 or none given"):
        check_nproc(4, World(0, 4, 0, 2))
    with pytest.raises(OptionError, match="--nproc: found 0, expected 1 or more"):
        check_nproc(0, None)


def test_a_configuration_becomes_plain_json() -> None:
    values = as_json(config(param_dtype=ShardingConfig().param_dtype))
    assert json.loads(json.dumps(values)) == values
    assert values["sharding"]["strategy"] == "full"
    assert flatten(values)["lr"] == 1e-3


# -- models ----------------------------------------------------------------------------------------


def test_presets_have_the_size_in_their_name() -> None:
    # Without the vocabulary: attention and feed-forward of every layer.
    def millions(name: str) -> float:
        p = LLAMAS[name]
        hidden = p["hidden_size"]
        block = 4 * hidden**2 + 3 * hidden * p["intermediate_size"]
        return float(p["num_hidden_layers"] * block / 1e6)

    assert millions("llama-34m") == pytest.approx(34, abs=1)
    assert millions("llama-150m") == pytest.approx(150, abs=1)


def test_a_config_file_or_its_folder_is_a_model(tmp_path: Path) -> None:
    settings = {"model_type": "gpt2", "n_positions": 77}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for model in (tmp_path, tmp_path / "config.json"):
        assert LmConfig.for_model(str(model)).settings() == settings
    assert longest_sequence(settings) == 77
    assert LmConfig.for_model(str(tmp_path)).seq_length == 256


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    """What a file may say, tests/planning/test_models.py shows."""
    file = tmp_path / "config.json"
    names = "llama-tiny, llama-34m, llama-150m"
    with pytest.raises(OptionError, match=f"--model: .* {names}, or the path of a config.json"):
        LmConfig.for_model(str(file)).settings()
    file.write_text("{")
    with pytest.raises(OptionError, match=r"--model: found .*no JSON"):
        LmConfig.for_model(str(file)).settings()


def test_a_near_miss_is_corrected() -> None:
    with pytest.raises(OptionError, match="did you mean llama-tiny"):
        LmConfig.for_model("lama-tiny").settings()


def test_a_job_that_is_started_again_goes_on_where_there_is_something_to_go_on_from(
    tmp_path: Path,
) -> None:
    output = OutputConfig(out=tmp_path / "run", existing=Existing.AUTO)
    checkpoints = RunDir(output.out).checkpoints
    assert decided(output).existing is Existing.REFUSE, "nothing is there"
    output.out.mkdir()
    (output.out / "run.json").write_text("{}")
    assert decided(output).existing is Existing.OVERWRITE, "no checkpoint: none is lost"
    partial_of(step_folder(checkpoints, 4)).mkdir(parents=True)
    step_folder(checkpoints / REPLICAS / "1", 4).mkdir(parents=True)
    assert decided(output).existing is Existing.OVERWRITE, "killed in its very first save"
    step_folder(checkpoints, 4).mkdir()  # damaged
    assert decided(output).existing is Existing.RESUME, "what is there is never deleted"


def test_what_is_to_be_done_about_a_run_is_decided_only_where_it_was_left_open(
    tmp_path: Path,
) -> None:
    for existing in (Existing.REFUSE, Existing.RESUME, Existing.OVERWRITE):
        output = OutputConfig(out=tmp_path, existing=existing)
        assert decided(output) is output


def test_a_run_with_damaged_metrics_is_refused_before_anything_starts(tmp_path: Path) -> None:
    inputs = small_config(tmp_path, existing=Existing.RESUME).check(World(0, 1, 0, 1))
    files = inputs.config.files
    files.root.mkdir()
    files.write({"recipe": "lm", **inputs.facts()})
    extra: Mapping[str, Any] = {"position": {"step": 2, "examples": 8}}
    checkpoint.save(checkpoint.step_folder(files.checkpoints, 2), *make(), extra)
    files.metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert check_folder(inputs) == Position(2, 8)
    files.metrics.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2: is not valid JSON"):
        check_folder(inputs)
