"""The picture of a ``scaling`` document: one panel for each axis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from _contenders import CONTENDERS as ALL
from _scaling_tables import AXES, CONTENDERS, Spread, along, communication, value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# On white and on black alike; what is written is made lighter where the reader's screen is dark.
COLORS = {"ours": "#2f81c4", "fsdp2": "#c4661f"}
_INK, _LIGHT_INK, _RULE = "#3d444d", "#d1d7e0", "#818b98"
_STYLE = (
    "<style>@media (prefers-color-scheme: dark) { "
    f'[style*="fill: {_INK}"] {{ fill: {_LIGHT_INK} !important; }} '
    f'[style*="stroke: {_INK}"] {{ stroke: {_LIGHT_INK} !important; }} }}</style>'
)


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the communication part over each axis that a document has.

    Args:
        content: the document.
        path: a file that ends in ``.svg`` or ``.png``; replaced when it is whole.
    """
    # The object interface: no pyplot, so no global state and no display.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    axes = [axis for axis in AXES if along(content, axis)]
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "scaling", "text.color": _INK}
    style |= {"font.family": "sans-serif", "font.size": 11, "axes.edgecolor": _RULE}
    style |= {"axes.labelcolor": _INK, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK}
    style |= {"xtick.color": _RULE, "ytick.color": _RULE}
    with rc_context(style):
        figure = Figure(figsize=(4 * len(axes), 3.8), layout="constrained")
        for panel, axis in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
            _panel(panel, axis, along(content, axis))
        figure.suptitle("Communication part of a training step, seconds", x=0.01, ha="left")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)
        temporary = path.with_name(f".{path.name}")
        kind = path.suffix.removeprefix(".")
        clock = {"metadata": {"Date": None}} if kind == "svg" else {}
        figure.savefig(temporary, format=kind, transparent=True, dpi=120, **clock)
    if kind == "svg":
        text = temporary.read_text()
        temporary.write_text(text.replace("<defs>", f"{_STYLE}\n <defs>", 1))
    temporary.replace(path)


def _panel(panel: Axes, axis: str, cases: list[dict[str, Any]]) -> None:
    where = [value(case) for case in cases]
    for name in CONTENDERS[:-1]:
        spreads = [Spread.of(communication(case, name)) for case in cases]
        middles = [spread.middle for spread in spreads]
        reach = [
            [spread.middle - spread.low for spread in spreads],
            [spread.high - spread.middle for spread in spreads],
        ]
        panel.errorbar(
            where,
            middles,
            yerr=reach,
            color=COLORS[name],
            label=ALL[name].title,
            marker="o",
            markersize=5,
            linewidth=2,
            capsize=3,
        )
        panel.annotate(
            f"{middles[-1]:.2f}",
            (where[-1], spreads[-1].high),
            textcoords="offset points",
            xytext=(0, 6),
            ha="right",
            color=COLORS[name],
        )
    panel.set_title(AXES[axis].title, loc="left", fontsize=11)
    panel.set_xlabel(AXES[axis].unit)
    panel.set_xticks(where, _tick_labels(where))
    panel.margins(y=0.12)
    panel.set_ylim(bottom=min(0, panel.get_ylim()[0]))
    panel.grid(visible=True, color=_RULE, alpha=0.25, linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_axisbelow(True)


def _tick_labels(where: list[float]) -> list[str]:
    """Label the ticks, but for those that would run into the one before."""
    labels, last = [], float("-inf")
    for each in where:
        fits = each - last >= 0.08 * (where[-1] - where[0])
        labels.append(f"{each:.0f}" if fits else "")
        last = each if fits else last
    return labels
