"""A training as the launcher starts it: check first, import torch later."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from shardwise.launch.rank import StopSignals, importing
from shardwise.launch.world import World
from shardwise.recipes.core.begin import Inputs, Recipe, check_folder, compared
from shardwise.recipes.core.rundir import RunDir, locked


class Job:
    """What the command line starts.

    Args:
        recipe: as the user asked.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._inputs: Inputs | None = None
        self._size = 1

    def check(self, world: World) -> None:
        """See :meth:`Recipe.check`."""
        self._inputs, self._size = self.recipe.check(world), world.size

    def check_world(self, world: World) -> None:
        """See :meth:`Recipe.check_world`."""
        self.recipe.check_world(world)

    def options(self) -> dict[str, Any]:
        """What all hosts have to be asked for alike, by the names of the options."""
        inputs = self._checked()
        return compared({"recipe": inputs.recipe, **inputs.facts()})

    def lock_folder(self) -> AbstractContextManager[None]:
        """See :func:`locked`."""
        return locked(RunDir(self._checked().train.output.out))

    def check_folder(self) -> str | None:
        """See :func:`check_folder`; a run that is complete already is nothing to do.

        One that ended after its last checkpoint and before its results goes on, to make these.
        """
        inputs = self._checked()
        position = check_folder(inputs)
        if inputs.span.left(position, inputs.train.examples_per_step(self._size)):
            return None
        if not RunDir(inputs.train.output.out).is_finished():
            return None
        span = inputs.span
        option = "--steps" if span.steps is not None and position.step >= span.steps else "--epochs"
        return (
            f"Nothing to do: the run in {inputs.train.output.out} is at "
            f"{span.shown(position)}. To go on, say --resume with more {option}."
        )

    def run(self, world: World, signals: StopSignals) -> None:
        """Train, as one rank."""
        inputs = self._checked()
        with importing():  # here, and not before: it takes seconds
            from shardwise.recipes.core.training import train

            import_module(f"shardwise.recipes.{inputs.recipe}")
        train(inputs, world, signals)

    def _checked(self) -> Inputs:
        assert self._inputs is not None, "check() comes first"
        return self._inputs
