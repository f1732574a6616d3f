"""What the pictures of benchmarks have in common: how they look, and how they are written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# On white and on black alike; what is written is made lighter where the reader's screen is dark.
OURS, PEER = "#2f81c4", "#c4661f"
INK, RULE = "#3d444d", "#818b98"
_LIGHT_INK = "#d1d7e0"
_STYLE = (
    "<style>@media (prefers-color-scheme: dark) { "
    f'[style*="fill: {INK}"] {{ fill: {_LIGHT_INK} !important; }} '
    f'[style*="stroke: {INK}"] {{ stroke: {_LIGHT_INK} !important; }} }}</style>'
)


@contextmanager
def looks(salt: str) -> Iterator[None]:
    """Draw meanwhile as all pictures are drawn.

    Args:
        salt: makes the names inside an SVG file, the same ones each time.
    """
    from matplotlib import rc_context

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": salt, "text.color": INK}
    style |= {"font.family": "sans-serif", "font.size": 11, "axes.edgecolor": RULE}
    style |= {"axes.labelcolor": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK}
    style |= {"xtick.color": RULE, "ytick.color": RULE}
    with rc_context(style):
        yield


def write(figure: Figure, path: Path) -> None:
    """Write a picture, whole or not at all.

    Args:
        figure: the picture.
        path: a file that ends in ``.svg`` or ``.png``.
    """
    temporary = path.with_name(f".{path.name}")
    kind = path.suffix.removeprefix(".")
    clock = {"metadata": {"Date": None}} if kind == "svg" else {}
    figure.savefig(temporary, format=kind, transparent=True, dpi=120, **clock)
    if kind == "svg":
        text = temporary.read_text()
        temporary.write_text(text.replace("<defs>", f"{_STYLE}\n <defs>", 1))
    temporary.replace(path)
