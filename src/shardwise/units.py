"""Sizes in the words of people."""

from __future__ import annotations


def brief_size(nbytes: int) -> str:
    """A size as short as it stays telling: ``1.5 GB``."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
