"""The picture of a ``scaling`` document: one panel for each axis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from _contenders import CONTENDERS as ALL
from _pictures import OURS, PEER, RULE, looks, write
from _scaling_tables import AXES, CONTENDERS, Spread, along, communication, value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"ours": OURS, "fsdp2": PEER}


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the communication part over each axis that a document has.

    Args:
        content: the document.
        path: a file that ends in ``.svg`` or ``.png``; replaced when it is whole.
    """
    # The object interface: no pyplot, so no global state and no display.
    from matplotlib.figure import Figure

    axes = [axis for axis in AXES if along(content, axis)]
    with looks("scaling"):
        figure = Figure(figsize=(4 * len(axes), 3.8), layout="constrained")
        for panel, axis in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
            _panel(panel, axis, along(content, axis))
        figure.suptitle("Communication part of a training step, seconds", x=0.01, ha="left")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)
        write(figure, path)


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
    panel.grid(visible=True, color=RULE, alpha=0.25, linewidth=0.8)
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
