"""Words that users of other tools type are taken, or the option that is meant is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from shardwise.app.cli import main, train
from shardwise.app.cli.run import LaunchConfig
from shardwise.frontends.strategies import Checkpointing, Strategy
from shardwise.insight.schema.words import ALIASES, FORMS, own_option
from tests.cli import shell
from tests.cli.shell import call

pytestmark = pytest.mark.usefixtures("no_world")


def options_of(command: Any) -> set[str]:
    inner = getattr(command, "commands", {}).values()
    own = {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)}
    return own.union(*map(options_of, inner))


def test_an_alias_stands_for_an_option_and_is_none() -> None:
    known = options_of(typer.main.get_command(main.commands([])))
    assert {f"--{ours}" for ours in ALIASES.values()} <= known
    assert not {f"--{alias}" for alias in ALIASES} & known
    assert all(own_option(name) == name for name in (form[2:] for form in FORMS))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    jobs: list[Any] = []
    monkeypatch.setattr(train, "run", lambda job, launch: jobs.append((job.config, launch)))
    return jobs


def test_words_of_other_tools_are_taken(started: list[Any]) -> None:
    Path("more.yaml").write_text("max_grad_norm: 3\nwarmup_steps: 5\n")
    line = (
        "--nproc_per_node=3 --learning_rate 0.5 --gradient-accumulation-steps 2 --output-dir o "
        "--per-device-train-batch-size 7 --num_train_epochs 4 --sharding-strategy zero3 "
        "--param_dtype bfloat16 --shard-dtype float32 --activation-checkpointing selective "
        "--config more.yaml notes.txt more.txt"
    )
    assert call("train", "lm", *line.split()) == 0
    [(config, launch)] = started
    step, sharding = config.train, config.train.sharding
    assert launch == LaunchConfig(nproc=3)
    assert (step.optimizer.lr, step.accumulate, step.batch_size, step.epochs) == (0.5, 2, 7, 4)
    assert (step.output.out, config.data) == (Path("o"), ("notes.txt", "more.txt"))
    assert (sharding.param_dtype, sharding.shard_dtype) == ("bf16", "fp32")
    assert sharding.strategy is Strategy.FULL_SHARD
    assert sharding.activation_checkpointing is Checkpointing.SELECTIVE
    assert (step.optimizer.clip_grad, step.optimizer.warmup) == (3.0, 5)


@pytest.mark.parametrize(("name", "count"), [("cpu", 5), ("auto", 5)])
def test_processes_may_be_as_many_as_the_host_has(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], name: str, count: int
) -> None:
    from shardwise.base import devices
    from shardwise.insight.schema import training

    monkeypatch.setattr(training, "usable_cores", lambda: count)
    monkeypatch.setattr(devices, "count", lambda: 0)
    assert call("train", "lm", "--gpus", name) == 0
    assert started[0][1] == LaunchConfig(nproc=count)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "train lm --selective-checkpointing",
            "did you mean --activation-checkpointing selective?",
        ),
        ("train lm --load_in_4bit", "--load-in-4bit; did you mean --base nf4?"),
        (
            "train --nproc 2",
            "--nproc: found in front of the command, expected one of lm, mnist, imag",
        ),
        ("train my.py", "No such command 'my.py', expected one of lm, mnist, imagenet, vit"),
        ("--verson", "(Possible options: --version)"),
        ("plan llama-tiny --gpus 8", "No such option: --nproc; did you mean --mesh dp=N?"),
        ("plan llama-tiny --mesh dp=0", "--mesh: found 'dp=0', expected dp=N, N a number from 1"),
        ("train lm --nproc many", "--nproc: found 'many', expected a whole number, gpu, cpu or"),
        ("train lm --strategy zero4", "--strategy: found 'zero4', expected one of full"),
        ("train lm --nnodes 2 --node-rank 0", "--rdzv: found nothing, expected HOST:PORT"),
        ("train lm --mesh dp=1,tp=2 --nproc 2", "--mesh: found dp=1,tp=2, expected dimensions of"),
        ("train lm --steps", "Option '--steps' requires an argument."),
    ],
)
def test_what_is_meant_is_named(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert message in shell.refused(capsys, *line.split())
