"""The picture of an ``adamw8bit`` document: the loss of each model, and how far curves part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from _adamw8bit_tables import TITLES, WINDOW, Curves, curves
from _pictures import INK, OURS, PEER, RULE, looks, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"adamw": INK, "ours": OURS, "torchao": PEER, "adamw-foreach": RULE}


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the losses above, and their difference from fp32 in percent below.

    Args:
        content: the document.
        path: a file that ends in ``.svg`` or ``.png``; replaced when it is whole.
    """
    # The object interface: no pyplot, so no global state and no display.
    from matplotlib.figure import Figure

    models = curves(content)
    with looks("adamw8bit"):
        figure = Figure(figsize=(4.6 * len(models), 5.4), layout="constrained")
        panels = figure.subplots(2, len(models), squeeze=False, sharex="col", height_ratios=(3, 2))
        for above, below, model in zip(*panels, models, strict=True):
            _panels(above, below, model)
        figure.suptitle(f"Loss, mean of {WINDOW} steps", x=0.01, ha="left")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False)
        write(figure, path)


def _panels(above: Axes, below: Axes, model: Curves) -> None:
    for name in model.names:
        look: dict[str, Any] = {"color": COLORS[name], "linewidth": 1.5}
        for number, smooth in enumerate(model.smooth(name)):
            label = None if number else TITLES[name]
            above.plot(_last_steps(model, smooth), smooth, label=label, **look)
        for apart in model.apart(name):
            below.plot(_last_steps(model, apart), [100 * each for each in apart], **look)
    above.set_title(model.title, loc="left", fontsize=11)
    below.set_ylabel("difference from fp32, %")
    below.set_xlabel("steps")
    for panel in (above, below):
        panel.grid(visible=True, color=RULE, alpha=0.25, linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)


def _last_steps(model: Curves, means: list[float]) -> range:
    """The last step of each mean."""
    last = len(model.case["losses"][model.names[0]])
    return range(last - len(means) + 1, last + 1)
