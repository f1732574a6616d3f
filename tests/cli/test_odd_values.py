"""Odd values of every option: one true line, exit code 2, and nothing is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.cli import run as cli_run
from shardwise.app.cli.hosts import DoctorConfig
from shardwise.app.cli.options import Options
from shardwise.app.cli.plan import PlanConfig
from shardwise.app.cli.run import LaunchConfig
from shardwise.insight.schema.option import Bounds, OptionError
from tests.cli import shell
from tests.cli.shell import call
from tests.recipes.small import RECIPES

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("no_world")

_CONFIGS: dict[str, Any] = {
    **{f"train {name}": config for name, config in RECIPES.items()},
    "train lm --dry-run": LaunchConfig(),
    "doctor": DoctorConfig(),
    "plan llama-tiny": PlanConfig(),
}


def _numbers() -> Iterator[tuple[str, str, type]]:
    """Every option with a number, of every command, each once."""
    seen = set()
    for command, config in _CONFIGS.items():
        for setting in Options(default=config).settings():
            if setting.kind in (int, float) and setting.name not in seen:
                seen.add(setting.name)
                yield command, setting.name, setting.kind


def refused(monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: list[str]) -> str:
    """Return the line that a command is refused with."""

    def started(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(cli_run, "run_job", started)
    return shell.refused(capsys, *words)


@pytest.mark.parametrize(("command", "name", "kind"), list(_numbers()))
def test_every_number_has_bounds(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, command: str, name: str, kind: type
) -> None:
    if "diloco" in name or name in ("--local-steps", *(f"--outer-{n}" for n in _OUTER)):
        command += " --strategy diloco --replicas 1"
    for value in ["1e20"] if kind is int else ["1e300", "nan"]:
        words = [*command.split(), f"{name}={value}"]
        assert refused(monkeypatch, capsys, words).startswith(f"error: {name}: found "), value


_OUTER = ("lr", "momentum", "warmup")


@pytest.mark.parametrize("command", _CONFIGS)
def test_defaults_are_within_their_bounds(command: str) -> None:
    _CONFIGS[command].check_bounds()


def test_what_is_out_of_bounds_is_named_with_what_is_expected() -> None:
    inclusive = Bounds(least=0, most=7)
    expected = [None, None, "7 at most", "0 to 7"]
    assert [inclusive.expected_for(value) for value in (0, 7, 8, -1)] == expected
    for value in map(float, ("nan", "inf", "-inf", "1e400")):
        for bounds in (Bounds(least=1), Bounds(above=0), Bounds(least=0, below=1), inclusive):
            assert bounds.expected_for(value) is not None
    with pytest.raises(OptionError, match="--steps: found 0, expected 1 or more"):
        replace(RECIPES["lm"].train, steps=0).check_bounds()


@pytest.mark.parametrize(("text", "steps"), [("1e3", 1000), ("2.5e2", 250), ("7", 7), ("1E1", 10)])
def test_integers_may_be_written_as_large_ones_are(
    monkeypatch: pytest.MonkeyPatch, text: str, steps: int
) -> None:
    found: list[int] = []

    def run(job: Any, _: object) -> None:
        found.append(job.config.train.steps)

    monkeypatch.setattr("shardwise.app.cli.train.run", run)
    Path("run.yaml").write_text(f"steps: {text}\n")
    for words in (["--steps", text], ["--config", "run.yaml"]):
        assert call("train", "lm", *words) == 0
    assert found == [steps, steps]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (f"train lm {option}={value}", f"{option}: found ")
            for option, values in {
                "--steps": ("1.5", "nan", "", "-1e20"),
                "--lr": ("-inf", "many"),
            }.items()
            for value in values
        ),
        ("train lm --timeline 700-800", "--timeline: found 700-800 of 600 steps, expected steps"),
        ("train lm --timeline 0-3", "--timeline: found '0-3', expected steps from 1 up"),
        ("train lm --offload disk:nosuch", "--offload: found disk:nosuch, no folder, expected"),
        ("train lm --offload disk:/dev/null", "--offload: found disk:/dev/null, no folder"),
        ("train lm --device=", "--device: found '', expected a type of device"),
        ("train lm --out /dev/null", "--out: found /dev/null, which is a file"),
        ("train lm --config /dev/zero", "--config: found /dev/zero of more than"),
        ("train lm --save-config .", "--save-config: found ., expected the name of a new file"),
        ("train lm --mesh=", "--mesh: found"),
        ("train lm --wire=", "--wire: found"),
        ("train lm --log=", "--log: found"),
        ("train lm --reshard-after-forward 1e99", "--reshard-after-forward: found"),
        ("train mnist --data-dir /dev/null", "--data-dir: found"),
        ("train imagenet --data-dir /dev/zero", "--data-dir: found"),
        ("train vit --dry-run --patch-size 0", "--patch-size: found 0, expected 1 or more"),
        ("train vit --dry-run --world-size 1e9", "--world-size: found 1000000000, expected"),
        ("plan llama-tiny --fit 0", "--fit: found 0, expected a size such as 80GiB"),
        ("plan llama-tiny --fit 99999999999TB", "--fit: found"),
        ("plan llama-tiny --device-file /dev/zero", "/dev/zero: found no file to read"),
        ("plan llama-tiny --device-file .", "found no file to read: found drwx"),
        ("plan llama-tiny --device-file pipe", "pipe: found no file to read: found prw"),
        ("inspect --rank 1e9", "--rank: found 1000000000, expected a rank from 0 to 7"),
        ("launch-lines --hosts a --nproc 1e20 -- train lm", "--nproc: found '1e20', expected"),
        ("launch-lines --slurm 1e9 -- train lm", "--slurm: found 1000000000, expected"),
        ("generate . --max-tokens 1e20", "--max-tokens: found 1"),
        ("generate . --temperature nan", "--temperature: found nan, expected 0 or more"),
        ("generate . --seed -1", "--seed: found -1, expected 0 to 9,223,372,036,854,775,807"),
        ("checkpoint consolidate . x --buffer 0", "--buffer: found '0', expected a size"),
        ("checkpoint consolidate . x --buffer 1e9TB", "--buffer: found '1e9TB', expected a size"),
        ("compare /dev/null pipe", "RUN...: found /dev/null, expected the folder of a run"),
        ("calibrate --out .", ".: found Is a directory, expected a file that can be written"),
        ("calibrate --out /dev/null/x", "/dev/null/x: found "),
        ("run /dev/null", "SCRIPT: found /dev/null, which is not a file"),
        ("run pipe", "SCRIPT: found pipe, which is not a file"),
    ],
)
def test_odd_values_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, no_world: Path, arguments: str, message: str
) -> None:
    os.mkfifo("pipe")
    assert message in refused(monkeypatch, capsys, arguments.split())
    assert [path.name for path in no_world.iterdir()] == ["pipe"]


def test_odd_values_are_refused_without_torch() -> None:
    """It takes seconds to import, and so does what else is large: commands answer before."""
    code = """
import sys
from shardwise.app.cli.main import app
for line in (
    "train lm --steps 0",
    "plan llama-tiny --batch-size 0",
    "plan llama-tiny --mesh dp=0",
    "inspect --rank 1e9",
    "doctor --timeout nan",
    "run --nproc 1e20 x.py",
    "generate . --top-p nan",
    "compare . .",
):
    sys.argv = ["shardwise", *line.split()]
    try:
        app()
    except SystemExit as ended:
        assert ended.code == 2, line
    assert not {"torch", "transformers", "numpy", "matplotlib"} & sys.modules.keys(), line
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
