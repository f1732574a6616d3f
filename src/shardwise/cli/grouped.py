"""Options that belong together, as one parameter of a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from inspect import Parameter, signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its parameters that are dataclasses.

    Args:
        command: takes keywords only. Where the default of a parameter is a frozen dataclass, its
            fields are annotated as options, and that default has theirs.

    Returns:
        What typer shall see: the same command, with the fields as parameters of its own.
    """
    taken = list(signature(command).parameters.values())
    groups: dict[str, Any] = {
        each.name: each.default for each in taken if is_dataclass(each.default)
    }
    hints = get_type_hints(command, include_extras=True)

    def parameters() -> Iterator[Parameter]:
        for each in taken:
            if each.name in groups:
                yield from _options_of(each.default)
            else:
                yield each.replace(annotation=hints[each.name])

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, default in groups.items():
            own = {field.name: given.pop(field.name) for field in fields(default)}
            given[name] = replace(default, **own)
        command(**given)

    shown = list(parameters())
    call.__signature__ = signature(command).replace(parameters=shown)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in shown}
    return call


def _options_of(default: Any) -> Iterator[Parameter]:
    hints = get_type_hints(type(default), include_extras=True)
    for field in fields(default):
        yield Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=getattr(default, field.name),
            annotation=hints[field.name],
        )
