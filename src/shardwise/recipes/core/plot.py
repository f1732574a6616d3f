"""The charts of a run: loss curve and confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, LIGHT, RED = "#1f5fa8", "#a9c6e6", "#c0392b"


def plot_loss(records: Sequence[dict[str, Any]], title: str, unit: str, path: Path) -> None:
    """Draw training and validation loss over steps into a PNG.

    Args:
        records: lines of a ``metrics.jsonl``.
        title: above the chart.
        unit: of the loss, ``nats per token``.
        path: the file; replaced once the new one is complete.
    """
    train, valid = _curve(records, "loss"), _curve(records, "validation_loss")
    figure = _figure(8, 4.5)
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color=LIGHT, linewidth=1, label="training, every step")
        axes.plot(steps, smooth(losses), color=BLUE, linewidth=2, label="training, smoothed")
    if valid:
        steps, losses = zip(*valid, strict=True)
        axes.plot(steps, losses, "o-", color=RED, markersize=5, label="validation")
        axes.annotate(
            f"{losses[-1]:.3g}",
            (steps[-1], losses[-1]),
            textcoords="offset points",
            xytext=(0, 9),
            ha="right",
            color=RED,
        )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss ({unit})")
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if train or valid:
        axes.legend(frameon=False)
    _save(figure, path)


def _curve(records: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Steps and values; a value that was no finite number is written as none, and left out."""
    return [(each["step"], each[name]) for each in records if each.get(name) is not None]


def plot_confusion(
    counts: Sequence[Sequence[int]], classes: Sequence[str], title: str, path: Path
) -> None:
    """Draw a confusion matrix into a PNG.

    Args:
        counts: number of images by class (row) and predicted class (column).
        classes: their names.
        title: above the chart.
        path: the file; replaced once the new one is complete.
    """
    few = len(classes) <= 20  # beyond, neither names nor numbers could be read
    total, right = sum(map(sum, counts)), sum(row[i] for i, row in enumerate(counts))
    # By row, so that a rare class is as legible as a frequent one. Mistakes are few: the root
    # makes them visible beside what is right.
    shades = [[(n / max(1, sum(row))) ** 0.5 for n in row] for row in counts]
    figure = _figure(7.2, 6.4)
    axes = figure.add_subplot()
    axes.imshow(shades, cmap="Blues", vmin=0, vmax=1)
    axes.set_title(f"{title}: {right:,} of {total:,} correct", loc="left", fontsize=11)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("class")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if few:
        long = max(map(len, classes)) > 3
        axes.set_xticks(range(len(classes)), classes, rotation=90 if long else 0)
        axes.set_yticks(range(len(classes)), classes)
        for i, row in enumerate(counts):
            for j, n in enumerate(row):
                if n:
                    color = BLUE if i == j else RED
                    color = "white" if shades[i][j] > 0.45 else color  # legible on its ground
                    axes.text(j, i, f"{n}", ha="center", va="center", color=color, fontsize=9)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    # The object interface: no pyplot, so no global state and no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)


def smooth(values: Sequence[float], reach: int = 10) -> list[float]:
    """Return means over the neighbors on both sides, so that the curve does not lag.

    Args:
        values: one per step.
        reach: neighbors on each side. Fewer at the beginning, where the loss falls steeply.
    """
    smoothed = []
    for index in range(len(values)):
        near = min(reach, index)
        window = values[index - near : index + near + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed
