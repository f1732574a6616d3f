"""What people read: sizes in words, and text that cannot steer a terminal."""

from __future__ import annotations


def brief_size(nbytes: int) -> str:
    """A size as short as it stays telling: ``1.5 GB``."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def printable(text: str, keep: str = "") -> str:
    """Text without what could steer a terminal, but for the characters to keep."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)
