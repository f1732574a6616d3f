"""What a terminal shows of a step: as many figures as its width has room for."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from shardwise.app.recipes.core.journal import StepMetrics
from shardwise.app.recipes.core.progress import LABEL, Bar, Display, Lines, brief, make_display

STEP = StepMetrics(
    step=12,
    loss=3.214,
    grad_norm=0.91,
    lr=3e-4,
    units_per_s=5120.4,
    memory_mib=4123.0,
    eta_s=3605,
    epoch=0.5,
    mfu=0.437,
)

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


def shown(width: int, *steps: StepMetrics) -> str:
    """All that a bar has drawn."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    display = Bar(console)
    display.begin(11, 100, "tokens")
    for metrics in steps:
        display.step(metrics)
    display.end()
    return file.getvalue()


@pytest.mark.parametrize("width", [75, 76, 89, 90, 99, 100, 115, 116, 200])
def test_figures_come_in_the_order_of_their_importance(width: int) -> None:
    drawn = shown(width, STEP)
    assert {figure for figure in FIGURES if figure in drawn} == {
        figure for figure, least in FIGURES.items() if width >= least
    }


def test_what_is_not_known_takes_no_room() -> None:
    unknown = StepMetrics(12, 3.2, 0.9, 3e-4, 5120, 4123, 31)
    assert "MFU" not in shown(200, unknown)


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


def test_a_line_without_spaces_is_not_cut() -> None:
    """A path that is cut cannot be copied."""
    file = io.StringIO()
    path = "/data/" + 60 * "x"
    Bar(Console(file=file, force_terminal=True, width=40)).say(f"run        {path}")
    first, second = file.getvalue().splitlines()
    assert first.rstrip() == "run"
    assert second == " " * LABEL + path


def test_a_display_goes_with_rank_and_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_display(0), Bar)
    assert type(make_display(1)) is Display
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(0), Lines), "it cannot move its cursor"


def test_counts_are_exact_while_they_are_short() -> None:
    assert brief(0) == "0"
    assert brief(99_999) == "99,999"
    assert brief(100_000) == "0.10 M"
