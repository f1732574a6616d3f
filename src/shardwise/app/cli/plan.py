"""``shardwise plan``: memory, traffic and time of a training, before it is started."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.app.cli.generate import Options, with_options
from shardwise.app.cli.values import read_name, read_size
from shardwise.app.recipes.core.begin import check_extras
from shardwise.app.recipes.core.config import OptionError, StrategyConfig, naming_mesh, require
from shardwise.app.recipes.core.option import MODEL, OUTPUT, SHARDING, TRAINING, NotNegative, option
from shardwise.elastic.errors import UserError
from shardwise.elastic.rank import importing
from shardwise.frontends.strategies import MeshError, WantedMesh, reshard_over
from shardwise.insight.planning.machine import MachineError
from shardwise.insight.planning.presets import MODELS, ModelError, find_settings
from shardwise.insight.planning.settings import (
    MOST_RANKS,
    OPTIMIZERS,
    TRANSPORTS,
    Checkpointing,
    Compiled,
    Products,
    RehearsalError,
    Settings,
    SettingsError,
    Stepping,
    UntraceableError,
)

if TYPE_CHECKING:
    from shardwise.insight.planning.api import ModelPlan

EXAMPLES = """
[bold]Examples[/bold]

Does Llama 3.1 8B fit on a host of 8 GPUs, and how fast is it?
  [cyan]shardwise plan llama-8b --mesh dp=8 --batch-size 2 --seq-length 8192 \\
      --param-dtype bf16 --activation-checkpointing selective --device h100[/cyan]

The fastest way to train a model of your own in 40 GiB:
  [cyan]shardwise plan my-llama/config.json --mesh dp=16 --seq-length 4096 \\
      --param-dtype bf16 --device a100 --fit 40GiB[/cyan]

A module of your own code, on this machine:
  [cyan]shardwise plan my_models:build --batch my_models:make_batch --mesh dp=4[/cyan]

For programs, and as a page for browsers:
  [cyan]shardwise plan llama-70b --mesh dp=32,tp=8 --device h100 --json[/cyan]
  [cyan]shardwise plan llama-70b --mesh dp=32,tp=8 --device h100 --html plan.html[/cyan]
"""

_TEXT = """Say whether a training fits, and how fast it will be, before it is started.

The sharding runtime itself runs one step of one rank, on tensors without
values and in a world that is only pretended: one process, no memory for the
model. In code, shardwise.plan(model, ...) does the same for any nn.Module.
"""

_MACHINE = "Machine"

_MODEL = Parameter(
    "model",
    Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        str,
        typer.Argument(
            parser=read_name,
            metavar="MODEL",
            help=f"{', '.join(MODELS)}; the path of a config.json of transformers; or "
            "package.module:name of a function in code that makes a module.",
            show_default=False,
        ),
    ],
)

#: Memory of the device, as a value of ``--fit``.
DEVICE = "device"


@dataclass(frozen=True, kw_only=True)
class PlanConfig(StrategyConfig):
    """What ``shardwise plan`` is asked for."""

    mesh: str = field(
        default="dp=8",
        metadata=option(
            "Ranks by dimension: dp=N, or dp_replicate=R,dp_shard=S; then tp=T.",
            SHARDING,
            metavar="MESH",
        ),
    )
    activation_checkpointing: Checkpointing = field(
        default=Checkpointing.NONE,
        metadata=option(
            "Activations that are recomputed in backward instead of being kept: {choices}.",
            SHARDING,
            metavar="NAME",
        ),
    )
    transport: str = field(
        default="auto",
        metadata=option(
            f"How bytes move between ranks: {', '.join(TRANSPORTS)}.", SHARDING, metavar="NAME"
        ),
    )
    batch_size: int = field(
        default=1, metadata=option("Samples per rank and microbatch.", TRAINING, metavar="N")
    )
    accumulate: int = field(
        default=1, metadata=option("Microbatches of an optimizer step.", TRAINING, metavar="N")
    )
    seq_length: int | None = field(
        default=None,
        metadata=option(
            "Tokens of a sequence.", TRAINING, metavar="N", shown="the model's, at most 4,096"
        ),
    )
    image_size: int | None = field(
        default=None,
        metadata=option(
            "Height and width of an image, in pixels.", TRAINING, metavar="N", shown="the model's"
        ),
    )
    optimizer: str = field(
        default="adamw",
        metadata=option(
            f"{', '.join(OPTIMIZERS)}, or package.module:name of a function in code.",
            TRAINING,
            metavar="NAME",
        ),
    )
    clip_grad: NotNegative = field(
        default=1.0, metadata=option("Maximum gradient norm; 0: no clipping.", TRAINING)
    )
    stepping: Stepping = field(
        default=Stepping.AFTER_BACKWARD,
        metadata=option(
            "When the optimizer steps.",
            TRAINING,
            flags={
                "--step-in-backward": (
                    Stepping.IN_BACKWARD,
                    "Step with each group as soon as its gradients are reduced.",
                ),
            },
        ),
    )
    batch: str | None = field(
        default=None,
        metadata=option(
            "package.module:name of a function from a number of samples to a batch, for models "
            "that are not of transformers.",
            MODEL,
            metavar="NAME",
        ),
    )
    step: str | None = field(
        default=None,
        metadata=option(
            "package.module:name of a function from model and batch to a loss.",
            MODEL,
            metavar="NAME",
            shown="the model's own loss, else the mean of what it returns",
        ),
    )
    device: str | None = field(
        default=None,
        metadata=option(
            "The device of every rank, such as h100; cpu: this machine, as `shardwise calibrate` "
            "measured it.",
            _MACHINE,
            metavar="NAME",
            shown="cpu, if it was measured",
        ),
    )
    link: str | None = field(
        default=None,
        metadata=option(
            "The link between hosts, such as ib-400 or ethernet-100.",
            _MACHINE,
            metavar="NAME",
            shown="ib-400",
        ),
    )
    ranks_per_host: int | None = field(
        default=None,
        metadata=option("Ranks that share a host.", _MACHINE, metavar="N", shown="8"),
    )
    device_file: Path | None = field(
        default=None,
        metadata=option(
            "TOML file that describes device and links, in place of --device.",
            _MACHINE,
            metavar="FILE",
        ),
    )
    compile: bool = field(
        default=False, metadata=option("Plan for blocks that torch.compile compiles.", _MACHINE)
    )
    float8: bool = field(
        default=False, metadata=option("Plan for matrix products in float8.", _MACHINE)
    )
    fit: str | None = field(
        default=None,
        metadata=option(
            "Find the fastest strategy, batch size, checkpointing and mesh that fits into this "
            f"memory of a rank: a size, or '{DEVICE}' for all of it.",
            metavar="SIZE",
        ),
    )
    json: bool = field(default=False, metadata=option("Print JSON, for programs.", OUTPUT))
    html: Path | None = field(
        default=None,
        metadata=option("Write a page for browsers, with who holds what.", OUTPUT, metavar="FILE"),
    )

    def settings(self) -> Settings:
        """Return what to plan for.

        Raises:
            OptionError: an option is impossible.
        """
        with reporting():
            settings = Settings(
                mesh=WantedMesh.parse(self.mesh, MOST_RANKS),
                strategy=self.strategy,
                batch_size=self.batch_size,
                accumulate=self.accumulate,
                seq_length=self.seq_length,
                image_size=self.image_size,
                param_dtype=None if self.param_dtype is None else self.param_dtype.value,
                reduce_dtype=self.reduce_dtype.value,
                shard_dtype=self.shard_dtype.value,
                optimizer=(
                    _in_code("--optimizer", self.optimizer)
                    if ":" in self.optimizer
                    else self.optimizer
                ),
                clip_grad=self.clip_grad,
                stepping=self.stepping,
                offload=self.offload,
                offload_parameters=self.offload_parameters,
                master_dtype=None if self.master_dtype is None else self.master_dtype.value,
                checkpointing=self.activation_checkpointing,
                transport=self.transport,
                wire=self.wires,
                ranks_per_host=self.ranks_per_host,
                compiled=Compiled.BLOCKS if self.compile else Compiled.NOTHING,
                products=Products.FLOAT8 if self.float8 else Products.AS_STORED,
                batch=None if self.batch is None else _in_code("--batch", self.batch),
                step=None if self.step is None else _in_code("--step", self.step),
            )
        return replace(settings, reshard_after_forward=self._reshard(settings))

    def _reshard(self, settings: Settings) -> bool | int | None:
        """Return ``reshard_after_forward`` of ``fully_shard``; ``None``: that of the strategy."""
        asked, option = self.reshard_after_forward, "--reshard-after-forward"
        if asked is None:
            return None
        tensor = settings.mesh.tensor_parallel
        require(tensor == 1, option, f"{asked} beside tp={tensor}", "none given, or no tp")
        with naming_mesh(option):
            return reshard_over(settings.sharding, asked, settings.on_host)

    def run(self, model: str) -> None:
        """Plan, and print or write the plan.

        Raises:
            UserError: an option is wrong, or the model cannot be planned for.
        """
        check_extras(["transformers"])
        limit = self._limit()
        settings = self.settings()
        with reporting():
            if ":" not in model:
                find_settings(model)  # before torch is imported
            plan = self._plan(model, settings, limit)
        if self.html is not None:
            plan.to_html(self.html)
        if self.json:
            text = json_module.dumps(plan.to_json(), separators=(",", ":"))
            print(text)
        elif self.html is None:
            print(plan)

    def _limit(self) -> int | None:
        """Return the bytes of ``--fit``; ``None``: those of the device."""
        if self.fit in (None, DEVICE):
            return None
        try:
            return read_size(str(self.fit))
        except typer.BadParameter:
            expected = f"a size such as 80GiB, or '{DEVICE}'"
            raise OptionError("--fit", self.fit, expected) from None

    def _plan(self, model: str, settings: Settings, limit: int | None) -> ModelPlan:
        with importing():  # here, and not before: it takes seconds, as building a model does
            from shardwise.insight.planning.api import find_machine, make_fit, make_plan, memory_of
            from shardwise.insight.planning.fit import NothingFitsError
            from shardwise.insight.planning.models import find_model
            from shardwise.insight.planning.report import Available

            machine = find_machine(
                self.device, self.link, self.ranks_per_host, self.device_file, settings.mesh.size
            )
            blueprint = find_model(model)
        available = None if limit is None else Available(nbytes=limit, source="--fit")
        if self.fit is None:
            return make_plan(blueprint, settings, machine)
        available = available or memory_of(machine, settings)
        if machine is None or available is None:
            expected = "one, or `shardwise calibrate`, to say what is fastest"
            raise OptionError("--fit", "no --device", expected)
        try:
            return make_fit(blueprint, settings, machine, available)
        except NothingFitsError as error:
            raise UserError(f"--fit: {error}") from None


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    options = Options(default=PlanConfig())

    def plan(given: Mapping[str, Any]) -> None:
        # Code that is named on the command line is looked for where the command is called.
        sys.path.insert(0, "")
        options.read(given).run(given["model"])

    commands.command("plan", epilog=EXAMPLES)(with_options(plan, [options], _TEXT, (_MODEL,)))


def _in_code(option: str, name: str) -> Callable[..., Any]:
    from shardwise.insight.planning.models import load_object

    try:
        return load_object(name)
    except ModelError as error:
        raise OptionError(option, error.found, error.expected) from None


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Report what cannot be planned for as a mistake in an option."""
    try:
        yield
    except MeshError as error:
        raise OptionError("--mesh", error.found, error.expected) from None
    except ModelError as error:
        raise OptionError("MODEL", error.found, error.expected) from error.__cause__
    except SettingsError as error:
        name = "--" + error.name.replace("_", "-")
        raise OptionError(name, error.found, error.expected) from None
    except RehearsalError as error:
        raise UserError(str(error)) from error.__cause__
    except (MachineError, UntraceableError) as error:
        raise UserError(str(error)) from None
