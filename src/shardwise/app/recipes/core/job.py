"""A training as the launcher starts it: check first, import torch later."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.app.recipes.core.begin import agreed_options, check_folder, compared, decided
from shardwise.app.recipes.core.recipe import Assemble, Inputs, RecipeConfig
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.checkpoint.disk.place import in_memory
from shardwise.elastic.rank import StopSignals, importing
from shardwise.elastic.world import ReplicaWorld, World
from shardwise.insight.schema.option import require
from shardwise.insight.schema.sharding import resolve_sharding
from shardwise.insight.schema.training import Existing

if TYPE_CHECKING:
    from shardwise.checkpoint.ranks.moving import Departure


def free_folder(default: Path) -> Path:
    """Return the first of ``runs/lm``, ``runs/lm-2``, ... that is free for a new run."""
    return next(root for root in _numbered(default) if not RunDir(root).is_taken())


def newest_folder(default: Path) -> Path:
    """Return the last of ``runs/lm``, ``runs/lm-2``, ... that has a run; the first if none has."""
    newest = default
    for root in _numbered(default):
        if not RunDir(root).is_taken():
            return newest
        newest = root if RunDir(root).run_json.is_file() else newest
    raise AssertionError("numbers do not end")


def _numbered(default: Path) -> Iterator[Path]:
    yield default
    for number in itertools.count(2):
        yield default.with_name(f"{default.name}-{number}")


class Folder(enum.Enum):
    """Who has chosen the folder of the run."""

    NAMED = "named"  # the user
    DEFAULT = "default"  # no one: if a run is there, another folder may be taken


class TrainingJob:
    """What the command line starts.

    Args:
        config: what the user asks for.
        folder: who has chosen the folder of the run.
        options: the file that repeats the command, which a run keeps.

    Attributes:
        config: the configuration.
        chosen: a line that says which folder was chosen, if not the default one.
    """

    def __init__(
        self, config: RecipeConfig, folder: Folder = Folder.NAMED, options: str = ""
    ) -> None:
        self.config = config
        self._folder = folder
        self.chosen: str | None = None
        self.options_file = options
        self._inputs: Inputs | None = None
        self._assemble: Assemble | None = None
        self._size = 1

    def span_hosts(self) -> None:
        """Note that the job is over several hosts."""
        sharding = replace(self.config.train.sharding, over_hosts=True)
        self.config = self.config.with_train(sharding=sharding)

    def be_replica(self, replica: ReplicaWorld) -> None:
        """Note that this process is a rank of a replica that is a world of its own."""
        output = self.config.train.output
        if replica.number:
            out = self.config.files.replicas / str(replica.number)
            output = replace(output, out=out)
        self.config = self.config.with_train(output=output)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a rank finds for itself: its data, in its world."""
        return {**vars(self), "_inputs": None, "_assemble": None}

    @property
    def deadline(self) -> float | None:
        """Seconds that a round waits for a replica; None: replicas are no worlds of their own."""
        diloco = self.config.train.diloco
        return None if diloco is None else diloco.deadline

    def replicas(self, world: World) -> int:
        """Return the number of replicas in a world."""
        return resolve_sharding(self.config.train.sharding, world.size).shape[0]

    def begin_folder(self) -> RunDir:
        """Make the folder of the run, and delete what is to be overwritten."""
        config = self._checked().config
        config.files.begin(decided(config.train.output))
        return config.files

    def choose_folder(self) -> None:
        """Choose the folder of the run, if the user has not: ``runs/lm-2`` beside ``runs/lm``.

        A new run takes the first folder that is free. ``--resume`` and ``--auto-resume`` go on
        with the newest run. ``--overwrite`` means the default folder.
        """
        output = self.config.train.output
        if self._folder is Folder.NAMED or output.existing is Existing.OVERWRITE:
            return
        if output.existing is Existing.REFUSE:
            out = free_folder(Path(output.out))
            why = f"{output.out} has a run; --resume --out {output.out} continues it"
        else:
            out = newest_folder(Path(output.out))
            why = f"the newest run beside {output.out}"
        if out != output.out:
            self.chosen = f"run        {out}; {why}"
            self.config = self.config.with_train(output=replace(output, out=out))

    def going_on(self) -> dict[str, Any]:
        """Return the ``run.json`` of the run that this goes on with; empty: it begins one.

        Every host looks: all of them take the settings of the run.

        Raises:
            UserError: it cannot be read, or is not there.
        """
        output, files = decided(self.config.train.output), self.config.files
        resumes = output.existing is Existing.RESUME
        if resumes:
            files.check(output)
        record = files.read() if resumes else {}
        return record if record.get("recipe") == self.config.recipe else {}

    def go_on(self, config: RecipeConfig, options: str) -> None:
        """Take other settings: those of the run that this goes on with.

        Args:
            config: with them; the folder of the run remains.
            options: the file that repeats the command.
        """
        out = self.config.train.output.out
        output = replace(config.train.output, out=out, existing=Existing.RESUME)
        self.config, self.options_file = config.with_train(output=output), options

    def show_dry_run(self, world: World) -> None:
        """Print what every rank of a world would hold, and what a step needs, without starting it.

        Raises:
            UserError: the configuration is wrong, or does not fit the world.
        """
        self.config.check_dry_run(world)
        from shardwise.app.recipes.core.plan import describe, reporting  # imports torch

        config = self.config
        blueprint, example = config.blueprint(), config.example()
        with reporting("--dry-run", "`shardwise inspect` shows who holds what"):
            print(describe(blueprint, config.train, example, world))

    def plan(self, world: World) -> AbstractContextManager[None]:
        """Print what the training needs and how fast it will be, and check that it fits.

        Returns:
            A context in which ranks find the plan, for the folder of the run.

        Raises:
            UserError: it does not fit.
        """
        from shardwise.app.recipes.core.plan import (
            check_fits,
            kept_for_the_run,
            plan_training,
            reporting,
        )

        inputs = self._checked()
        config, blueprint, example = inputs.config, inputs.blueprint(), inputs.config.example()
        with reporting("--plan", "leave out --plan to train all the same"):
            plan = plan_training(blueprint, config.train, example, world)
            print(plan, flush=True)
            check_fits(plan)
        return kept_for_the_run(plan)

    def check(self, world: World) -> None:
        """See :meth:`RecipeConfig.check`."""
        self.config.train.sharding.check_folders()
        self._check_place(world)
        self._inputs, self._size = self.config.check(world), world.size

    def _check_place(self, world: World) -> None:
        """Check that what the run writes can be in an object store, if it is to be.

        Raises:
            OptionError: something is written that needs a folder.
        """
        out, shares = self.config.train.output.out, self.config.shares
        if isinstance(out, Path):
            return
        expected = "a folder or another URL: what is in memory ends with the process that wrote it"
        require(not in_memory(out), "--out", out, expected)
        expected = "none with a URL as --out: replicas that are worlds of their own need folders"
        require(self.deadline is None, "--diloco-deadline", self.deadline, expected)
        expected = f"a folder that all hosts see, for {shares}"
        alone = not shares or world.hosts == 1
        require(alone, "--out", f"{out} over {world.hosts} hosts", expected)

    def options(self) -> dict[str, Any]:
        """Return what all hosts have to agree on, by the names of the options."""
        inputs = self._checked()
        return compared({"recipe": inputs.recipe, **inputs.facts()}, agreed_options(inputs.config))

    def check_folder(self) -> str | None:
        """Check that the run may begin, or go on; see :func:`check_folder`.

        A run that ended after its last checkpoint and before its results goes on, to make these.

        Returns:
            A line that says so if the run is complete already.
        """
        inputs = self._checked()
        position = check_folder(inputs)
        if inputs.span.left(position, inputs.train.examples_per_step(self._size)):
            return None
        if not inputs.config.files.is_finished():
            return None
        span = inputs.span
        option = "--steps" if span.steps is not None and position.step >= span.steps else "--epochs"
        return (
            f"Nothing to do: the run in {inputs.train.output.out} is at "
            f"{span.shown(position)}. To go on, say --resume with more {option}."
        )

    def prepare(self) -> Assemble:
        """Import what a training needs, which takes seconds the first time; return what builds it.

        Only then: what lives in a later world is to be freed after it.
        """
        if self._assemble is None:
            with importing():
                from shardwise.app.recipes.core import training  # noqa: F401

                self._assemble = self.config.assemble()
        return self._assemble

    def preload(self) -> None:
        """Import what ranks will need, before there are any: all that does not depend on data."""
        self.prepare()
        output = self.config.train.output
        with importing():
            from shardwise.insight.inspect import page, read  # noqa: F401
            from shardwise.transport.shm import transport  # noqa: F401

            if output.replicate_every:
                from shardwise.app.recipes.core import memory  # noqa: F401
            self.config.blueprint()  # whose module is imported when a model is made of it

    def run(self, world: World, signals: StopSignals, before: Departure | None = None) -> None:
        """Train, as one rank; see :func:`~shardwise.app.recipes.core.training.train`."""
        inputs, assemble = self._checked(), self.prepare()
        from shardwise.app.recipes.core.training import train

        train(inputs, assemble, world, signals, self.options_file, before)

    def _checked(self) -> Inputs:
        assert self._inputs is not None, "check() comes first"
        return self._inputs
