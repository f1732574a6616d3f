"""The pictures of stored documents: panels of lines or of bars, which look alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Content = dict[str, Any]
#: Draws a diagram of a picture.
Panel = Callable[["Axes"], None]

# On white and on black alike; what is written is made lighter where the reader's screen is dark.
OURS, PEER = "#2f81c4", "#c4661f"
INK, RULE = "#3d444d", "#818b98"
_LIGHT_INK = "#d1d7e0"
_STYLE = (
    "<style>@media (prefers-color-scheme: dark) { "
    f'[style*="fill: {INK}"] {{ fill: {_LIGHT_INK} !important; }} '
    f'[style*="stroke: {INK}"] {{ stroke: {_LIGHT_INK} !important; }} }}</style>'
)


def draw(path: Path, name: str, panels: Sequence[Panel], size: tuple[float, float]) -> None:
    """Draw a picture.

    Args:
        path: a file that ends in ``.svg`` or ``.png``; replaced when it is whole.
        name: of the picture, and above it.
        panels: side by side.
        size: of the picture, in inches.
    """
    # The object interface: no pyplot, so no global state and no display.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The names inside an SVG file come from the salt.
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "text.color": INK}
    style |= {"font.family": "sans-serif", "font.size": 11, "axes.edgecolor": RULE}
    style |= {"axes.labelcolor": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK}
    style |= {"xtick.color": RULE, "ytick.color": RULE}
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            axes.grid(visible=True, color=RULE, alpha=0.25, linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
            panel(axes)
        figure.suptitle(name, x=0.01, ha="left")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if handles:
            where: Content = {"loc": "outside lower left", "ncols": len(labels), "frameon": False}
            figure.legend(handles, labels, **where)
        draft, kind = path.with_name(f".{path.name}"), path.suffix.removeprefix(".")
        clock = {"metadata": {"Date": None}} if kind == "svg" else {}
        figure.savefig(draft, format=kind, transparent=True, dpi=120, **clock)
    if kind == "svg":
        draft.write_text(draft.read_text().replace("<defs>", f"{_STYLE}\n <defs>", 1))
    draft.replace(path)


def draw_bars(
    path: Path, name: str, panels: Sequence[tuple[str, Mapping[str, tuple[float, str]], float]]
) -> None:
    """Draw a picture of bars.

    Args:
        path: as for :func:`draw`.
        name: of the picture.
        panels: of each, its title, the lengths and colors of bars by what they are, and a length
            at which a dashed line is.
    """

    def panel(heading: str, bars: Mapping[str, tuple[float, str]], mark: float) -> Panel:
        def draw_on(axes: Axes) -> None:
            lengths, colors = zip(*bars.values(), strict=True)
            drawn = axes.barh(list(bars), lengths, color=colors, height=0.7)
            axes.bar_label(drawn, [f"{each:.2f}" for each in lengths], padding=-32, color="white")
            axes.axvline(mark, color=INK, ls="--", lw=1)
            axes.set_xlim(left=0)
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.set_title(heading, loc="left", fontsize=11)
            if bars is not panels[0][1]:
                axes.set_yticklabels([])

        return draw_on

    wide = 9.6 if len(panels) == 1 else 3.6 * len(panels) + 1.6
    high = 0.36 * max(len(bars) for _, bars, _ in panels) + 1.1
    draw(path, name, [panel(*each) for each in panels], (wide, high))
