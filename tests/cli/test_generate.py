"""Options are generated from frozen configurations: names, defaults, groups, and what was given."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer

from shardwise.app.cli import main
from shardwise.app.cli.options import Options, with_options
from shardwise.insight.schema.option import Config, OptionError, Reads, option
from tests.cli.shell import call
from tests.recipes.small import RECIPES


class Shape(enum.Enum):
    ROUND = "round"
    FLAT = "flat"


class Again(enum.Enum):
    NEVER = "never"
    ONCE = "once"
    ALWAYS = "always"


@dataclass(frozen=True, kw_only=True)
class Inner(Config):
    rate: float = field(default=0.5, metadata=option("Rate."))
    hidden: int = 7


@dataclass(frozen=True, kw_only=True)
class Outer(Config):
    shape: Shape = field(default=Shape.ROUND, metadata=option("One of {choices}."))
    names: tuple[str, ...] = field(default=(), metadata=option("Names.", reads=Reads.NAME))
    where: Path = field(default=Path("here"), metadata=option("Where."))
    nested: bool = field(default=True, metadata=option("Flat.", name="--nested/--no-nested"))
    again: Again = field(
        default=Again.NEVER,
        metadata=option(
            "Again.",
            flags={"--once": (Again.ONCE, "Once."), "--always": (Again.ALWAYS, "Always.")},
        ),
    )
    inner: Inner = field(default=Inner())


def read(
    monkeypatch: pytest.MonkeyPatch, arguments: str, options: Options[Outer] | None = None
) -> Outer:
    """Read a command line as ``shardwise`` reads its own."""
    found: list[Outer] = []
    chosen = options or Options(default=Outer())

    def act(given: Mapping[str, Any]) -> None:
        found.append(chosen.read(given))

    app = typer.Typer()
    app.command()(with_options(act, [chosen], "Help."))
    monkeypatch.setattr(sys, "argv", ["program", *arguments.split()])
    app(standalone_mode=False)
    return found[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", Outer()),
        ("--rate 2", Outer(inner=Inner(rate=2.0))),
        ("--no-nested", Outer(nested=False)),
        ("--nested", Outer()),
        ("--nested --no-nested", Outer(nested=False)),
        ("--no-nested --nested", Outer()),
        ("--always", Outer(again=Again.ALWAYS)),
        ("--names a --names b", Outer(names=("a", "b"))),
        ("--where there", Outer(where=Path("there"))),
        ("--shape flat", Outer(shape=Shape.FLAT)),
    ],
)
def test_a_command_line_becomes_a_configuration(
    monkeypatch: pytest.MonkeyPatch, arguments: str, expected: Outer
) -> None:
    assert read(monkeypatch, arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--once --always", "--once: found --always too, expected one of the two"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        read(monkeypatch, arguments)


def test_what_was_not_given_takes_the_defaults_that_go_with_what_was() -> None:
    options = Options(default=Outer())
    given: dict[str, Any] = {parameter.name: None for parameter in options.parameters()}
    other = Outer(inner=Inner(rate=9.0, hidden=8))
    assert options.read(given, other) == other
    assert options.read({**given, "rate": 0.5}, other) == Outer(inner=Inner(hidden=8)), (
        "given, if by chance as the default"
    )


def test_a_field_without_metadata_and_one_left_out_are_no_options() -> None:
    names = {p.name for p in Options(default=Outer(), without=frozenset({"where"})).parameters()}
    assert "rate" in names
    assert not {"hidden", "inner", "where"} & names


def test_the_help_of_an_enum_names_its_values() -> None:
    [shape] = [p for p in Options(default=Outer()).parameters() if p.name == "shape"]
    assert shape.annotation.__metadata__[0].help == "One of round, flat."


def test_only_a_training_with_settings_of_diloco_offers_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for recipe, offered in (("lm", True), ("vit", False)):
        assert call("train", recipe, "--help") == 0
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert (", diloco" in shown, "--local-steps" in shown) == (offered, offered)


def test_one_thing_has_one_name_in_all_recipes() -> None:
    commands = typer.main.get_command(main.commands([])).commands["train"].commands  # type: ignore[attr-defined]
    assert set(commands) == set(RECIPES)
    shown = {
        name: {opt for p in command.params if not p.hidden for opt in p.opts}
        for name, command in commands.items()
    }
    everywhere = {"--activation-checkpointing", "--eval-every", "--dry-run", "--world-size", "-h"}
    for name, options in shown.items():
        assert everywhere - {"-h"} <= options, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_defaults_of_a_command_are_those_of_its_configuration(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    from shardwise.app.cli import train

    jobs: list[Any] = []
    monkeypatch.setattr(train, "run", lambda job, launch: jobs.append(job))
    monkeypatch.setattr(sys, "argv", ["shardwise", "train", recipe])
    main.commands(sys.argv[1:])(standalone_mode=False)
    assert jobs[0].config == RECIPES[recipe]
