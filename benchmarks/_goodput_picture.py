"""The picture of a ``goodput`` document: goodput over the rate of faults, and loss over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from _goodput_tables import contenders_of, goodputs, is_diloco, runs_of, title
from _pictures import OURS, PEER, RULE, looks, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = ("-", "--", ":", "-.")


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw what is left of the speed at each rate, and losses.

    Args:
        content: the document.
        path: a file that ends in ``.svg`` or ``.png``; replaced when it is whole.
    """
    # The object interface: no pyplot, so no global state and no display.
    from matplotlib.figure import Figure

    cases = content["cases"]
    with looks("goodput"):
        figure = Figure(figsize=(4.4 * (len(cases) + 1), 4), layout="constrained")
        *panels, last = figure.subplots(1, len(cases) + 1, squeeze=False)[0]
        for panel, case in zip(panels, cases, strict=True):
            _goodput_panel(panel, case)
        _loss_panel(last, cases[0])
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)
        write(figure, path)


def _goodput_panel(panel: Axes, case: dict[str, Any]) -> None:
    for name, color, dash in _styles(case):
        found = goodputs(case, name)
        panel.plot(
            list(found),
            [100 * kept for kept in found.values()],
            color=color,
            ls=dash,
            marker="o",
            markersize=5,
            linewidth=2,
            label=title(name),
        )
    what = "kills" if case["fault"] == "kill" else f"pauses of {case['settings']['pause']:g} s"
    panel.set_title(
        f"Useful tokens per second, % of undisturbed, over {what}", loc="left", fontsize=11
    )
    panel.set_xlabel(f"{what} a minute, {case['settings']['ranks']} processes")
    panel.set_ylim(0, 105)
    _plain(panel)


def _loss_panel(panel: Axes, case: dict[str, Any]) -> None:
    for name, color, dash in _styles(case):
        for rate, runs in runs_of(case, name).items():
            for run in runs:
                points = [(tokens / 1000, loss) for tokens, loss in run["losses"]]
                if not points:
                    continue
                where, losses = zip(*(points if rate == 0 else points[-1:]), strict=True)
                if rate == 0:
                    panel.plot(where, losses, color=color, ls=dash, linewidth=1.5)
                else:
                    panel.plot(where, losses, color=color, marker="o", markersize=5, ls="")
    panel.set_title(
        "Loss (lines: undisturbed, dots: at the end, disturbed)", loc="left", fontsize=11
    )
    panel.set_xlabel("useful tokens, thousands")
    _plain(panel)


def _styles(case: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A color and a dash for each contender."""
    names = contenders_of(case)
    found = []
    for ours, color in ((True, OURS), (False, PEER)):
        of = [name for name in names if is_diloco(name) is ours]
        found += [(name, color, _DASHES[i % len(_DASHES)]) for i, name in enumerate(of)]
    return found


def _plain(panel: Axes) -> None:
    panel.grid(visible=True, color=RULE, alpha=0.25, linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_axisbelow(True)
