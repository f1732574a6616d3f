"""What all pages share: their style, and HTML that no name of a user's can break.

A page loads nothing from elsewhere: its style, its data and its scripts are in it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence

from shardwise.base.lazy import resource


def document(title: str, body: Iterable[str], style: str = "", policy: str = "") -> str:
    """Return a page.

    Args:
        title: of the page, as text.
        body: HTML.
        style: a style sheet for what this page alone has.
        policy: the page's content security policy; empty: none.
    """
    allowed = f'<meta http-equiv="Content-Security-Policy" content="{policy}">' if policy else ""
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8">{allowed}',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{resource(__name__, 'page.css')}\n{style}</style></head><body>",
            *body,
            "</body></html>\n",
        )
    )


def escape(text: str) -> str:
    """Escape text for use in an element or an attribute.

    Halves of surrogate pairs, which the name of a file may have, become question marks.
    """
    return html.escape(text.encode(errors="replace").decode(), quote=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in a box that scrolls if it is too long.

    On a narrow page, a row becomes a paragraph, with the heads of its cells.
    """
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-head="{escape(head)}">{escape(cell)}</td>'
            for head, cell in zip(heads, cells, strict=True)
        )
        + "</tr>"
        for cells in rows
    )
    return (
        '<div class="scroll cells" tabindex="0" role="region" aria-label="table"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def bar(parts: Iterable[tuple[str, str, float, str]], mark: str = "") -> str:
    """Return a bar of parts.

    Args:
        parts: each with its name, its size in words, its share of the whole bar from 0 to 1, and
            its color in CSS. One without a share is left out.
        mark: HTML of what lies over the bar.
    """
    shown = [part for part in parts if part[2] > 0]
    pieces = (
        f'<i style="background:{color};width:{100 * share:.3f}%" '
        f'title="{escape(f"{name}: {size}")}"></i>'
        for name, size, share, color in shown
    )
    label = escape(", ".join(f"{name} {size}" for name, size, *_ in shown))
    return f'<div class="bar" role="img" aria-label="{label}">{"".join(pieces)}{mark}</div>'


def keys(colors: Iterable[tuple[str, str]]) -> str:
    """Return what the colors of bars stand for, given names with their colors."""
    rows = (f'<li><i style="background:{color}"></i>{escape(name)}</li>' for name, color in colors)
    return f'<ul class="keys">{"".join(rows)}</ul>'


def as_data(value: object) -> str:
    """Return JSON that may stand inside of an element: nothing in it begins or ends one.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII only
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def data_element(value: object) -> str:
    """Return the element that a script of the page reads: ``document.getElementById("data")``."""
    return f'<script type="application/json" id="data">{as_data(value)}</script>'
