"""What the command line says about a setting, kept in the metadata of the setting itself.

The options of a command are generated from frozen configurations, so that a default, its type and
its help stand in one place::

    seed: int = field(default=0, metadata=option("Seed of the initial weights.", TRAINING))

``shardwise.app.cli.generate`` reads this. A field without metadata is no option. A field that holds
another configuration contributes the options of that one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

#: Keys of ``dataclasses.field(metadata=...)``.
OPTION, GROUP = "option", "group"

# Panels of --help.
HOSTS, MODEL, TRAINING, SHARDING = "Several hosts", "Model and data", "Training", "Sharding"
DILOCO, OUTPUT, SAMPLE = "DiLoCo", "Output and checkpoints", "Sample"

BY_MODEL = "by model"


class Reads(enum.Enum):
    """How the text of an option is read."""

    PLAIN = "plain"  # by the type of the field; a Path with ~ for the home folder
    NAME = "name"  # a name that may be a path: ~ stands for the home folder


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


@cache
def bounds_of(kind: type) -> Mapping[str, Bounds]:
    """Return the bounds of the fields of a configuration that have some: in their types."""
    return {
        name: bounds
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for part in (hint, *get_args(hint))  # of ``Count | None``, or of a tuple
        for bounds in getattr(part, "__metadata__", ())
    }


@dataclass(frozen=True, kw_only=True)
class Option:
    """How a setting appears on the command line.

    Attributes:
        help: one short sentence. ``{choices}`` stands for the values of an enum.
        panel: under which title; None: among the first options.
        name: the option, if it is not the name of the field. ``--on/--off`` for two flags: the one
            that changes the default is shown.
        former: names that it, or the first of its flags, had before; they still work and are not
            shown.
        parts: for a field that is a tuple of fixed length: the option of each part, and its help.
        flags: for a field that is an enum: its flags, each with its value and its help.
        metavar: what stands for the value, in place of its type.
        shown: what to show as the default, where the default is None.
        env: an environment variable that is read where the option is not given.
        reads: how its text is read.
        completions: what shells may offer, beside the values of an enum.
        takes_arguments: for a tuple: arguments behind the option without a name belong to it.
    """

    help: str
    panel: str | None = None
    name: str | None = None
    former: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, tuple[enum.Enum, str]] = field(default_factory=dict)
    metavar: str | None = None
    shown: str | None = None
    env: str | None = None
    reads: Reads = Reads.PLAIN
    completions: tuple[str, ...] = ()
    takes_arguments: bool = False


@dataclass(frozen=True)
class Group:
    """Settings that go with one value of another setting; None for all other values.

    Attributes:
        default: the settings and their defaults, a frozen dataclass.
        setting: name of the field that decides, in the configuration or one that it holds.
        value: the value that they go with.
    """

    default: Any
    setting: str
    value: enum.Enum


def option(text: str, panel: str | None = None, **settings: Any) -> dict[str, Option]:
    """Return the metadata of a field that is an option; see :class:`Option`."""
    return {OPTION: Option(help=text, panel=panel, **settings)}


def model_option(presets: Iterable[str]) -> dict[str, Option]:
    """Return the metadata of the field that names the model of a recipe: a preset or a file."""
    names = tuple(presets)
    return option(
        f"{', '.join(names)}, or the path of a config.json of transformers.",
        MODEL,
        metavar="NAME",
        reads=Reads.NAME,
        completions=names,
    )


def option_name(name: str) -> str:
    """Return the option of a field: ``--batch-size`` for ``batch_size``."""
    return "--" + name.replace("_", "-")
