"""Errors of a command line as one line: option, what was found, what was expected."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import cast

import typer

#: The root of all mistakes on a command line. Typer brings it along, without a public name.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])

# What the parsers of different versions of typer say of a value -> what they expected.
_EXPECTED = (
    (re.compile(r"valid (integer|int)\b"), "a whole number"),
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
