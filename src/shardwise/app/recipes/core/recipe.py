"""What a recipe is: a configuration, what it refers to once it is checked, and a task to train.

    config.check(world)                -> Inputs    without torch: mistakes are reported at once
    config.assemble()(inputs, place)   -> Task      on every rank, with torch
    config.blueprint()                 -> Blueprint the model alone, for a plan
    config.example()                   -> Example   its batches and its loss, for a plan

The training loop (``loop.py``) knows nothing of a recipe but its :class:`Task`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias

from shardwise.app.recipes.core.position import Position, TrainingSpan
from shardwise.app.recipes.core.rundir import RunDir, check_same, check_same_model
from shardwise.checkpoint.disk.place import Place
from shardwise.elastic.world import ReplicaWorld, World
from shardwise.frontends.strategies import ShardingPlan
from shardwise.insight.schema.option import (
    Config,
    OnResume,
    OptionError,
    fixed_defaults,
    flatten,
    option_names,
)
from shardwise.insight.schema.sharding import Gathers, resolve_sharding
from shardwise.insight.schema.training import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.app.recipes.core.checkpointing import Resumable
    from shardwise.app.recipes.core.progress import Display  # imports rich's progress bars
    from shardwise.app.recipes.core.replicas import Replicas
    from shardwise.insight.blueprint import Blueprint
    from shardwise.insight.program import Program


#: Builds model, optimizer and data on one rank. All ranks call it at the same time.
Assemble: TypeAlias = "Callable[[Any, TrainContext], Task]"


def run_dir(out: os.PathLike[str]) -> RunDir:
    """Return the folder of a run, or what stands for it where it is in an object store."""
    if isinstance(out, Path):
        return RunDir(out)
    from shardwise.app.recipes.core.stored import RunStore  # few trainings need it

    store = RunStore(out)
    return RunDir(store.root, store)


class RecipeConfig(Config):
    """The configuration of one kind of training: the base of frozen dataclasses.

    A module has ``assemble(inputs, place)``, ``blueprint(config)`` and ``example(config)``. It is
    imported when it is needed: torch and transformers take seconds.

    Attributes:
        module: the name of that.
        recipe: name of the kind on the command line.
        model_options: settings of the model, each with the option that changes it.
        train: what does not depend on model and data.
    """

    module: ClassVar[str]
    recipe: ClassVar[str]
    model_options: ClassVar[Mapping[str, str]] = {}
    train: TrainConfig  # a field of each of them, at its place among the options

    @classmethod
    def for_model(cls, model: str) -> RecipeConfig | None:
        """Return the configuration with the defaults that go with ``--model``; None: all have one.

        Raises:
            OptionError: no model has this name.
        """
        del model
        return None

    @classmethod
    def for_pretrained(cls, name: str) -> RecipeConfig:
        """Return the same for ``--from``, where that is an option.

        Raises:
            OptionError: there is no such model, or it has no weights.
        """
        raise NotImplementedError

    @property
    def files(self) -> RunDir:
        """The folder of the run."""
        return run_dir(self.train.output.out)

    def with_train(self, **changes: Any) -> Self:
        """Return this configuration with other settings in ``train``."""
        train: dict[str, Any] = {"train": replace(self.train, **changes)}
        return replace(self, **train)

    def check(self, world: World) -> Inputs:
        """Find the model and the data, without torch.

        Raises:
            UserError: one line that says why the training is not possible.
        """
        raise NotImplementedError

    def check_world(self, world: World) -> None:
        """Check that the configuration fits the world; look at no files.

        Raises:
            OptionError: it does not fit.
        """
        resolve_sharding(self.train.sharding, world.size, world.hosts)

    @property
    def shares(self) -> str:
        """What several hosts need in the folder of the run, for messages; empty: nothing."""
        return ""

    def check_dry_run(self, world: World) -> None:
        """Check what ``--dry-run`` needs: no data, no folder.

        Raises:
            UserError: one line that says what is wrong.
        """
        self.check_values()
        self.check_world(world)

    def assemble(self) -> Assemble:
        """Import what builds model, optimizer and data on one rank."""
        assemble: Assemble = self._module().assemble
        return assemble

    def blueprint(self, **of_data: Any) -> Blueprint:
        """Return the model, without memory, and how it would be sharded.

        Args:
            of_data: what it has from the data, as ``classes``; by default what is usual.
        """
        blueprint: Blueprint = self._module().blueprint(self, **of_data)
        return blueprint

    def example(self) -> Example:
        """Return the batches and the loss."""
        example: Example = self._module().example(self)
        return example

    def _module(self) -> ModuleType:
        return import_module(f"shardwise.app.recipes.{self.module}")


class Inputs:
    """A configuration that was checked, and what it refers to."""

    config: RecipeConfig

    @property
    def recipe(self) -> str:
        """Name of the recipe on the command line."""
        return self.config.recipe

    @property
    def train(self) -> TrainConfig:
        """What does not depend on model and data."""
        return self.config.train

    @property
    def span(self) -> TrainingSpan:
        """How long the training is."""
        raise NotImplementedError

    def blueprint(self) -> Blueprint:
        """Return the model, without memory, as it is trained on these data."""
        return self.config.blueprint()

    def facts(self) -> dict[str, Any]:
        """Return config, model and data for ``run.json``: what is the same in every session."""
        raise NotImplementedError

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Check that a run with these facts can go on as this one.

        Raises:
            OptionError: naming what differs.
        """
        now, usual = self.facts(), fixed_defaults(self.config)
        # First, since defaults of other options go with the model.
        other, own = _without(usual, before.get("model", {})), _without(usual, now["model"])
        check_same_model(other, own, self.config.model_options)
        was = flatten(before.get("config", {}))
        names = option_names(self.config)
        # What it does not say was as by default before there was a choice.
        check_same({**usual, **was}, now["config"], {name: names[name] for name in usual})
        data = before.get("data", {})
        if any(data.get(key) != now["data"].get(key) for key in ("fingerprint", "tokenizer")):
            option, found, called = self.of_data(data)
            raise OptionError(option, found, f"{called}, as in the run to resume")

    def changes(self, before: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return what is asked for in another way than a run began, by the names of options.

        Args:
            before: the content of its ``run.json``.

        Returns:
            The old and the new value of each; None for what this version does not have.
        """
        from shardwise.app.recipes.core.former import not_known  # not for a run that begins

        names = option_names(self.config, *(rule for rule in OnResume if rule.is_kept))
        was, now = flatten(before.get("config", {})), flatten(self.facts()["config"])
        return not_known(was, now) | {
            option: (was[name], now[name])
            for name, option in names.items()
            if name in was and was[name] != now[name]
        }

    def of_data(self, data: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the option that names the data, what they are now, and what others are called.

        Args:
            data: the facts of the others.
        """
        raise NotImplementedError


def _without(names: Collection[str], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model without settings that belong to the configuration: the size of images."""
    settings = model.get("settings", {})
    return {**model, "settings": {k: v for k, v in settings.items() if k not in names}}


#: Environment variable: the file with the plan, for the rank that makes the folder of the run.
PLAN_FILE = "SHARDWISE_PLAN_FILE"
#: The file beside that one: what ``--plan`` says of a step, moment by moment.
PREDICTION = "prediction.json"


@dataclass(frozen=True, kw_only=True)
class Example:
    """The batches and the loss of a training, for a plan.

    Attributes:
        batch: makes a batch of n examples, without values that matter.
        loss: the loss of the model on a batch.
        seq_length: tokens of an example; ``None``: it has none.
        gathers: says how often parameters that stay in memory after forward are gathered, from the
            model, ``reshard_after_forward`` of the strategy, and the bytes that each rank has free.
            Those that are gathered once in a step stay whatever the strategy says.
        after_step: what is called with the model after each step; ``None``: nothing is.
    """

    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    seq_length: int | None = None
    gathers: Callable[[nn.Module, bool | int, int], Gathers] = lambda *_: Gathers.EVERY_MICROBATCH
    after_step: Callable[[nn.Module], None] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainContext:
    """Where a rank trains.

    Attributes:
        world: this rank among those that are in one process group.
        readers: this rank among all that train together, between whom examples are divided; the
            same, unless replicas are worlds of their own.
        replica: the replica that this world is, if it is one.
        device: where it computes.
        plan: how the model is sharded.
        mesh: over which ranks.
        display: where lines and progress are shown.
    """

    world: World
    readers: World
    device: torch.device
    plan: ShardingPlan
    mesh: DeviceMesh
    display: Display
    replica: ReplicaWorld | None = None


#: The learning rate of a step, by the position that the step leads to.
Schedule: TypeAlias = Callable[[Position], float]


class Data(Protocol):
    """Training examples in an order that does not depend on the world."""

    def batch(self, position: int, count: int) -> Any:
        """Return examples ``position`` .. ``position + count``; ``to`` brings them to a device."""


def nothing() -> None:
    """Do nothing, as most recipes at the end of training."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train. Every rank has one, and calls its functions at the same time.

    Attributes:
        model_name: for the first line.
        program: the model, sharded, and how a step is taken. The loss is the mean over a batch; or
            the sum over its targets, if these are counted.
        model_config: its ``config.json`` as ``transformers`` reads it; None: it is not theirs.
        generation_config: the same of its ``generation_config.json``; None: nothing special.
        save_tokenizer: writes the tokenizer of its texts to a folder; None: there is none.
        optimizer: what updates the model's shards.
        schedule: the learning rate of a step, by the position that the step leads to.
        data: where batches come from.
        targets: counts the targets of a batch, so that a step is the mean over those of all ranks
            and microbatches; None: all batches have the same number.
        evaluate: evaluates the model on validation data; one of the values may be
            ``validation_loss``, which the report shows.
        unit: what speed counts: ``tokens``, ``images``.
        units_per_example: units in an example.
        peak_units_per_s: the speed at an MFU of 1; None: not known.
        span: how long the training is, now that the data are open; None: as the inputs say.
        position: data that save a position of their own; None: the number of examples is enough.
        example: what an example is called, for the first lines: ``sequences x 128 tokens``.
        introduction: more of the first lines, each a label and what it shows as text.
        close: called after the last batch, or when training failed: stops reading ahead.
        base: where the frozen parameters are from, which checkpoints leave out; None: they hold all
            parameters.
        replicas: the replicas, if they train apart.
        finish: called with the last checkpoint and the last evaluation; returns the results to
            record.
    """

    model_name: str
    program: Program
    model_config: str | None = None
    generation_config: str | None = None
    save_tokenizer: Callable[[Path], object] | None = None
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    data: Data
    targets: Callable[[Any], int] | None = None
    evaluate: Callable[[], dict[str, float]]
    unit: str
    units_per_example: int = 1
    peak_units_per_s: float | None = None
    span: TrainingSpan | None = None
    position: Resumable | None = None
    example: str
    introduction: Sequence[tuple[str, object]] = ()
    close: Callable[[], None] = nothing
    base: str | None = None
    replicas: Replicas | None = None
    finish: Callable[[Place, Mapping[str, float]], Mapping[str, float]] = lambda _, results: results

    @property
    def module(self) -> nn.Module:
        """The model, sharded."""
        return self.program.model
