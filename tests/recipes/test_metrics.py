"""What a run shows of its steps."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from shardwise.app.recipes.core.journal import StepMetrics, clock
from shardwise.app.recipes.core.progress import Bar, Display, Lines, brief, make_display
from shardwise.base.units import printable

STEP = StepMetrics(
    step=12,
    loss=3.21449,
    grad_norm=0.9149,
    lr=3e-4,
    units_per_s=5120.4,
    memory_mib=412.3,
    eta_s=31.2,
)


def test_a_step_is_one_greppable_line() -> None:
    assert STEP.line("tokens") == (
        "step=12 loss=3.2145 grad_norm=0.915 lr=3.00e-04 tokens_per_s=5120 memory_mib=412 eta=00:31"
    )


def test_a_step_is_remembered_in_full_precision() -> None:
    record = json.loads(json.dumps(STEP.record("images")))
    assert record["loss"] == STEP.loss
    assert record["images_per_s"] == STEP.units_per_s
    assert set(record) == {
        "step", "loss", "grad_norm", "lr", "images_per_s", "memory_mib", "eta_s",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00"), (65.4, "01:05"), (3599.9, "1:00:00"), (90061, "25:01:01")]
)
def test_times_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert clock(seconds) == text


# -- displays --------------------------------------------------------------------------------------


def test_a_pipe_gets_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(0)
    assert isinstance(display, Lines), "standard output is captured, so it is no terminal"
    display.say("hello")
    display.begin(0, 100, "tokens")
    display.step(STEP)
    display.end()
    assert capsys.readouterr().out == f"hello\n{STEP.line('tokens')}\n"


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(1)
    assert type(display) is Display
    display.begin(0, 100, "tokens")
    display.step(STEP)
    display.say("hello")
    display.end()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_gets_one_bar_that_fits(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False)
    display = Bar(console)
    display.begin(11, 100, "tokens")
    display.say("[not markup] a line that stays")
    display.step(STEP)
    display.end()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[not markup] a line that stays" in shown
    assert "12/100" in shown
    assert "3.214" in shown
    assert "00:31" in shown
    assert ("tokens/s" in shown) == (width >= 76)
    assert shown.count("\n") <= 4, "the bar was wrapped into several lines"


def test_long_lines_are_wrapped_between_words_behind_the_label() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, legacy_windows=False)
    Bar(console).say("data       the library's source: 12.03 M tokens to learn from\n\n    tail")
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "data       the library's source: 12.03 M\n           tokens to learn from\n\n    tail\n"
    )


def test_what_a_model_writes_cannot_steer_a_terminal() -> None:
    assert printable("a\tb\nc \x1b[2J\x07 naïve", keep="\n\t") == "a\tb\nc �[2J� naïve"


@pytest.mark.parametrize(("count", "text"), [(7, "7"), (99_999, "99,999"), (12_034_435, "12.03 M")])
def test_counts_are_short(count: int, text: str) -> None:
    assert brief(count) == text
