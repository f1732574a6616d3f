"""Options of a command: how values are read, and how options come from a configuration.

    Options            what a command takes of a configuration
    with_options       the function that typer sees, with a parameter for each option

What was not given is known, so that it can take a default that depends on what was: on ``--model``.

Of the libraries that make a command line of typed configurations, two were tried. tyro reports a
mistake as a box of several lines, has one panel for each class, and shows every old name. cyclopts
forgets the other values of a default configuration, such as those of a model, where one is given.
"""

from __future__ import annotations

import dataclasses
import enum
import keyword
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, cast, get_args, get_origin

import typer
from typer.core import TyperGroup

from shardwise.checkpoint.disk.place import Place, is_url, place_of
from shardwise.insight.schema.option import (
    BY_MODEL,
    OPTION,
    Config,
    Option,
    Reads,
    kinds_of,
    option_name,
    require,
)
from shardwise.insight.schema.words import FORMS, own_word

_MAX_DIGITS = 25  # of an integer; the largest one of any option has 19
_MAX_SIZE = 2**62  # bytes
_MAX_NAME, _MAX_PATH = 255, 4095  # bytes, of Linux: of a file's name, and of a path


def read_path(text: str | Path) -> Path:
    """Read a path, with the home folder in place of ``~`` or ``~user``.

    Raises:
        typer.BadParameter: it is none, or a URL, of which a folder would be made.
    """
    if is_url(os.fspath(text)):
        raise typer.BadParameter(
            "found a URL, expected a path of this host; of what is kept in object stores, there "
            "are runs, with --out, and checkpoints, with shardwise.checkpoint.save and load"
        )
    return Path(read_name(os.fspath(text)))


def read_place(text: str | os.PathLike[str]) -> Place:
    """Read a path of this host, as :func:`read_path` does, or the URL of an object store.

    Raises:
        typer.BadParameter: it is neither.
    """
    text = os.fspath(text)
    if not is_url(text):
        return read_path(text)
    try:
        return place_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("path: ")) from None


def read_name(text: str) -> str:
    """Read a name that may be a path, with ``~`` as in a path, or the URL of an object store.

    Raises:
        typer.BadParameter: it is empty, no file could have that name, or it is a URL of no store or
            with credentials, which no message must show.
    """
    if is_url(text):
        return os.fspath(read_place(text))
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


def read_number(text: str | float) -> float:
    """Read a number.

    Raises:
        typer.BadParameter: it is none.
    """
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"found {brief(str(text))}, expected a number") from None


def read_choice(values: Mapping[str, Any], text: str) -> Any:
    """Read the name of a value.

    Raises:
        typer.BadParameter: it is that of none.
    """
    name = own_word(text, values)
    if name not in values:
        raise typer.BadParameter(f"found {brief(text)}, expected one of {', '.join(values)}")
    return values[name]


# Kinds of parameters of a command.
PathArgument = partial(typer.Argument, parser=read_path, show_default=False)
PlaceArgument = partial(typer.Argument, parser=read_place, show_default=False)
NameArgument = partial(typer.Argument, parser=read_name, show_default=False)
PathOption = partial(typer.Option, parser=read_path, metavar="FILE")
Integer = partial(typer.Option, parser=read_integer, metavar="INTEGER")

# Options that several commands have.
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Layers = Annotated[bool, typer.Option("--layers", help="Show repeated layers one by one.")]
Html = Annotated[Path | None, PathOption(help="Write a page for browsers.", show_default=False)]


def check_page(path: Path) -> None:
    """Check that ``--html`` can become a file, before the work that it is to show.

    Raises:
        OptionError: it is a folder, or its folder does not exist.
    """
    require(not path.is_dir(), "--html", f"{path}, a folder", "the name of a file")
    folder = path.absolute().parent
    require(folder.is_dir(), "--html", f"{path} in {folder}", "a folder that exists")


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


def describe(error: typer.BadParameter) -> str:
    """Describe an error in one line."""
    unknown = getattr(error, "option_name", "") if hasattr(error, "possibilities") else ""
    message = " ".join(str(error.message).split())
    commands = ""
    if error.ctx is not None and isinstance(error.ctx.command, TyperGroup):
        commands = ", ".join(error.ctx.command.list_commands(error.ctx))
    if commands and unknown and not error.possibilities:  # type: ignore[attr-defined]
        return f"{unknown}: found in front of the command, expected one of {commands} first"
    if commands and message.startswith("No such command '") and message.endswith("'."):
        return f"{message[:-1]}, expected one of {commands}"
    if form := FORMS.get(unknown):
        return f"{message}; did you mean {form}?"
    if not message.startswith("found "):
        return " ".join(error.format_message().split())
    # Of a parser of ours, which cannot know the option.
    [name, *_] = error.param.opts  # type: ignore[union-attr]
    return f"{name if name.startswith('-') else error.param.metavar}: {message}"  # type: ignore[union-attr]


def help_if_alone(context: typer.Context) -> None:
    """Show the help of a group of commands that is called without one of them."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


C = TypeVar("C")
Keys = tuple[str, ...]  # names of the fields that lead to a setting


class Unset(enum.Enum):
    """``none``, as the value of an option that has none by default."""

    UNSET = "none"


def _read_or_unset(read: Callable[[str], Any], text: str) -> Any:
    return Unset.UNSET if text == Unset.UNSET.value else read(text)


#: What reads a text of a type; a flag has one in a file alone.
_READERS: Mapping[Any, Callable[[str], Any]] = {
    bool: partial(read_choice, {"true": True, "false": False}),
    int: read_integer,
    float: read_number,
    Path: read_path,
    os.PathLike[str]: read_place,  # which may be a URL
}


@dataclass(frozen=True)
class Setting:
    """A field of a configuration that is an option.

    Attributes:
        keys: the fields that lead to it.
        option: how this command shows it.
        kind: its type, without None.
        default: its value in the default configuration.
    """

    keys: Keys
    option: Option
    kind: Any
    default: Any

    @property
    def name(self) -> str:
        """The option; both flags of what is on or off: ``--nested-fsdp/--no-nested-fsdp``."""
        name = self.option.name or option_name(self.keys[-1])
        alone = self.kind is bool and "/" not in name
        return f"{name}/--no-{name[2:]}" if alone else name

    @property
    def key(self) -> str:
        """What a file calls it, with its hyphens: ``--batch-size``; of several flags the first."""
        return next(iter(self.flags), self.name.partition("/")[0])

    @property
    def choices(self) -> dict[str, enum.Enum]:
        """The members of an enum, by their values."""
        members: Any = self.kind if isinstance(self.kind, enum.EnumMeta) else ()
        return {str(each.value): each for each in members}

    @property
    def read(self) -> Callable[[str], Any]:
        """What reads a text for it; one of several, if it takes several."""
        if self.option.reads is Reads.NAME:
            return read_name
        if callable(self.option.reads):
            read: Callable[[str], Any] = str  # the configuration reads it
        elif self.choices:
            read = partial(read_choice, self.choices)
        else:
            read = _READERS.get(self.kind, str)
        is_text = self.kind is Path or self.option.reads is Reads.TEXT  # which may be called none
        return partial(_read_or_unset, read) if self.default is None and not is_text else read

    @property
    def flags(self) -> dict[str, Any]:
        """What each of its flags stands for; empty: it takes a value."""
        if self.kind is bool:
            return dict(zip(self.name.split("/"), (True, False), strict=True))
        return {flag: value for flag, (value, _) in self.option.flags.items()}


@dataclass(frozen=True, kw_only=True)
class Options(Generic[C]):
    """The options that one configuration becomes.

    Attributes:
        default: the configuration with all its defaults.
        without: fields that are no options of this command.
        shows: what this command says of a field in other words than the field itself, by its name:
            attributes of :class:`Option`.
        by_model: fields whose default depends on ``--model``.
    """

    default: C
    without: frozenset[str] = frozenset()
    shows: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    by_model: frozenset[str] = frozenset()

    def parameters(self) -> Iterator[Parameter]:
        """Return the parameters of a command, in the order of the fields."""
        for setting in self.settings():
            option = setting.option
            for flag, value in setting.flags.items():
                # Of --on and --off, the one that changes the default is shown.
                text = "" if value is setting.default else option.help
                _, text = option.flags.get(flag, (value, text))
                yield _parameter(setting, flag, bool, text, default=False, hidden=not text)
            if not setting.flags:
                default = None if setting.keys[-1] in self.by_model else setting.default
                yield _parameter(setting, setting.key, setting.kind, option.help, default=default)

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
        file: Mapping[str, Any] | None = None,
    ) -> C:
        """Return the configuration that the options of a command line ask for.

        Args:
            given: values by the names of parameters in the order of the command line, None where
                not given.
            default: what the others are; None: as in :attr:`default`.
            file: values that a file gives, by :attr:`Setting.key`; the command line wins.

        Raises:
            OptionError: options contradict each other.
        """
        config: Any = self.default if default is None else default
        for setting in self.settings():
            value = said(setting, given)
            if value is None:
                value = (file or {}).get(setting.key)
            if value is not None:
                value = None if value is Unset.UNSET else value
                config = _changed(config, setting.keys, value)
        config.check_bounds()
        return cast("C", config)

    def settings(self) -> Iterator[Setting]:
        """Return all settings that are options, in the order of the fields."""
        yield from self._settings_of(self.default, ())

    def _settings_of(self, config: Any, keys: Keys) -> Iterator[Setting]:
        kinds = kinds_of(config)
        for field in dataclasses.fields(config):
            if field.name in self.without:
                continue
            value, inner = getattr(config, field.name), (*keys, field.name)
            if OPTION in field.metadata:
                shows = {**self.shows.get(field.name, {})}
                if field.name in self.by_model:
                    shows["shown"] = BY_MODEL
                option = dataclasses.replace(field.metadata[OPTION], **shows)
                yield Setting(inner, option, kinds[field.name].kind, value)
            elif isinstance(value, Config):
                yield from self._settings_of(value, inner)


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


# -- from settings to parameters -------------------------------------------------------------------


def parameter_name(name: str) -> str:
    """Return the name of the parameter of an option: ``batch_size`` for ``--batch-size``."""
    parameter = name.removeprefix("--").replace("-", "_")
    return f"{parameter}_" if keyword.iskeyword(parameter) else parameter


def _parameter(
    setting: Setting, name: str, kind: Any, text: str, *, default: Any, hidden: bool = False
) -> Parameter:
    option = setting.option
    metavars = {bool: None, int: "INTEGER", float: "FLOAT"}
    metavar, completions = option.metavar or metavars.get(kind, "TEXT"), option.completions
    if callable(option.reads):
        kind, default = str, None  # the configuration reads it
    elif setting.choices and kind is not bool:
        completions = tuple(setting.choices)
        metavar = option.metavar or f"[{'|'.join(completions)}]"
        kind, default = str, None if default is None else default.value
    if get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]], None  # type: ignore[misc]
    complete = None
    if completions:

        def complete(incomplete: str) -> list[str]:
            return [each for each in completions if each.startswith(incomplete)]

    info = typer.Option(
        name,
        help=text.format(choices=", ".join(setting.choices)),
        rich_help_panel=option.panel,
        metavar=metavar,
        show_default=option.shown or default is not None,
        envvar=option.env,
        parser=None if kind is bool else setting.read,
        hidden=hidden,
        autocompletion=complete,
    )
    annotation: Any = Annotated[kind if default is not None else kind | None, info]
    return keyword_only(parameter_name(name), annotation, default)


def keyword_only(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    """Return a parameter for :func:`with_options`; without a default it is required."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


# -- from a command line to a configuration --------------------------------------------------------


def said(setting: Setting, given: Mapping[str, Any]) -> Any:
    """Return what a command line says about a setting; None: nothing."""
    by_parameter = {parameter_name(name): name for name in setting.flags or [setting.key]}
    said = {
        by_parameter[parameter]: value
        for parameter, value in given.items()
        if parameter in by_parameter and value is not None
    }
    if not said:
        return None
    [first, *_], [*_, (last, value)] = said, said.items()  # the last one counts, as of one option
    if setting.flags:
        contradicts = setting.kind is not bool and setting.flags[first] is not setting.flags[last]
        require(not contradicts, first, f"{last} too", "one of the two")
        return setting.flags[last]
    return tuple(value) if get_origin(setting.kind) is tuple else value


def _changed(config: Any, keys: Keys, value: Any) -> Any:
    """Return a configuration with another value of a setting, wherever that is in it."""
    name, *within = keys
    if within:
        value = _changed(getattr(config, name), tuple(within), value)
    return dataclasses.replace(config, **{name: value})
