"""Text for people: sizes in units, and characters that a terminal can show safely."""

from __future__ import annotations


def brief_size(nbytes: int) -> str:
    """Format a size in bytes with one decimal: ``1.5 GB``."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def printable(text: str, keep: str = "") -> str:
    """Replace the characters that could control a terminal, except those to ``keep``."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)
