"""Options in a file: what it may say, where its mistakes are, and that it repeats a run."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.cli import main, run, train
from shardwise.app.cli.config_file import read_options
from shardwise.app.cli.options import Options
from shardwise.app.cli.run import LaunchConfig
from shardwise.app.recipes import rank
from shardwise.app.recipes.core.job import TrainingJob
from shardwise.base.errors import UserError
from shardwise.elastic.world import World
from shardwise.frontends.strategies import Checkpointing
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import ScheduleName
from tests.recipes.small import RECIPES


@pytest.fixture
def started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[tuple[TrainingJob, LaunchConfig]]:
    """The jobs that commands would have started."""
    jobs: list[tuple[TrainingJob, LaunchConfig]] = []
    monkeypatch.setattr(train, "run", lambda job, launch: jobs.append((job, launch)))
    monkeypatch.chdir(tmp_path)
    return jobs


def call(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", *shlex.split(line)])
    main.commands(sys.argv[1:])(standalone_mode=False)


def test_a_file_gives_options_and_the_line_wins(
    monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    Path("run.yaml").write_text(
        """
model: llama-34m      # a comment
data: [a.txt, no, 7]
prompt: on
lr: 1e-3
beta2: 0.5
batch_size: 3
activation-checkpointing: selective
schedule: linear
min-lr: ~
async-checkpoint: true
nproc: 2
"""
    )
    line = "train lm --config run.yaml --lr 0.5 --beta1 0.25 --no-async-checkpoint"
    call(monkeypatch, line)
    [(job, launch)] = started
    config: Any = job.config
    assert launch == LaunchConfig(nproc=2)
    assert (config.model, config.data, config.prompt) == ("llama-34m", ("a.txt", "no", "7"), "on")
    assert config.seq_length == 512, "the default that goes with the model of the file"
    optimizer = config.train.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.min_lr) == (0.5, (0.25, 0.5), None)
    assert optimizer.schedule is ScheduleName.LINEAR
    assert config.train.batch_size == 3
    sharding = config.train.sharding
    assert sharding.activation_checkpointing is Checkpointing.SELECTIVE
    assert not config.train.output.async_checkpoint
    line = "train lm --config run.yaml --model llama-tiny --data b.txt"
    call(monkeypatch, f"{line} --activation-checkpointing none")
    assert started[1][0].config.model == "llama-tiny"
    assert started[1][0].config.data == ("b.txt",)
    sharding = started[1][0].config.train.sharding
    assert sharding.activation_checkpointing is Checkpointing.NONE
    Path("run.yaml").write_text("epochs: 3")
    call(monkeypatch, "train lm --config run.yaml")
    call(monkeypatch, "train lm --config run.yaml --steps 5")
    lengths = [(job.config.train.steps, job.config.train.epochs) for job, _ in started[2:]]
    assert lengths == [(None, 3), (5, None)]


@pytest.mark.parametrize(
    ("text", "existing", "stepping"),
    [
        ("resume: true", "resume", "after-backward"),
        ("auto_resume: true\nstep-in-backward: true", "auto-resume", "in-backward"),
        ("auto_resume_from_checkpoints: true\nresume: false", "auto-resume", "after-backward"),
        ("overwrite_output_dir: true", "overwrite", "after-backward"),
        ("overwrite: false\nresume: ~\nstep-in-backward: false", "refuse", "after-backward"),
        ("no-step-in-backward: true", "refuse", "after-backward"),
        ("no-step-in-backward: false", "refuse", "in-backward"),
    ],
)
def test_a_flag_is_true_or_false(tmp_path: Path, text: str, existing: str, stepping: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    options = Options(default=RECIPES["lm"])
    found = read_options(tmp_path / "run.yaml", [options], "train lm")
    config = options.read({}, None, {name: each.value for name, each in found.items()})
    assert config.train.output.existing.value == existing
    assert config.train.stepping.value == stepping


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"resume: true\nauto-resume: true", r"line 2, .* found auto-resume too, expected it once "
         r"\(.*line 1, column 1"),
        (b"step-in-backward: yes", "found 'yes', expected one of true, false for step-in-backward"),
        (b"existing: auto-resume", "mean resume, auto-resume or overwrite"),
        (b"stepping: in-backward", "did you mean step-in-backward"),
        (b"gradient_checkpointing: true", "did you mean activation-checkpointing: full"),
        (b"resume_from_checkpoint: true", "did you mean resume, and out with the folder"),
        (b"training:\n  steps: 3", "without its hyphens; a file has no sections"),
        (b"load_in_8bit: false", "did you mean base: nf4"),
        (b"batchsize: 3", "line 1, column 1: found 'batchsize', expected an option of train lm "
         "without its hyphens; did you mean batch-size?"),
        (b"\nlr: fast", "line 2, column 5: found 'fast', expected a number for lr"),
        (b"steps: 1.5", "line 1, column 8: found '1.5', expected a whole number for steps"),
        (b"keep-best: yes", "line 1, column 12: found 'yes', expected one of true, false for "),
        (b"schedule: cosin", "column 11: found 'cosin', expected one of cosine, .* for schedule"),
        (b"activation-checkpointing: true", "found 'true', expected one of none, "
         "full, selective, op, offload for activation-checkpointing"),
        (b"lr: [1, 2]", "line 1, column 5: found a sequence for lr, expected one value"),
        (b"data: [a, null]", "line 1, column 11: found nothing in the list for data"),
        (b"data:\n  - a\n  - {b: c}", "line 3, column 5: found a mapping for data, expected"),
        (b"lr: 1\nsteps: 2\nlr: 2", r"line 3, column 1: found lr again, expected it once \(.*1"),
        (b"out: ''", "line 1, column 6: found nothing, expected a name or a path for out"),
        (b"- lr", "line 1, column 1: found a sequence, expected lines of option: value"),
        (b"[lr]: 1", "line 1, column 1: found a sequence, expected the name of an option"),
        (b"lr: 'a", "line 1, column 7: found no YAML"),
        (b"lr: \x00", "found no YAML"),
        (b"lr: \xff\xfe", "found no YAML"),
        (b"lr: " + b"[" * 50_000, "found no YAML"),
        (b"lr: 1 #" + b"x" * (1 << 20), "of more than 1,048,576 bytes"),
        (b"a: &a [x, x]\nb: &b [*a, *a]", "line 1, column 1: found 'a', expected an option"),
        (b"<<: {lr: 1}", "line 1, column 1: found '<<', expected an option"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_with_their_place(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(text)
    options = Options(default=RECIPES["lm"])
    with pytest.raises(UserError, match=message) as caught:
        read_options(file, [options], "train lm")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--config: .*none\.yaml: No such file"):
        read_options(tmp_path / "none.yaml", [], "train lm")


def test_an_empty_file_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing\n")
    assert read_options(tmp_path / "run.yaml", [], "train lm") == {}


def test_a_value_that_cannot_be_is_reported_with_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: llama-tiny\nbatch-size: 0\nwirre: int8")
    with pytest.raises(UserError, match=r"found 'wirre', expected .* did you mean"):
        call(monkeypatch, "train lm --config run.yaml")
    Path("run.yaml").write_text("model: llama-tiny\nbatch-size: 0")
    place = r"--batch-size: found 0, expected 1 or more \(run.yaml, line 2, column 1\)"
    with pytest.raises(UserError, match=place) as caught:
        call(monkeypatch, "train lm --config run.yaml")
    assert caught.value.exit_code == 2
    with pytest.raises(OptionError, match=r"--batch-size: found -1, expected 1 or more$"):
        call(monkeypatch, "train lm --config run.yaml --batch-size -1")
    Path("run.yaml").write_text("diloco-wire: int8")
    with pytest.raises(UserError, match=r"--strategy diloco with it \(run.yaml, line 1"):
        call(monkeypatch, "train lm --config run.yaml")


@pytest.mark.parametrize(
    "line",
    [
        "lm",
        "lm --strategy diloco --replicas 2 --diloco-wire int8 --nproc 2 \
        --prompt 'a: \"b\" \n\x85é😀'",
        "lm --data null '#no' --mesh dp_shard=2 --transport shm --seed 3 --beta1 0.1 --keep-best",
        "mnist --data-dir '~root' --nested-fsdp --lr 3e-05",
        "imagenet --model resnet18 --fake-data --activation-checkpointing selective --compile",
        "vit --no-nested-fsdp --eval-every 0 --auto-resume --out there",
    ],
)
def test_a_saved_file_repeats_the_command(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], line: str
) -> None:
    recipe = line.partition(" ")[0]
    call(monkeypatch, f"train {line} --save-config saved.yaml")
    assert started == [], "nothing is started"
    call(monkeypatch, f"train {line}")
    call(monkeypatch, f"train {recipe} --config saved.yaml")
    (first, launch), (second, again) = started
    default = RECIPES[recipe].train.output
    output = dataclasses.replace(
        first.config.train.output, out=default.out, existing=default.existing
    )
    expected = dataclasses.replace(
        first.config, train=dataclasses.replace(first.config.train, output=output)
    )
    assert second.config == expected
    assert again == launch
    assert Path("saved.yaml").read_text() == first.options_file
    assert f"# {Path.cwd()}" in first.options_file.splitlines()
    with pytest.raises(UserError, match=r"--save-config: found saved\.yaml, expected the na"):
        call(monkeypatch, f"train {line} --save-config saved.yaml")


def test_an_edited_file_does_not_change_a_run_that_restarts(
    monkeypatch: pytest.MonkeyPatch, no_world: Path
) -> None:
    """Its ranks get a value in every attempt, and read neither the line nor the file."""
    file = no_world / "run.yaml"
    file.write_text("steps: 7\nlr: 0.5\ndata: data.txt\ndevice: cpu")
    (no_world / "data.txt").write_text("shard gather reduce " * 2000)
    trained: list[Any] = []

    def launch(command: Callable[[int], list[str]], *_: object) -> int:
        for attempt, text in enumerate(("steps: 9\nlr: 2", "no: option", None)):
            file.unlink() if text is None else file.write_text(text)
            *_, module, path = command(attempt)
            monkeypatch.setattr(sys, "argv", [module, path])
            rank.main()
        return 0

    monkeypatch.setattr(run, "run_job", launch)
    world = World(0, 1, 0, 1)
    monkeypatch.setattr(rank, "find_world", lambda: world)
    monkeypatch.setattr(TrainingJob, "run", lambda job, *_: trained.append(job.config.train))
    monkeypatch.setattr(rank, "run_rank", lambda world, train: train(world, None))
    monkeypatch.setattr(sys, "argv", ["shardwise", "train", "lm", "--config", str(file)])
    with pytest.raises(SystemExit) as ended:
        main.app()
    assert ended.value.code == 0
    assert [(train.steps, train.optimizer.lr) for train in trained] == [(7, 0.5)] * 3


def test_a_file_name_that_is_no_text_survives(
    monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    call(monkeypatch, "train lm --save-config saved.yaml --data odd\udcff.txt")
    call(monkeypatch, "train lm --config saved.yaml")
    assert started[0][0].config.data == ("odd\udcff.txt",)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_option_has_a_key(recipe: str) -> None:
    """What a file cannot say, a run could not repeat."""
    import typer

    command = typer.main.get_command(main.commands([])).commands["train"].commands[recipe]  # type: ignore[attr-defined]
    shown = {p.opts[0] for p in command.params if not p.hidden and p.opts[0].startswith("--")}
    own = {"--config", "--save-config", "--no-nested-fsdp", "--help"}
    options: Options[Any] = train._options_of(recipe)
    every: tuple[Options[Any], ...] = (options, Options(default=LaunchConfig()))
    keys = {key for each in every for s in each.settings() for key in (s.key, *s.flags)}
    assert re.match("--", min(keys))
    assert shown - own <= keys
