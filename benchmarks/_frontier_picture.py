"""The picture of a ``frontier`` document: loss over bytes, one line for each kind of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _frontier_tables import BESIDE, bytes_beside, kind_of, losses_beside, title_of
from _pictures import INK, OURS, PEER, RULE, looks, write

_DILOCO = "#3f9c5a"


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the frontier of a document's first case.

    Args:
        content: the document.
        path: a file that ends in ``.svg`` or ``.png``; replaced when it is whole.
    """
    # The object interface: no pyplot, so no global state and no display.
    from matplotlib.figure import Figure

    case = content["cases"][0]
    with looks("frontier"):
        figure = Figure(figsize=(9, 5.6), layout="constrained")
        panel = figure.subplots()
        for name in case["contenders"]:
            ratios = [100 * (ratio - 1) for ratio in losses_beside(case, name)]
            middle = sum(ratios) / len(ratios)
            kind = kind_of(name)
            color = {"ddp": PEER, "diloco": _DILOCO}.get(kind, OURS)
            panel.errorbar(
                bytes_beside(case, name),
                middle,
                yerr=[[middle - min(ratios)], [max(ratios) - middle]],
                color=color,
                marker={"full": "s", "ddp": "D"}.get(kind, "o"),
                markersize=6,
                capsize=3,
            )
        _label(panel, case)
        panel.set_xscale("log")
        panel.axhline(0, color=INK, ls="--", lw=1)
        panel.set_xlabel("bytes that a host sends per step, beside fp32 gradients")
        panel.set_ylabel("loss above fp32, %")
        panel.grid(visible=True, color=RULE, alpha=0.25, linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
        settings = case["settings"]
        figure.suptitle(
            f"Loss after {settings['steps']:,} steps on {settings['replicas']} hosts, mean and "
            f"range of {settings['seeds']} seeds",
            x=0.01,
            ha="left",
        )
        write(figure, path)


def _label(panel: Any, case: dict[str, Any]) -> None:
    """Write names beside the marks of DiLoCo; those of synchronous ones, in a list."""
    for name in case["contenders"]:
        if kind_of(name) != "diloco":
            continue
        top = max(100 * (ratio - 1) for ratio in losses_beside(case, name))
        panel.annotate(
            title_of(name).removeprefix("DiLoCo, ").replace(", ", "\n"),
            (bytes_beside(case, name), top),
            textcoords="offset points",
            xytext=(0, 6),
            ha="center",
            color=_DILOCO,
            fontsize=8,
        )
    near = [name for name in case["contenders"] if kind_of(name) != "diloco" and name != BESIDE]
    lines = []
    for name in sorted(near, key=lambda name: bytes_beside(case, name)):
        ratios = losses_beside(case, name)
        above = 100 * (sum(ratios) / len(ratios) - 1)
        lines.append(f"{title_of(name)}: {bytes_beside(case, name):.2f} x, {above:+.2f} %")
    panel.annotate(
        "\n".join(["synchronous, bytes and loss:", *lines]),
        (1, 1),
        xycoords="axes fraction",
        ha="right",
        va="top",
        color=OURS,
        fontsize=8,
    )
