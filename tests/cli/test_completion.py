"""Shells complete commands, options and values; ``-h`` is help everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from shardwise.cli import main


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a shell does, by its own name."""
    code = "import sys; sys.argv[0] = 'shardwise'; from shardwise.cli.main import app; app()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("shardwise tr", {"train"}),
        ("shardwise train ", {"lm", "mnist", "imagenet", "vit"}),
        ("shardwise train lm --activation", {"--activation-checkpointing"}),
        ("shardwise train lm --model llama-1", {"llama-150m"}),
        ("shardwise train vit --model vit-1", {"vit-1b", "vit-10b"}),
        ("shardwise train lm --param-dtype ", {"fp32", "bf16"}),
    ],
)
def test_bash_is_offered_what_fits(typed: str, expected: set[str]) -> None:
    ended = run(
        _SHARDWISE_COMPLETE="complete_bash",
        COMP_WORDS=typed,
        COMP_CWORD=str(len(typed.split(" ")) - 1),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert set(ended.stdout.split()) == expected


def test_completion_is_shown_and_installed(tmp_path: Path) -> None:
    shown = run("--show-completion", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert shown.returncode in (0, 2), shown.stderr  # without detection, a shell has to be named
    for shell, words in (("bash", "COMP_WORDS"), ("zsh", "#compdef shardwise")):
        shown = run("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
        assert shown.returncode == 0, shown.stderr
        assert words in shown.stdout
    installed = run(
        "--install-completion", "bash",
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1", HOME=str(tmp_path),
    )  # fmt: skip
    assert installed.returncode == 0, installed.stderr
    assert "shardwise" in (tmp_path / ".bashrc").read_text()


def commands(of: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that lead to every command."""
    yield words
    for name, command in getattr(of, "commands", {}).items():
        yield from commands(command, (*words, name))


@pytest.mark.parametrize("words", list(commands(typer.main.get_command(main.cli))), ids=str)
def test_h_is_help_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", *words, "-h"])
    with pytest.raises(SystemExit) as ended:
        main.app()
    assert ended.value.code == 0
    assert "Usage: " in capsys.readouterr().out
