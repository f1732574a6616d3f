"""The pictures of stored documents: panels of lines or of bars, which look alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _goodput_tables import contenders_of, goodputs, is_diloco, runs_of, title
from _measured import seconds_by_round
from _strategy_contenders import STRATEGIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Content = dict[str, Any]

# On white and on black alike; what is written is made lighter where the reader's screen is dark.
OURS, PEER = "#2f81c4", "#c4661f"
INK, RULE = "#3d444d", "#818b98"
_LIGHT_INK = "#d1d7e0"
_STYLE = (
    "<style>@media (prefers-color-scheme: dark) { "
    f'[style*="fill: {INK}"] {{ fill: {_LIGHT_INK} !important; }} '
    f'[style*="stroke: {INK}"] {{ stroke: {_LIGHT_INK} !important; }} }}</style>'
)


@dataclass(frozen=True)
class Line:
    """Values over others.

    Attributes:
        points: x and y.
        color: of the line.
        label: in the legend; empty: the line is not there.
        dash: of matplotlib; empty: marks alone.
        marker: of matplotlib; empty: none.
    """

    points: Sequence[tuple[float, float]]
    color: str
    label: str = ""
    dash: str = "-"
    marker: str = "o"


@dataclass(frozen=True)
class Panel:
    """One diagram of a picture.

    Attributes:
        title: above it.
        unit: of x, below it.
        lines: to draw.
        bars: instead: their lengths and colors, by what they are.
        mark: a bar's length at which a dashed line is.
        base: a y that is shown; chosen where there is none.
    """

    title: str
    unit: str = ""
    lines: Sequence[Line] = ()
    bars: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    mark: float | None = None
    base: float | None = 0.0


def draw(path: Path, name: str, panels: Sequence[Panel]) -> None:
    """Draw a picture.

    Args:
        path: a file that ends in ``.svg`` or ``.png``; replaced when it is whole.
        name: of the picture, and above it.
        panels: side by side.
    """
    # The object interface: no pyplot, so no global state and no display.
    from matplotlib.figure import Figure

    bars = max(len(panel.bars) for panel in panels)
    wide = (9.6 if len(panels) == 1 else 3.6 * len(panels) + 1.6) if bars else 4.4 * len(panels)
    with _looks(name):
        figure = Figure(figsize=(wide, 0.36 * bars + 1.1 if bars else 4.0), layout="constrained")
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False, sharey=bool(bars))[0],
            panels,
            strict=True,
        ):
            (_bars if bars else _lines)(axes, panel)
            axes.set_title(panel.title, loc="left", fontsize=11)
            axes.set_xlabel(panel.unit)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
        figure.suptitle(name, x=0.01, ha="left")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if handles and not bars:
            where = {"loc": "outside lower left", "ncols": len(labels), "frameon": False}
            figure.legend(handles, labels, **where)
        _write(figure, path)


def _bars(axes: Axes, panel: Panel) -> None:
    lengths, colors = zip(*panel.bars.values(), strict=True)
    bars = axes.barh(list(panel.bars), lengths, color=colors, height=0.7)
    axes.bar_label(bars, [f"{each:.2f}" for each in lengths], padding=-32, color="white")
    if panel.mark is not None:
        axes.axvline(panel.mark, color=INK, ls="--", lw=1)
    axes.set_xlim(left=0)
    if not axes.yaxis_inverted():  # the panels share it
        axes.invert_yaxis()
    axes.grid(visible=True, axis="x", color=RULE, alpha=0.25, linewidth=0.8)


def _lines(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        x, y = zip(*line.points, strict=True)
        axes.plot(
            x,
            y,
            color=line.color,
            label=line.label or None,
            ls=line.dash or "none",
            marker=line.marker or None,
            markersize=5,
            linewidth=2,
        )
    if panel.base is not None:
        axes.set_ylim(bottom=min(panel.base, axes.get_ylim()[0]))
    axes.grid(visible=True, color=RULE, alpha=0.25, linewidth=0.8)


@contextmanager
def _looks(salt: str) -> Iterator[None]:
    """Draw meanwhile as all pictures are drawn; the names inside an SVG file come from the salt."""
    from matplotlib import rc_context

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": salt, "text.color": INK}
    style |= {"font.family": "sans-serif", "font.size": 11, "axes.edgecolor": RULE}
    style |= {"axes.labelcolor": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK}
    style |= {"xtick.color": RULE, "ytick.color": RULE}
    with rc_context(style):
        yield


def _write(figure: Figure, path: Path) -> None:
    temporary = path.with_name(f".{path.name}")
    kind = path.suffix.removeprefix(".")
    clock = {"metadata": {"Date": None}} if kind == "svg" else {}
    figure.savefig(temporary, format=kind, transparent=True, dpi=120, **clock)
    if kind == "svg":
        text = temporary.read_text()
        temporary.write_text(text.replace("<defs>", f"{_STYLE}\n <defs>", 1))
    temporary.replace(path)


def _strategies(content: Content, path: Path) -> None:
    panels = []
    for case in sorted(content["cases"], key=lambda case: -case["gbit"]):
        middles = {n: median(seconds_by_round(case, n)) for n in case["contenders"]}
        bars = {
            STRATEGIES[name].title: (middle, PEER if name.startswith("fsdp2") else OURS)
            for name, middle in middles.items()
            if name != "floor"
        }
        heading = f"{case['gbit']:g} Gbit/s, {case['tokens']:,} tokens a rank"
        panels.append(Panel(heading, bars=bars, mark=middles.get("floor")))
    draw(path, "Training step over two hosts, seconds (dashed: compute only)", panels)


def _goodput(content: Content, path: Path) -> None:
    panels = []
    for case in content["cases"]:
        lines = [
            Line([(rate, 100 * kept) for rate, kept in found.items()], color, title(name), dash)
            for name, color, dash in _styles(case)
            if (found := goodputs(case, name))
        ]
        unit = f"kills a minute, {case['settings']['ranks']} processes"
        panels.append(Panel("Useful tokens per second, % of undisturbed", unit, lines))
    case = content["cases"][0]
    lines = []
    for name, color, dash in _styles(case):
        for rate, runs in runs_of(case, name).items():
            for points in ([(at / 1000, loss) for at, loss in run["losses"]] for run in runs):
                if points and rate:
                    lines.append(Line(points[-1:], color, dash=""))
                elif points:
                    lines.append(Line(points, color, dash=dash, marker=""))
    unit = "useful tokens, thousands"
    panels.append(Panel("Loss (lines: undisturbed, dots: disturbed)", unit, lines, base=None))
    draw(path, "Training on while processes are killed", panels)


def _styles(case: Content) -> Iterator[tuple[str, str, str]]:
    """A color and a dash for each contender."""
    dashes = {color: cycle(("-", "--", ":", "-.")) for color in (OURS, PEER)}
    for name in contenders_of(case):
        color = OURS if is_diloco(name) else PEER
        yield name, color, next(dashes[color])


PICTURES: dict[str, Callable[[Content, Path], None]] = {
    "strategies": _strategies,
    "goodput": _goodput,
}
"""Draws a document of a script."""
