"""Sizes as people write them on a command line."""

from __future__ import annotations

import re

import typer

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def read_size(text: str | int) -> int:
    """Read a size in bytes: ``8MiB``, ``1.5GB``, ``4096``.

    Raises:
        typer.BadParameter: it is none.
    """
    match = _SIZE.fullmatch(str(text).strip())
    unit = match[2].lower().removesuffix("b") if match else "?"
    factor = {**_UNITS, **_BINARY}.get(unit)
    if match is None or factor is None:
        raise typer.BadParameter(f"found {text!r}, expected a size such as 8MiB or 1.5GB")
    return int(float(match[1]) * factor)
