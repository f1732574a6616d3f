"""The picture of ``strategies`` documents: one panel for each link, a bar for each strategy."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _pictures import INK, OURS, PEER, RULE, looks, write
from _strategies_tables import seconds_by_round
from _strategy_contenders import STRATEGIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the step time of every strategy over every link.

    Args:
        content: the document.
        path: a file that ends in ``.svg`` or ``.png``; replaced when it is whole.
    """
    # The object interface: no pyplot, so no global state and no display.
    from matplotlib.figure import Figure

    cases = sorted(content["cases"], key=lambda case: -case["gbit"])
    with looks("strategies"):
        figure = Figure(figsize=(3.6 * len(cases) + 1.6, 4.2), layout="constrained")
        panels = figure.subplots(1, len(cases), squeeze=False, sharey=True)[0]
        for panel, case in zip(panels, cases, strict=True):
            _panel(panel, case)
        figure.suptitle(
            "Training step over two hosts, seconds (dashed: compute only)", x=0.01, ha="left"
        )
        write(figure, path)


def _panel(panel: Axes, case: dict[str, Any]) -> None:
    names = [name for name in case["contenders"] if name != "floor"]
    middles = [median(seconds_by_round(case, name)) for name in names]
    colors = [PEER if name.startswith("fsdp2") else OURS for name in names]
    bars = panel.barh([STRATEGIES[name].title for name in names], middles, color=colors, height=0.7)
    panel.bar_label(bars, [f"{middle:.2f}" for middle in middles], padding=4, color=INK)
    if "floor" in case["contenders"]:
        panel.axvline(median(seconds_by_round(case, "floor")), color=INK, ls="--", lw=1)
    panel.set_title(
        f"{case['gbit']:g} Gbit/s, {case['tokens']:,} tokens a rank", loc="left", fontsize=11
    )
    panel.margins(x=0.2)
    panel.set_xlim(left=0)
    if not panel.yaxis_inverted():  # the panels share it
        panel.invert_yaxis()
    panel.grid(visible=True, axis="x", color=RULE, alpha=0.25, linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_axisbelow(True)
