"""SVG in pieces: what a drawing is made of, and its colours for light and dark screens."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

#: Ranks that hold the same block have its colour; ``--h`` is the hue, in degrees.
STYLE = """
svg{--ink:#1d2433;--dim:#5c6678;--line:#fff;--s:62%;--l:80%;--void:#e4e7ee;--mark:#111;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
@media(prefers-color-scheme:dark){svg{--ink:#e8ecf4;--dim:#a3adbf;--line:#14171f;--s:42%;--l:34%;
--void:#2a303c;--mark:#fff}}
.b{fill:hsl(var(--h) var(--s) var(--l));stroke:var(--line);stroke-width:.6}
.b.s{stroke:none}.b.v{fill:var(--void)}
.ring{fill:none;stroke:var(--mark);stroke-width:2;pointer-events:none}
text{fill:var(--ink);font-size:11px}.d{fill:var(--dim);font-size:10px}.t{font-size:8.5px}
.m{text-anchor:middle}.e{text-anchor:end}.n{font-weight:600}text{pointer-events:none}
""".strip().replace("\n", "")


@dataclass(frozen=True)
class Picture:
    """A part of a drawing.

    Attributes:
        width: in the units of the drawing.
        height: in the same.
        body: SVG elements, from (0, 0).
    """

    width: float
    height: float
    body: str

    def at(self, x: float, y: float) -> str:
        """Its elements, moved."""
        return f'<g transform="translate({_n(x)} {_n(y)})">{self.body}</g>'

    def svg(self, label: str, *, alone: bool) -> str:
        """The picture as an element.

        Args:
            label: what it shows, for those who do not see it.
            alone: as a file of its own, with style and size.
        """
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        if not alone:
            return f'<svg {size} role="img" aria-label="{escape(label)}">{self.body}</svg>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} width="{_n(self.width)}" '
            f'height="{_n(self.height)}" role="img" aria-label="{escape(label)}">'
            f"<style>{STYLE}</style>{self.body}</svg>\n"
        )


def escape(text: str) -> str:
    """``text`` for the inside of an element or an attribute."""
    return html.escape(text, quote=True)


def words(x: float, y: float, text: str, kind: str = "") -> str:
    """Text with its baseline at ``y``; ``kind`` are classes of the style."""
    classes = f' class="{kind}"' if kind else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{classes}>{escape(text)}</text>'


def outline(boxes: Sequence[tuple[float, float, float, float]]) -> str:
    """The path around boxes of x, y, width and height."""
    return "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in boxes)


def shape(path: str, hue: float | None, classes: str, data: str, title: str) -> str:
    """A filled path with a tooltip; no hue: the colour of what is empty."""
    style = f' style="--h:{hue:.0f}"' if hue is not None else ""
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    return f'<path class="{classes}" d="{path}"{style}{data}>{tooltip}</path>'


def ring(path: str) -> str:
    """A line around a shape, to mark it. Drawn last, for what is drawn later covers it."""
    return f'<path class="ring" d="{path}"/>'


def _n(number: float) -> str:
    """A number in as few characters as show it to a hundredth."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
