"""What a run prints: a progress bar for people, lines for programs."""

from __future__ import annotations

import sys
import textwrap

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from shardwise.app.recipes.core.journal import StepMetrics, clock
from shardwise.base.units import printable, show

LABEL = 11  # columns of "sharding   ", with which the lines about a run begin


class Display:
    """Where a run prints: every rank but rank 0 prints nothing."""

    def say(self, text: str) -> None:
        """Print a line."""

    def begin(self, done: int, steps: int, unit: str) -> None:
        """Begin after ``done`` of ``steps`` steps; ``unit`` is what speed counts."""

    def step(self, metrics: StepMetrics) -> None:
        """Show a step."""

    def end(self) -> None:
        """End, after training succeeded or failed."""


class Lines(Display):
    """One line per step, for pipes, log files and grep."""

    def __init__(self) -> None:
        self._unit = ""

    def say(self, text: str) -> None:
        """Print the line."""
        show(text)

    def begin(self, done: int, steps: int, unit: str) -> None:
        """Remember the unit."""
        del done, steps
        self._unit = unit

    def step(self, metrics: StepMetrics) -> None:
        """Print the step."""
        print(metrics.line(self._unit), flush=True)


class _Figures(ProgressColumn):
    """The figures of the newest step, as many as fit the terminal."""

    def __init__(self, console: Console, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console
        self._unit = unit

    def render(self, task: Task) -> Text:
        """Draw the figures."""
        metrics: StepMetrics | None = task.fields["metrics"]
        if metrics is None:
            return Text("first step ...", style="dim")
        text = Text.assemble(
            ("loss ", "dim"),
            (f"{metrics.loss:.3f}", "bold green"),
            ("  eta ", "dim"),
            clock(metrics.eta_s),
        )
        width = self._console.width
        if width >= 76:
            text.append(f"  {metrics.units_per_s:,.0f} {self._unit}/s", style="cyan")
        if width >= 90 and metrics.mfu is not None:
            text.append(f"  MFU {metrics.mfu:.1%}", style="cyan")
        if width >= 100:
            text.append(f"  norm {metrics.grad_norm:.2f}  lr {metrics.lr:.1e}", style="dim")
        if width >= 116:
            text.append(f"  {metrics.memory_mib:,.0f} MiB", style="dim")
        return text


class Bar(Display):
    """A progress bar with the newest figures, for a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None

    def say(self, text: str) -> None:
        """Print the line, above the bar while there is one."""
        # Wrapped here, and not by rich: between words, and indented behind the label.
        for line in printable(text, keep="\n\t").split("\n"):
            fitting = textwrap.wrap(
                line,
                self._console.width,
                subsequent_indent=" " * LABEL,
                break_long_words=False,
                break_on_hyphens=False,
                replace_whitespace=False,
            )
            for piece in fitting or [""]:
                self._console.print(piece, markup=False, highlight=False, soft_wrap=True)

    def begin(self, done: int, steps: int, unit: str) -> None:
        """Draw the bar."""
        self._progress = Progress(
            TextColumn(
                "{task.completed}/{task.total}", style="bold", table_column=Column(no_wrap=True)
            ),
            BarColumn(bar_width=None),
            _Figures(self._console, unit),
            console=self._console,
            expand=True,
        )
        self._progress.add_task("training", total=steps, completed=done, metrics=None)
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Move the bar."""
        if self._progress is not None:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=metrics.step, metrics=metrics)

    def end(self) -> None:
        """Leave the bar as it is, and release the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def brief(count: int) -> str:
    """Return a number in brief: 1,234 or 12.03 M."""
    return f"{count:,}" if count < 100_000 else f"{count / 1e6:.2f} M"


def make_display(rank: int) -> Display:
    """Return the display for this rank and its standard output."""
    if rank != 0:
        return Display()
    if sys.stdout.isatty():
        console = Console()
        if console.is_terminal and not console.is_dumb_terminal:
            return Bar(console)
    return Lines()
