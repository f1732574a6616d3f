"""Words that users of other tools type are taken, or the option that is meant is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import typer

from shardwise.app.cli import main, run, train
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
            "train lm --nnodes 2 --rdzv-backend=c10d --rdzv-endpoint here:99",
            "--rdzv-backend; did you mean --rdzv HOST:PORT of host 0, or torchrun --rdzv-backend",
        ),
        (
            "train --nproc 2",
            "--nproc: found in front of the command, expected one of lm, mnist, imag",
        ),
        ("train my.py", "No such command 'my.py', expected one of lm, mnist, imagenet, vit"),
        ("--verson", "(Possible options: --version)"),
        ("plan llama-tiny --gpus 8", "No such option: --nproc; did you mean --mesh dp=N?"),
        *[
            (line.format("many"), "--nproc: found 'many', expected a whole number, gpu, cpu or")
            for line in (
                "train lm --gpus {}",
                "generate . --num_processes {}",
                "prove llama-tiny --nproc {}",
                "doctor --nproc {}",
                "launch-lines --hosts a --nproc {} -- train lm",
            )
        ],
        ("launch-lines --hosts a --nproc 0 -- train lm", "--nproc: found 0, expected 1 or more"),
        ("train lm --tensorboard", "No such option: --tensorboard; did you mean --log tensorboar"),
        (
            "train lm --nnodes 2 --node-rank 1 --rdzv a:1 --resume --out gone",
            "--resume: found no run in gone, expected a run; see --out",
        ),
        ("train lm --nnodes 2 --node-rank 0", "--rdzv: found nothing, expected HOST:PORT"),
        ("train lm --mesh dp=1,tp=2 --nproc 2", "--mesh: found dp=1,tp=2, expected dimensions of"),
        ("train lm --steps", "Option '--steps' requires an argument."),
    ],
)
def test_what_is_meant_is_named(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert message in shell.refused(capsys, *line.split())


def test_each_host_counts_its_own_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("launch-lines", "--hosts", "a", "--nproc", "gpu", "--", "train", "lm") == 0
    assert "shardwise train lm --nproc gpu\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        '{"messages": [{"role": "user", "content": "a"}]}\n{"mess',
        '\n[ {"instruction": "a", "output": "b"}]',
        '\ufeff{"id": 1, "conversations": []}\n',
        '{"prompt": "a", "completion": "b"}\n',
    ],
)
@pytest.mark.parametrize("more", ["", "--tokenizer gpt2"])
def test_chats_that_are_given_as_text_are_refused_at_once(
    capsys: pytest.CaptureFixture[str], content: str, more: str
) -> None:
    Path("chats.jsonl").write_text(content)
    expected = "--data: found chats.jsonl, which has chats, expected --chat in place of --data\n"
    assert expected in shell.refused(capsys, "train", "lm", "chats.jsonl", *more.split())
    Path("a.jsonl").write_text('{"text": "a", "prompt": "b"}')
    Path("chats.json").write_text(content)
    assert "--data: found chats.json, which" in shell.refused(capsys, "train", "lm", "chats.json")
    held = shell.refused(capsys, "train", "lm", "a.jsonl", "--eval-data", "chats.jsonl")
    assert "--eval-data: found chats.jsonl, which has chats" in held


@pytest.mark.parametrize(
    ("file", "more", "package"),
    [
        ("notes.txt", "--tokenizer none", None),
        ("notes.md", "", None),
        ("a.jsonl", "", "datasets"),
        ("notes.txt.zst", "--tokenizer none", "zstandard"),
        ("hf:a/b", "", "datasets"),
    ],
)
def test_plain_text_needs_no_package(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    more: str,
    package: str | None,
) -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text('{"text": "a"}\n' * 500)
    find, missing = importlib.util.find_spec, ("datasets", "zstandard")
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n in missing else find(n))
    monkeypatch.setattr(run, "run_job", lambda *_: 0)
    line = f"train lm --data {file} {more}"
    if package is None:
        assert call(*line.split()) == 0
    else:
        said = shell.refused(capsys, *line.split())
        assert f"--data {file} needs {package}, not installed here: " in said
        assert said.endswith(f" install {package}\n")
