"""Text for people: sizes in units, names, and characters that a terminal can show safely."""

from __future__ import annotations

from collections.abc import Sequence, Sized


def binary_size(nbytes: float) -> str:
    """Format a size in bytes with binary units and three digits or more: ``1.50 GiB``."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{nbytes:.0f} B"
    return f"{size:,.{2 if abs(size) < 10 else 1}f} {unit}"


def seconds(value: float) -> str:
    """Format a duration with three digits: ``1.23 s``, ``45.6 ms``, ``789 µs``."""
    if not value:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(value) * factor >= 1 or unit == "µs":
            break
    size = abs(value) * factor
    return f"{value * factor:.{2 if size < 10 else 1 if size < 100 else 0}f} {unit}"


def counted(things: Sized | int, noun: str, plural: str | None = None) -> str:
    """``1 parameter``, ``2 parameters``; or another plural."""
    count = things if isinstance(things, int) else len(things)
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """``a, b, c and 4 more``: some names of several, and how many there are beyond them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed, as where its source runs."""
    from importlib import metadata  # takes long, and few ask

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def one_line(reason: object, most: int = 300) -> str:
    """Return why something failed in one line, cut to ``most`` characters."""
    return " ".join(str(reason).split())[:most]


def show(text: object) -> None:
    """Print text in which files, other hosts or users may have a say, as a terminal can show it."""
    print(printable(str(text), keep="\n\t"), flush=True)


def printable(text: str, keep: str = "") -> str:
    """Replace the characters that could control a terminal, except those to ``keep``."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)
