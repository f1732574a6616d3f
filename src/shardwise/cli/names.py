"""Paths, and names that may be paths, as people write them on a command line."""

from __future__ import annotations

import os
from pathlib import Path

import typer

_MAX_NAME, _MAX_PATH = 255, 4095  # bytes, of Linux: of a file's name, and of a path


def read_path(text: str | Path) -> Path:
    """Read a path, with the home folder in place of ``~`` or ``~user``.

    Raises:
        typer.BadParameter: it is none.
    """
    return Path(read_name(os.fspath(text)))


def read_name(text: str) -> str:
    """Read a name that may be a path, with ``~`` as in a path.

    Raises:
        typer.BadParameter: it is empty, or no file could have that name.
    """
    if not text:
        raise typer.BadParameter("found nothing, expected a name or a path")
    if "\0" in text:
        raise typer.BadParameter(f"found {_brief(text)}, expected a name without null characters")
    expanded = os.path.expanduser(text)
    if text.startswith("~") and expanded == text:
        user = text.partition("/")[0]
        expected = f"a user of this host behind ~ (or ./{user}, if that is a file's name)"
        raise typer.BadParameter(f"found {_brief(text)}, expected {expected}")
    longest = max(len(os.fsencode(name)) for name in expanded.split("/"))
    if longest > _MAX_NAME or len(os.fsencode(expanded)) > _MAX_PATH:
        found = f"{_brief(text)} with {len(text):,} characters"
        expected = f"names of {_MAX_NAME} bytes at most in a path of {_MAX_PATH:,}"
        raise typer.BadParameter(f"found {found}, expected {expected}")
    return expanded


def _brief(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
