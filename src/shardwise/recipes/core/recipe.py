"""What a recipe is: a configuration, what it refers to once it is checked, and what builds a task.

config.check(world)      -> inputs       no torch: mistakes are reported at once
recipe.assemble()(inputs, place) -> task     on every rank, with torch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from shardwise.launch.world import World
from shardwise.recipes.core.config import TrainConfig
from shardwise.recipes.core.position import Span

if TYPE_CHECKING:
    from shardwise.inspect.api import Blueprint
    from shardwise.recipes.core.task import Place, Task

#: Builds model, optimizer and data on one rank. All ranks call it at the same time.
Assemble: TypeAlias = "Callable[[Any, Place], Task]"


class RecipeConfig(Protocol):
    """The configuration of one kind of training: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def train(self) -> TrainConfig:
        """What does not depend on model and data."""

    def check(self, world: World) -> Inputs:
        """Find the model and the data; raise ``UserError`` if the training is not possible."""

    def check_world(self, world: World) -> None:
        """Raise ``UserError`` unless the configuration fits the world; looks at no files."""

    def check_dry_run(self, world: World) -> None:
        """Raise ``UserError`` unless ``--dry-run`` is possible; looks at no data and no folder."""


class Inputs(Protocol):
    """A configuration that was checked, and what it refers to."""

    @property
    def recipe(self) -> str:
        """Name of the recipe on the command line."""

    @property
    def train(self) -> TrainConfig:
        """What does not depend on model and data."""

    @property
    def span(self) -> Span:
        """How long the training is."""

    def facts(self) -> dict[str, Any]:
        """Return config, model and data for ``run.json``: what is the same in every session."""

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Raise ``OptionError`` unless a run with these facts can go on as this one."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One kind of training.

    Attributes:
        name: on the command line.
        config: the configuration with all its defaults.
        module: has ``assemble(inputs, place)`` and ``blueprint(config)``. It is imported when it
            is needed: torch and transformers take seconds.
        config_for: returns the configuration with the defaults that go with ``--model``.
    """

    name: str
    config: RecipeConfig
    module: str
    config_for: Callable[[str], RecipeConfig] | None = None

    def assemble(self) -> Assemble:
        """Import what builds model, optimizer and data on one rank."""
        assemble: Assemble = import_module(self.module).assemble
        return assemble

    def blueprint(self, config: RecipeConfig) -> Blueprint:
        """Return the model of a configuration, without memory, and how it would be sharded."""
        blueprint: Blueprint = import_module(self.module).blueprint(config)
        return blueprint
