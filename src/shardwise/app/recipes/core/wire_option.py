"""The option ``--wire``: wires in one line of text."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from shardwise.transport.wire import Encoding, Wire, WireError, Wires

_SHORT = ", ".join(get_args(Encoding))


def parse_wires(text: str) -> Wires:
    """Read what the command line says: ``int8``, or parts separated by commas.

    ``reduce=int8,error-feedback`` is one wire for all dimensions. ``dp_replicate:reduce=int8``
    names the dimension, and ``;`` separates several.

    Raises:
        WireError: it is something else.
    """
    common, named = Wire(), {}
    for part in text.split(";"):
        name, colon, rest = part.rpartition(":")
        name, made = name.strip(), _parse_one(rest)
        if not colon:
            common = made
        elif not name or name in named:
            raise WireError(repr(text), "each dimension by its name, once")
        else:
            named[name] = made
    if named and not common.is_plain:
        raise WireError(repr(text), "one wire for all dimensions, or wires of named ones")
    return Wires(common, tuple(sorted(named.items())))


def _parse_one(text: str) -> Wire:
    """Read one wire."""
    text = text.strip()
    if text in get_args(Encoding):
        return Wire(gather=text, reduce=text)  # type: ignore[arg-type]  # checked just before
    found: dict[str, object] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        item: object
        if name in ("error-feedback", "error_feedback") and not value:
            name, item = "error_feedback", True
        elif name == "stochastic" and not value:
            name, item = "rounding", name
        elif name == "seed" and value.isdecimal() and len(value) < 20:
            item = int(value)
        elif name in ("gather", "reduce"):
            item = value
        else:
            raise WireError(
                repr(part.strip()),
                f"{_SHORT}, or gather=FORMAT, reduce=FORMAT, error-feedback, stochastic and "
                "seed=N, separated by commas",
            )
        if name in found:
            raise WireError(f"{name} twice in {text!r}", "each once")
        found[name] = item
    assert found.keys() <= {each.name for each in fields(Wire)}
    return Wire(**found)  # type: ignore[arg-type]  # __post_init__ checks the values
