"""Shells complete commands, options and values; ``-h`` is help everywhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import typer.main

from shardwise.app.cli import main
from tests.cli.shell import call


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(*arguments, **environment)``: run the command as a shell does, by its own name."""

    def run(*arguments: str, **env: str) -> Ended:
        with monkeypatch.context() as patch:
            # What is completed depends on the environment in which commands are built.
            patch.setattr(typer.main, "get_command", typer.main.get_command.__wrapped__)
            patch.setattr(sys, "argv", ["shardwise", *arguments])
            for name, value in env.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main.app()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, out, err)

    return run


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
def test_bash_is_offered_what_fits(run: Run, typed: str, expected: set[str]) -> None:
    ended = run(
        _SHARDWISE_COMPLETE="complete_bash",
        COMP_WORDS=typed,
        COMP_CWORD=str(len(typed.split(" ")) - 1),
    )
    assert (ended.code, ended.err) == (0, "")
    assert set(ended.out.split()) == expected


def test_completion_is_shown_and_installed(run: Run, tmp_path: Path) -> None:
    shown = run("--show-completion", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert shown.code in (0, 2), shown.err  # without detection, a shell has to be named
    for shell, words in (("bash", "COMP_WORDS"), ("zsh", "#compdef shardwise")):
        shown = run("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
        assert shown.code == 0, shown.err
        assert words in shown.out
    installed = run(
        "--install-completion", "bash",
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1", HOME=str(tmp_path),
    )  # fmt: skip
    assert installed.code == 0, installed.err
    assert "shardwise" in (tmp_path / ".bashrc").read_text()


def commands(of: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that lead to every command."""
    yield words
    for name, command in getattr(of, "commands", {}).items():
        yield from commands(command, (*words, name))


@pytest.mark.parametrize(
    "words", list(commands(typer.main.get_command(main.commands([])))), ids=str
)
def test_h_is_help_everywhere(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert call(*words, "-h") == 0
    assert "Usage: " in capsys.readouterr().out
