"""Options generated from frozen configurations: a default, its type and its help stand there alone.

    configuration      fields with metadata, and fields that are configurations themselves
    Options            what a command takes of it
    with_options       the function that typer sees, with a parameter for each option

What was not given is known, so that it can take a default that depends on what was: on ``--model``.

Of the libraries for this, those for typer (typantic, pydantic-typer) want models of pydantic, and
others (tyro, simple-parsing, jsonargparse) are parsers of their own, which name the options of
inner configurations ``--train.output.out``.
"""

from __future__ import annotations

import dataclasses
import enum
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import typer

from shardwise.app.cli.values import read_integer, read_name, read_path
from shardwise.app.recipes.core.config import OptionError, check_bounds
from shardwise.app.recipes.core.option import (
    BY_MODEL,
    GROUP,
    OPTION,
    Group,
    Option,
    Reads,
    option_name,
)

C = TypeVar("C")
Keys = tuple[str, ...]  # names of the fields that lead to a setting

_ARGUMENTS = "arguments"


@dataclass(frozen=True)
class Setting:
    """A field of a configuration that is an option."""

    keys: Keys
    option: Option
    kind: Any  # its type, without None
    default: Any
    group: Group | None  # what it belongs to, if it goes with one value of another setting

    @property
    def name(self) -> str:
        """The option; both flags of what is on or off: ``--nested-fsdp/--no-nested-fsdp``."""
        name = self.option.name or option_name(self.keys[-1])
        alone = self.kind is bool and "/" not in name
        return f"{name}/--no-{name[2:]}" if alone else name


@dataclass(frozen=True, kw_only=True)
class Options(Generic[C]):
    """The options that one configuration becomes.

    Attributes:
        default: the configuration with all its defaults.
        without: fields that are no options of this command.
        help: help of fields that mean something special here.
        by_model: fields whose default depends on ``--model``.
    """

    default: C
    without: frozenset[str] = frozenset()
    help: Mapping[str, str] = dataclasses.field(default_factory=dict)
    by_model: frozenset[str] = frozenset()

    def parameters(self) -> Iterator[Parameter]:
        """Return the parameters of a command, in the order of the fields."""
        for setting in self.settings():
            yield from self._parameters_of(setting)

    def values_of(self, config: C) -> Iterator[tuple[Setting, Any]]:
        """Return all settings with their values in a configuration; None: it has none."""
        for setting in self.settings():
            value: Any = config
            for key in setting.keys:
                value = None if value is None else getattr(value, key)
            yield setting, value

    def read(
        self,
        given: Mapping[str, Any],
        default: C | None = None,
        file: Mapping[Keys, Any] | None = None,
    ) -> C:
        """Return the configuration that the options of a command line ask for.

        Args:
            given: values by the names of parameters in the order of the command line, None where
                not given.
            default: what the others are; None: as in :attr:`default`.
            file: values that a file gives, by fields; the command line wins.

        Raises:
            OptionError: options contradict each other.
        """
        config = self.default if default is None else default
        changes: dict[Keys, Any] = {}
        groups: dict[Keys, Group] = {}
        for setting, usual in self.values_of(config):
            value = _value_of(setting, given, (file or {}).get(setting.keys), usual)
            if value is not None:
                changes[setting.keys] = value
            if setting.group is not None:
                groups[setting.keys[:-1]] = setting.group
        for keys, group in groups.items():
            inside = [name for name in changes if name[: len(keys)] == keys]
            decided = _find(_changed(config, _outside(changes, keys)), group.setting)
            if decided is group.value:
                config = _changed(config, {keys: group.default})
            elif inside:
                found = _find_setting(self.settings(), inside[0])
                raise OptionError(
                    _names_of(found)[0],
                    f"{group.setting} {decided.value}",
                    f"{option_name(group.setting)} {group.value.value} with it",
                )
        changed: C = _changed(config, changes)
        check_bounds(changed)
        return changed

    def settings(self) -> Iterator[Setting]:
        """Return all settings that are options, in the order of the fields."""
        yield from _settings_of(self.default, (), None, self.without)

    def _parameters_of(self, setting: Setting) -> Iterator[Parameter]:
        option = setting.option
        name = setting.keys[-1]
        text = self.help.get(name, option.help)
        if "{choices}" in text:
            text = text.format(choices=", ".join(each.value for each in self.choices(setting)))
        if option.flags:
            for flag, (_, flag_help) in option.flags.items():
                yield _parameter(flag, bool, option, flag_help, default=False)
            for flag in option.former:
                yield _parameter(flag, bool, option, text, default=False, hidden=True)
            return
        if option.parts:
            for (part, part_help), default in zip(
                option.parts.items(), setting.default, strict=True
            ):
                yield _parameter(part, float, option, part_help, default=default)
            return
        default = setting.default
        if name in self.by_model:
            option, default = dataclasses.replace(option, shown=BY_MODEL), None
        first, *others = _names_of(setting)
        if setting.kind is bool:
            default = False  # of the flag
        yield _parameter(first, setting.kind, option, text, default=default)
        for other in others:
            yield _parameter(other, setting.kind, option, text, default=default, hidden=True)
        if option.takes_arguments:
            yield _arguments()

    def choices(self, setting: Setting) -> list[enum.Enum]:
        """Return the values of an enum, but those that need a group which is no option here."""
        needed = {
            field.metadata[GROUP].value
            for config in _configurations(self.default)
            for field in dataclasses.fields(config)
            if GROUP in field.metadata and field.name in self.without
        }
        return [value for value in setting.kind if value not in needed]


def with_options(
    act: Callable[[Mapping[str, Any]], None],
    options: Sequence[Options[Any]],
    help_text: str,
    more: Sequence[Parameter] = (),
) -> Callable[..., None]:
    """Return a function for typer, with a parameter for each option.

    Args:
        act: what the command does, with the values of all options by the names of parameters.
        options: of the command, in the order of its help.
        help_text: of the command.
        more: parameters that no configuration has, such as arguments.
    """
    parameters = [*more, *(each for group in options for each in group.parameters())]

    def command(context: typer.Context, **values: Any) -> None:
        def is_default(name: str) -> bool:
            source = context.get_parameter_source(name)
            return source is None or source.name == "DEFAULT"

        # In the order of the command line, which decides between two names of one setting.
        act({name: None if is_default(name) else values[name] for name in context.params})

    own = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__doc__ = help_text
    command.__signature__ = Signature([own, *parameters])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (own, *parameters)}
    return command


# -- from fields to settings -----------------------------------------------------------------------


def _settings_of(
    config: Any, keys: Keys, group: Group | None, without: frozenset[str]
) -> Iterator[Setting]:
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        if field.name in without:
            continue
        value, inner = getattr(config, field.name), (*keys, field.name)
        if OPTION in field.metadata:
            kind = _without_none(hints[field.name])
            yield Setting(inner, field.metadata[OPTION], kind, value, group)
        elif GROUP in field.metadata:
            within: Group = field.metadata[GROUP]
            yield from _settings_of(within.default, inner, within, without)
        elif dataclasses.is_dataclass(value):
            yield from _settings_of(value, inner, group, without)


def _configurations(config: Any) -> Iterator[Any]:
    """Return a configuration and all that it holds."""
    yield config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _configurations(value)


def _without_none(hint: Any) -> Any:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(hint) else hint


# -- from settings to parameters -------------------------------------------------------------------


def _names_of(setting: Setting) -> list[str]:
    """Return the names of an option: the one that is shown, and those that are not.

    Of ``--on/--off`` the flag that changes the default is shown.
    """
    on, _, off = setting.name.partition("/")
    pair = [off, on] if off and setting.default else [on, off]
    return [*filter(None, pair), *setting.option.former]


def parameter_name(name: str) -> str:
    """Return the name of the parameter of an option: ``batch_size`` for ``--batch-size``."""
    parameter = name.removeprefix("--").replace("-", "_")
    return f"{parameter}_" if keyword.iskeyword(parameter) else parameter


def _parameter(
    name: str, kind: Any, option: Option, text: str, *, default: Any, hidden: bool = False
) -> Parameter:
    parser: Any = None
    if kind is Path:
        parser = read_path
    elif kind is int:
        parser = read_integer
    elif option.reads is Reads.NAME:
        parser = read_name
    if get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]], None  # type: ignore[misc]
    complete = None
    if option.completions:

        def complete(incomplete: str) -> list[str]:
            return [each for each in option.completions if each.startswith(incomplete)]

    info = typer.Option(
        name,
        help=text,
        rich_help_panel=option.panel,
        metavar=option.metavar or ("INTEGER" if kind is int else None),
        show_default=option.shown or default is not None,
        envvar=option.env,
        parser=parser,
        hidden=hidden,
        autocompletion=complete,
    )
    return Parameter(
        parameter_name(name),
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, info],
    )


def _arguments() -> Parameter:
    info = typer.Argument(parser=read_name, hidden=True, metavar="FILES")
    return Parameter(
        _ARGUMENTS,
        Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[list[str] | None, info],
    )


# -- from a command line to a configuration --------------------------------------------------------


def _value_of(setting: Setting, given: Mapping[str, Any], filed: Any, usual: Any) -> Any:
    """Return what a command line says about a setting, else ``filed``; None: nothing.

    The parts of a setting that neither says are those of ``usual``.
    """
    option = setting.option
    if option.flags:
        flags = {flag: value for flag, (value, _) in option.flags.items()}
        flags |= dict.fromkeys(option.former, next(iter(flags.values())))
        chosen = [flag for flag in flags if given[parameter_name(flag)]]
        values = {flags[flag] for flag in chosen}
        if len(values) > 1:
            raise OptionError(chosen[0], f"{chosen[-1]} too", "one of the two")
        return values.pop() if values else filed
    if option.parts:
        parts = [given[parameter_name(part)] for part in option.parts]
        if filed is not None:
            pairs = zip(parts, filed, strict=True)
            parts = [other if part is None else part for part, other in pairs]
        if all(part is None for part in parts):
            return None
        return tuple(
            default if part is None else part for part, default in zip(parts, usual, strict=True)
        )
    names = _names_of(setting)
    by_parameter = {parameter_name(name): name for name in names}
    said = [
        (by_parameter[parameter], value)
        for parameter, value in given.items()
        if parameter in by_parameter and value is not None
    ]
    name, value = said[-1] if said else (None, None)  # the last one counts, as of one option
    if setting.kind is bool and said:
        return setting.name.partition("/")[2] != name
    if get_origin(setting.kind) is not tuple:
        return value if said else filed
    more = given[_ARGUMENTS] or () if option.takes_arguments else ()
    if more and not value:
        expected = f"options; what stands behind {names[0]} belongs to it"
        raise OptionError(_ARGUMENTS, " ".join(more), expected)
    return (*value, *more) if value else filed


def _changed(config: Any, changes: Mapping[Keys, Any]) -> Any:
    """Return a configuration with other values of some settings, wherever they are in it."""
    own: dict[str, Any] = {keys[0]: value for keys, value in changes.items() if len(keys) == 1}
    inner: dict[str, dict[Keys, Any]] = {}
    for keys, value in changes.items():
        if len(keys) > 1:
            inner.setdefault(keys[0], {})[keys[1:]] = value
    for name, within in inner.items():
        own[name] = _changed(own.get(name, getattr(config, name)), within)
    return dataclasses.replace(config, **own)


def _outside(changes: Mapping[Keys, Any], keys: Keys) -> dict[Keys, Any]:
    return {name: value for name, value in changes.items() if name[: len(keys)] != keys}


def _find(config: Any, name: str) -> Any:
    """Return the value of a field of a configuration, or of one that it holds."""
    return next(getattr(each, name) for each in _configurations(config) if hasattr(each, name))


def _find_setting(settings: Iterator[Setting], keys: Keys) -> Setting:
    return next(setting for setting in settings if setting.keys == keys)
