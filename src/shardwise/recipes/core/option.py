"""What the command line says about a setting, kept in the metadata of the setting itself.

The options of a command are generated from frozen configurations, so that a default, its type and
its help stand in one place::

    seed: int = field(default=0, metadata=option("Seed of the initial weights.", TRAINING))

``shardwise.cli.generate`` reads this. A field without metadata is no option. A field that holds
another configuration contributes the options of that one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
