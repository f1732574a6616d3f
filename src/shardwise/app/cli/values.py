"""Read the values of a command line: names, paths and sizes; describe one that cannot be read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer

_MAX_DIGITS = 25  # of an integer; the largest one of any option has 19
_MAX_SIZE = 2**62  # bytes
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
        raise typer.BadParameter(f"found {brief(text)}, expected a name without null characters")
    expanded = os.path.expanduser(text)
    if text.startswith("~") and expanded == text:
        user = text.partition("/")[0]
        expected = f"a user of this host behind ~ (or ./{user}, if that is a file's name)"
        raise typer.BadParameter(f"found {brief(text)}, expected {expected}")
    longest = max(len(os.fsencode(name)) for name in expanded.split("/"))
    if longest > _MAX_NAME or len(os.fsencode(expanded)) > _MAX_PATH:
        found = f"{brief(text)} with {len(text):,} characters"
        expected = f"names of {_MAX_NAME} bytes at most in a path of {_MAX_PATH:,}"
        raise typer.BadParameter(f"found {found}, expected {expected}")
    return expanded


def brief(text: str) -> str:
    """Return what was found as a message shows it: in quotes, and cut."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def read_integer(text: str | int) -> int:
    """Read an integer, also as people write a large one: ``1e6``.

    Raises:
        typer.BadParameter: it is none, or no computer could count so far.
    """
    try:
        number = Decimal(text)
        is_long = number.is_finite() and number.adjusted() >= _MAX_DIGITS
        exact = number.is_finite() and not is_long and not number % 1
    except ArithmeticError:
        exact = is_long = False
    if not exact:
        limit = f" of at most {_MAX_DIGITS} digits" if is_long else ""
        raise typer.BadParameter(f"found {brief(str(text))}, expected a whole number{limit}")
    return int(number)


#: An integer, among the parameters of a command.
Integer = partial(typer.Option, parser=read_integer, metavar="INTEGER")

# Options that several commands have.
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Layers = Annotated[bool, typer.Option("--layers", help="Show repeated layers one by one.")]
Html = Annotated[
    Path | None,
    typer.Option(
        parser=read_path, metavar="FILE", help="Write a page for browsers.", show_default=False
    ),
]

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
    nbytes = 0.0 if match is None or factor is None else float(match[1]) * factor
    if not 1 <= nbytes < _MAX_SIZE:
        raise typer.BadParameter(f"found {brief(str(text))}, expected a size such as 8MiB or 1.5GB")
    return int(nbytes)


#: The root of all mistakes on a command line. Typer brings it along, without a public name.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])

# What the parsers of different versions of typer say of a value -> what they expected.
_EXPECTED = (
    (re.compile(r"valid (number|float)\b"), "a number"),
    (re.compile(r"not one of (?P<choices>.*?)\.?$"), "one of {choices}"),
)


def describe(error: typer.BadParameter, arguments: Sequence[str]) -> str:
    """Describe an error in one line.

    Args:
        error: what typer raised.
        arguments: the command line, without the program.
    """
    message = " ".join(error.format_message().split())
    param = getattr(error, "param", None)
    options: Sequence[str] = getattr(param, "opts", ())
    own = " ".join(str(error.message).split())
    if options and own.startswith("found "):  # of a parser of ours, which cannot know the option
        is_option = options[0].startswith("-")
        return f"{options[0] if is_option else getattr(param, 'metavar', None)}: {own}"
    found = _value_of(options, arguments)
    if found is None:
        found = os.environ.get(getattr(error.param, "envvar", None) or "") if options else None
    if found is None:
        return message
    for pattern, expected in _EXPECTED:
        match = pattern.search(message)
        if match:
            return f"{options[0]}: found {found!r}, expected {expected.format(**match.groupdict())}"
    return f"{options[0]}: found {found!r}: {message}"


def _value_of(options: Sequence[str], arguments: Sequence[str]) -> str | None:
    """Return the last value of an option, from ``--option value`` or ``--option=value``."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, inline = argument.partition("=")
        if name in options:
            value = inline if equals else following
    return value


def help_if_alone(context: typer.Context) -> None:
    """Show the help of a group of commands that is called without one of them."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
