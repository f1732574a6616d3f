"""What a run shows and keeps of its steps: as many figures as a terminal has room for."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from shardwise.app.recipes.core.journal import StepMetrics, clock
from shardwise.app.recipes.core.progress import LABEL, Bar, Display, Lines, brief, make_display
from shardwise.base.units import printable

STEP = StepMetrics(
    step=12,
    loss=3.21449,
    grad_norm=0.9149,
    lr=3e-4,
    units_per_s=5120.4,
    memory_mib=4123.0,
    eta_s=3605,
    epoch=0.5,
    mfu=0.437,
)
#: Of a run without epochs, on a device whose peak is not known.
PLAIN = StepMetrics(12, 3.21449, 0.9149, 3e-4, 5120.4, 412.3, 31.2)

# From which width on a figure is shown.
FIGURES = {
    "loss 3.214": 0,
    "eta 1:00:05": 0,
    "5,120 tokens/s": 76,
    "MFU 43.7%": 90,
    "norm 0.91": 100,
    "lr 3.0e-04": 100,
    "4,123 MiB": 116,
}


def test_a_step_is_one_greppable_line() -> None:
    assert PLAIN.line("tokens") == (
        "step=12 loss=3.2145 grad_norm=0.915 lr=3.00e-04 tokens_per_s=5120 memory_mib=412 eta=00:31"
    )


def test_a_step_is_remembered_in_full_precision() -> None:
    record = json.loads(json.dumps(PLAIN.record("images")))
    assert record["loss"] == PLAIN.loss
    assert record["images_per_s"] == PLAIN.units_per_s
    assert set(record) == {
        "step", "loss", "grad_norm", "lr", "images_per_s", "memory_mib", "eta_s",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00"), (65.4, "01:05"), (3599.9, "1:00:00"), (90061, "25:01:01")]
)
def test_times_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (99_999, "99,999"), (100_000, "0.10 M"), (12_034_435, "12.03 M")],
)
def test_counts_are_exact_while_they_are_short(count: int, text: str) -> None:
    assert brief(count) == text


def test_what_a_model_writes_cannot_steer_a_terminal() -> None:
    assert printable("a\tb\nc \x1b[2J\x07 naïve", keep="\n\t") == "a\tb\nc �[2J� naïve"


# -- a terminal ------------------------------------------------------------------------------------


def shown(width: int, *steps: StepMetrics) -> str:
    """All that a bar has drawn."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    display = Bar(console)
    display.begin(11, 100, "tokens")
    display.say("[not markup] a line that stays")
    for metrics in steps:
        display.step(metrics)
    display.end()
    return file.getvalue()


def said(text: str) -> list[str]:
    """The lines that a terminal of 40 columns shows of a line."""
    file = io.StringIO()
    Bar(Console(file=file, force_terminal=True, width=40)).say(text)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 75, 76, 89, 90, 99, 100, 115, 116, 200])
def test_figures_come_in_the_order_of_their_importance(width: int) -> None:
    drawn = shown(width, STEP)
    assert "12/100" in drawn
    assert "[not markup] a line that stays" in drawn
    assert {figure for figure in FIGURES if figure in drawn} == {
        figure for figure, least in FIGURES.items() if width >= least
    }
    assert drawn.count("\n") <= 4, "the bar was wrapped into several lines"


def test_what_is_not_known_takes_no_room() -> None:
    assert "MFU" not in shown(200, PLAIN)


def test_a_bar_begins_where_the_run_goes_on() -> None:
    drawn = shown(80)
    assert "11/100" in drawn
    assert "first step ..." in drawn


def test_a_bar_that_never_began_can_end_and_ignores_steps() -> None:
    """A run may fail before its first step, and is then ended like any other."""
    file = io.StringIO()
    display = Bar(Console(file=file, force_terminal=True, width=80))
    display.step(STEP)
    display.end()
    display.end()
    assert file.getvalue() == ""


def test_long_lines_are_wrapped_between_words_behind_the_label() -> None:
    assert said("data       the library's source: 12.03 M tokens to learn from\n\n    tail") == [
        "data       the library's source: 12.03 M",
        "           tokens to learn from",
        "",
        "    tail",
    ]


def test_a_line_without_spaces_is_not_cut() -> None:
    """A path that is cut cannot be copied."""
    path = "/data/" + 60 * "x"
    first, second = said(f"run        {path}")
    assert first.rstrip() == "run"
    assert second == " " * LABEL + path


# -- who shows what --------------------------------------------------------------------------------


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


def test_a_display_goes_with_rank_and_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_display(0), Bar)
    assert type(make_display(1)) is Display
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(0), Lines), "it cannot move its cursor"
