"""What a field of a configuration says about itself: its option, its bounds, how it is read.

A default, its type, its bounds and its help stand in one place::

    seed: Annotated[int, SEEDS] = setting(0, "Seed of all.", TRAINING)

A field without metadata is no option. A field that holds another configuration contributes the
options of that one.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from shardwise.base.arguments import check_arguments
from shardwise.base.errors import CheckpointError, NotPossibleError, UserError
from shardwise.insight.schema.words import own_word

T = TypeVar("T")

OPTION = "option"  # key of ``dataclasses.field(metadata=...)``

# Panels of --help.
HOSTS, MODEL, TRAINING, SHARDING = "Several hosts", "Model and data", "Training", "Sharding"
DILOCO, OUTPUT, SAMPLE = "DiLoCo", "Output and checkpoints", "Sample"

BY_MODEL = "by model"


class OptionError(UserError, ValueError):
    """An option with a value that cannot be used.

    Attributes:
        option: its name on the command line, ``--steps``.
        found: the value.
        expected: what can be used.
    """

    def __init__(self, option: str, found: object, expected: str) -> None:
        shown = "nothing" if found is None else found
        super().__init__(f"{option}: found {shown}, expected {expected}")
        self.option, self.found, self.expected = option, found, expected


def require(condition: bool, option: str, found: object, expected: str) -> None:
    """Raise :class:`OptionError` unless the condition holds."""
    if not condition:
        raise OptionError(option, found, expected)


class Reads(enum.Enum):
    """How the text of an option is read, where its type does not say it."""

    PLAIN = "plain"  # by the type of the field; a Path with ~ for the home folder
    NAME = "name"  # a name that may be a path: ~ stands for the home folder
    TEXT = "text"  # any text at all


class OnResume(enum.Enum):
    """What becomes of an option when a run goes on, by ``--resume`` or ``--auto-resume``."""

    KEPT = "as in the run, or as named now"
    FIXED = "as in the run; another is refused, since checkpoints or the order of data depend on it"
    DATA = "as in the run, or named now: another place where the same lies"
    SESSION = "as named now, else the default"
    START = "the same, and no file of options has it"

    @property
    def is_kept(self) -> bool:
        """Whether what is not named is as in the run."""
        return self in (OnResume.KEPT, OnResume.FIXED, OnResume.DATA)


LARGEST = 1e38  # that float32 holds


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Which numbers an option takes; never NaN.

    Attributes:
        least: the smallest one.
        above: what all are larger than.
        below: what all are smaller than.
        most: the largest one.
    """

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float = 2**31 - 1  # of anything that is counted: as seconds, 68 years

    def expected_for(self, value: float) -> str | None:
        """Return what is expected in place of a number; None: it may be."""
        if value > self.most:
            return f"{self.most:,} at most"
        if self.above is not None:
            return None if value > self.above else f"a number above {self.above:g}"
        if self.below is not None:
            expected = f"{self.least} to {self.below}, without {self.below}"
            return None if (self.least or 0) <= value < self.below else expected
        if self.least is None or value >= self.least:
            return None
        usual = self.most in (Bounds.most, LARGEST)
        return f"{self.least} or more" if usual else f"{self.least} to {self.most:,}"


SEEDS = Bounds(least=0, most=2**63 - 1)
Count = Annotated[int, Bounds(least=1)]
Natural = Annotated[int, Bounds(least=0)]
Seconds = Annotated[float, Bounds(above=0)]
Positive = Annotated[float, Bounds(above=0, most=LARGEST)]
NotNegative = Annotated[float, Bounds(least=0, most=LARGEST)]
Fraction = Annotated[float, Bounds(least=0, below=1)]


def check_number(option: str, found: float, bounds: Bounds) -> None:
    """Raise :class:`OptionError` unless a number is within its bounds."""
    expected = bounds.expected_for(found)
    require(expected is None, option, found, str(expected))


@dataclass(frozen=True, kw_only=True)
class Option:
    """How a setting appears on the command line.

    Attributes:
        help: one short sentence. ``{choices}`` stands for the values of an enum.
        panel: under which title; None: among the first options.
        name: the option, if it is not the name of the field. ``--on/--off`` for two flags: the one
            that changes the default is shown.
        flags: for a field that is an enum: its flags, each with its value and its help; one
            without help is not shown.
        metavar: what stands for the value, in place of its type.
        shown: what to show as the default, where the default is None.
        env: an environment variable that is read where the option is not given.
        reads: how its text is read; a function from text to the value raises
            :class:`~shardwise.base.errors.NotPossibleError`.
        completions: what shells may offer, beside the values of an enum.
        on_resume: what becomes of it when a run goes on.
    """

    help: str
    panel: str | None = None
    name: str | None = None
    flags: Mapping[str, tuple[enum.Enum, str]] = field(default_factory=dict)
    metavar: str | None = None
    shown: str | None = None
    env: str | None = None
    reads: Reads | Callable[[str], Any] = Reads.PLAIN
    completions: tuple[str, ...] = ()
    on_resume: OnResume = OnResume.KEPT


def option(text: str, panel: str | None = None, **settings: Any) -> dict[str, Option]:
    """Return the metadata of a field that is an option; see :class:`Option`.

    How many processes there are, and on which hosts, is up to each session.
    """
    usual = OnResume.SESSION if panel in (None, HOSTS) else OnResume.KEPT
    return {OPTION: Option(help=text, panel=panel, **{"on_resume": usual, **settings})}


def setting(default: T, text: str, panel: str | None = None, **settings: Any) -> T:
    """Return a field that is an option, with its default; see :class:`Option`."""
    found: Any = field(default=default, metadata=option(text, panel, **settings))
    return cast("T", found)


def model_option(presets: Iterable[str]) -> dict[str, Option]:
    """Return the metadata of the field that names the model of a recipe: a preset or a file."""
    names = tuple(presets)
    return option(
        f"{', '.join(names)}, or the path of a config.json of transformers.",
        MODEL,
        metavar="NAME",
        reads=Reads.NAME,
        completions=names,
        on_resume=OnResume.DATA,
    )


def option_name(name: str) -> str:
    """Return the option of a field: ``--batch-size`` for ``batch_size``."""
    return "--" + name.replace("_", "-")


# -- what configurations have in common ------------------------------------------------------------


@dataclass(frozen=True)
class _FieldKind:
    """The type of a field.

    Attributes:
        name: of its option, ``--batch-size``.
        kind: without None and bounds.
        bounds: of a number.
        reads: makes a value of text that stands for it; ``None``: text is as good as any value.
    """

    name: str
    kind: Any
    bounds: Bounds | None
    reads: Callable[[str], Any] | None


def kinds_of(config: Any) -> Mapping[str, _FieldKind]:
    """Return the types of the fields of a configuration that are options."""
    kind: Any = type(config)
    return _kinds_of(kind)


@cache
def _kinds_of(config: type[Any]) -> Mapping[str, _FieldKind]:
    found = {}
    hints = get_type_hints(config, include_extras=True)
    for each in fields(config):
        setting = each.metadata.get(OPTION)
        if setting is None:
            continue
        hint = hints[each.name]
        if get_origin(hint) in (Union, UnionType):
            hint = next(part for part in get_args(hint) if part is not NoneType)
        bounds = next(iter(getattr(hint, "__metadata__", ())), None)
        kind = hint if bounds is None else get_args(hint)[0]
        reads = setting.reads if callable(setting.reads) else None
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            reads = reads or partial(_member, kind)
        flag = next(iter(setting.flags), option_name(each.name))
        name = (setting.name or flag).partition("/")[0]
        found[each.name] = _FieldKind(name, kind, bounds, reads)
    return found


def _member(kind: Any, text: str) -> enum.Enum:
    """Return the member of an enum that a text stands for."""
    members: dict[str, enum.Enum] = {str(each.value): each for each in kind}
    name = own_word(text, members)
    if name not in members:
        raise NotPossibleError("", text, f"one of {', '.join(members)}")
    return members[name]


@dataclass(frozen=True)
class Config:
    """A frozen configuration. Names stand for values of enums, as on the command line.

    Raises:
        OptionError: a name stands for nothing.
    """

    def __post_init__(self) -> None:
        for name, kind in kinds_of(self).items():
            value = getattr(self, name)
            if kind.reads is not None and type(value) is str:
                with naming(kind.name):
                    object.__setattr__(self, name, kind.reads(value))
        check_arguments(type(self), vars(self))

    def check_bounds(self) -> None:
        """Check every number of this, and of the configurations within, against its bounds.

        Raises:
            OptionError: names the first option that is out of them.
        """
        kinds = kinds_of(self)
        for each in fields(self):
            value, kind = getattr(self, each.name), kinds.get(each.name)
            if isinstance(value, Config):
                value.check_bounds()
            elif kind is not None and kind.bounds is not None and value is not None:
                check_number(kind.name, value, kind.bounds)

    def check_values(self) -> None:
        """Check what does not depend on a world: numbers, and what goes with what.

        Raises:
            OptionError: names the first option that is wrong.
        """
        self.check_bounds()
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Config):
                value.check_values()


def configurations(config: Any) -> Iterator[Any]:
    """Return a configuration and all that it holds."""
    yield config
    for each in fields(config):
        value = getattr(config, each.name)
        if isinstance(value, Config):
            yield from configurations(value)


def option_names(config: Any, *rules: OnResume) -> dict[str, str]:
    """Return the options of a configuration and of all that it holds, by the names of fields.

    Args:
        config: the configuration.
        rules: of which; none given: of all options.
    """
    return {
        each.name: kinds_of(part)[each.name].name
        for part in configurations(config)
        for each in fields(part)
        if OPTION in each.metadata and (not rules or each.metadata[OPTION].on_resume in rules)
    }


def fixed_defaults(config: Any) -> dict[str, Any]:
    """Return the defaults of all settings that a run goes on with, as plain values; None: none."""
    return {
        each.name: as_json(None if each.default is MISSING else each.default)
        for part in configurations(config)
        for each in fields(part)
        if OPTION in each.metadata and each.metadata[OPTION].on_resume is OnResume.FIXED
    }


@contextlib.contextmanager
def naming(option: str, hint: str = "") -> Iterator[None]:
    """Report what is not possible, or cannot be read, as a mistake in an option."""
    try:
        yield
    except NotPossibleError as error:
        raise OptionError(option, error.found, error.expected + hint) from error.__cause__
    except CheckpointError as error:
        raise UserError(f"{option}: {error}") from None


def as_json(value: Any) -> Any:
    """Return a configuration, or a value in one, as plain values that JSON can hold."""
    if isinstance(value, Config):
        return {each.name: as_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [as_json(each) for each in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, str | int | float | None) else str(value)


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by their innermost names, as on the command line."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(flatten(value) if isinstance(value, Mapping) else {name: value})
    return flat
