"""``shardwise plan``: memory, traffic and time of a training, before it is started.

``shardwise calibrate`` measures this machine, for the times in plans.
"""

from __future__ import annotations

import contextlib
import json as json_module
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shardwise.app.cli.options import (
    NameArgument,
    Options,
    PathOption,
    check_page,
    keyword_only,
    read_size,
    with_options,
)
from shardwise.app.recipes.core.installed import check_extras
from shardwise.base.errors import NotPossibleError, UserError
from shardwise.base.progress import progress
from shardwise.base.say import say
from shardwise.base.units import show
from shardwise.elastic.rank import importing
from shardwise.frontends.strategies import Runtime, WantedMesh
from shardwise.insight.planning.machine import MachineError
from shardwise.insight.planning.presets import MODELS, ModelError, find_settings, is_code
from shardwise.insight.planning.settings import (
    MACHINE,
    MOST_RANKS,
    MachineConfig,
    PlannedStep,
    RehearsalError,
    Settings,
    UntraceableError,
)
from shardwise.insight.schema.option import (
    OUTPUT,
    SHARDING,
    Config,
    Natural,
    OptionError,
    option_name,
    option_names,
    setting,
)
from shardwise.insight.schema.sharding import Stepping, StrategyConfig

if TYPE_CHECKING:
    from shardwise.insight.planning.api import ModelPlan
    from shardwise.insight.planning.calibrate import Calibration
    from shardwise.insight.planning.machine import Link


_PLAN = """
[bold]Examples[/bold]

Does Llama 3.1 8B fit on a host of 8 GPUs, and how fast is it?
  [cyan]shardwise plan llama-8b --mesh dp=8 --batch-size 2 --seq-length 8192 \\
      --param-dtype bf16 --activation-checkpointing selective --device h100[/cyan]

The fastest way to train a model of your own in 40 GiB:
  [cyan]shardwise plan my-llama/config.json --mesh dp=16 --seq-length 4096 \\
      --param-dtype bf16 --device a100 --fit 40GiB[/cyan]

A module of your own code, on this machine:
  [cyan]shardwise plan my_models:build --batch my_models:make_batch --mesh dp=4[/cyan]

How torch's own FSDP2 would do it, beside Shardwise:
  [cyan]shardwise plan llama-8b --mesh dp=8 --param-dtype bf16 --compare[/cyan]

For programs, and as a page for browsers:
  [cyan]shardwise plan llama-70b --mesh dp=32,tp=8 --device h100 --json[/cyan]
  [cyan]shardwise plan llama-70b --mesh dp=32,tp=8 --device h100 --html plan.html[/cyan]
"""

_TEXT = """Say whether a training fits, and how fast it will be, before it is started.

The sharding runtime itself runs one step of one rank, on tensors without
values and in a world that is only pretended: one process, no memory for the
model. In code, shardwise.plan(model, ...) does the same for any nn.Module.
"""

_IN_BACKWARD = (
    Stepping.IN_BACKWARD,
    "Step with each group as soon as its gradients are reduced.",
)

MODEL_ARGUMENT = keyword_only(
    "model",
    Annotated[
        str,
        NameArgument(
            metavar="MODEL",
            help=f"{', '.join(MODELS)}; the path of a config.json of transformers; or "
            "package.module:function or FILE.py:function in code, which makes a module.",
        ),
    ],
)

#: Memory of the device, as a value of ``--fit``.
DEVICE = "device"


#: Options that mean something else here than in a training, or are said in other words.
_SHOWS: dict[str, dict[str, Any]] = {
    "compile": {"help": "Plan for blocks that torch.compile compiles.", "panel": MACHINE},
    "transport": {"env": None},
    "batch_size": {"help": "Samples per rank and microbatch.", "metavar": "N"},
    "accumulate": {"help": "Microbatches of an optimizer step.", "metavar": "N"},
    "stepping": {"flags": {"--step-in-backward": _IN_BACKWARD}},
}


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """What ``shardwise plan`` is asked for."""

    mesh: str = setting(
        "dp=8",
        "Ranks by dimension: dp=N, or dp_replicate=R,dp_shard=S; then tp=T.",
        SHARDING,
        metavar="MESH",
    )
    sharding: StrategyConfig = field(default=StrategyConfig())
    step: PlannedStep = field(default=PlannedStep())
    machine: MachineConfig = field(default=MachineConfig())
    replicate_every: Natural = setting(
        0, "Say what hosts keep in memory, as for `shardwise train`; 0: nothing.", OUTPUT
    )
    fit: str | None = setting(
        None,
        "Find the fastest strategy, batch size, checkpointing and mesh that fits into this "
        f"memory of a rank: a size, or '{DEVICE}' for all of it.",
        metavar="SIZE",
    )
    compare: bool = setting(False, "Plan for torch's fully_shard too, and show both.", OUTPUT)
    json: bool = setting(False, "Print JSON, for programs.", OUTPUT)
    html: Path | None = setting(
        None, "Write a page for browsers, with who holds what.", OUTPUT, metavar="FILE"
    )

    def run(self, model: str) -> None:
        """Plan, and print or write the plan.

        Raises:
            UserError: an option is wrong, or the model cannot be planned for.
        """
        check_extras(["transformers"])
        limit = self._limit()
        if self.html is not None:
            check_page(self.html)
        with reporting():
            mesh = WantedMesh.parse(self.mesh, MOST_RANKS)
            asked = (self.sharding, self.step, self.machine)
            settings = Settings.of(*asked, mesh=mesh, replicate_every=self.replicate_every)
            if not is_code(model):
                find_settings(model)  # before torch is imported
            if self.compare:
                self._compare(model, settings)
                return
            plan = self._plan(model, settings, limit)
        if self.html is not None:
            plan.to_html(self.html)
            say(f"written to {self.html}")
        if self.json:
            print(json_module.dumps(plan.to_json(), separators=(",", ":")))
        elif self.html is None:
            print(plan)

    def _compare(self, model: str, settings: Settings) -> None:
        """Plan for two runtimes, and print both.

        Raises:
            OptionError: an option that has no meaning for two plans is given.
        """
        for name in ("fit", "html"):
            if getattr(self, name) is not None:
                expected = "none given: only one of two plans could have it"
                raise OptionError("--compare", f"--{name} beside it", expected)
        plans = [self._plan(model, replace(settings, runtime=each), None) for each in Runtime]
        if self.json:
            both = {each.settings.runtime.value: each.to_json() for each in plans}
            print(json_module.dumps(both, separators=(",", ":")))
            return
        from shardwise.insight.planning.text import comparison  # imports rich

        print(comparison(plans))

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
        with progress(f"planning for {model}"):
            return self._planned(model, settings, limit)

    def _planned(self, model: str, settings: Settings, limit: int | None) -> ModelPlan:
        with importing():  # here, and not before: it takes seconds, as building a model does
            from shardwise.insight.planning.api import (
                find_machine,
                make_fit,
                make_plan,
                memory_of,
                with_functions,
            )
            from shardwise.insight.planning.fit import NothingFitsError
            from shardwise.insight.planning.models import find_model
            from shardwise.insight.planning.report import Available

            settings = with_functions(settings)
            machine = find_machine(self.machine, settings.mesh.size)
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


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Report what cannot be planned for as a mistake in an option."""
    try:
        yield
    except (MachineError, RehearsalError, UntraceableError) as error:
        raise UserError(str(error)) from error.__cause__
    except NotPossibleError as error:
        field_name = error.name or "mesh"
        option = option_names(PlanConfig()).get(field_name, option_name(field_name))
        name = "MODEL" if isinstance(error, ModelError) else option
        raise OptionError(name, error.found, error.expected) from error.__cause__


_CALIBRATE = """
[bold]Examples[/bold]

Measure this machine, once; plans for CPUs then say how long a step takes:
  [cyan]shardwise calibrate[/cyan]
  [cyan]shardwise plan llama-34m --mesh dp=2 --device cpu[/cyan]
"""

# Processors that other programs may use while a machine is measured.
_BUSY = 0.5

#: What is shown of the costs of units of work: names, and units a second.
_RATES = {
    "product.float32": ("matrix products in float32", "GFLOP/s"),
    "product.bfloat16": ("matrix products in bfloat16", "GFLOP/s"),
    "attention.float32": ("attention in float32", "GFLOP/s"),
    "bytes.float32": ("other operations in float32", "GB/s"),
    "bytes.optimizer": ("AdamW", "GB/s"),
}

Out = Annotated[
    Path | None,
    PathOption(
        help="Write the measurements to this file.",
        show_default="in the user's cache folder, where plans look for them",
    ),
]


def calibrate(out: Out = None) -> None:
    """Measure what this machine can do: products, memory, messages, overhead.

    Records small trainings, which takes about a minute. Nothing else should run
    meanwhile.
    """
    from shardwise.insight.inspect.text import Cells
    from shardwise.insight.planning.calibrate import cache_file, check_writable
    from shardwise.timeline.recorded import measure_machine

    check_extras(["transformers"])
    console, began = Console(), time.monotonic()

    try:
        path = out or cache_file()
    except MachineError as error:
        raise UserError(f"{error}, or --out FILE") from None
    with _writing(path):
        check_writable(path)
    others = os.getloadavg()[0]
    found = measure_machine(lambda text: show(f"measuring  {text}"))
    heads = ("one process" if count == 1 else f"each of {count}" for count in found.costs)
    rows = [(name, *values) for name, values in _shown(found)]
    console.print(Cells(("", *heads), rows).for_terminal())
    with _writing(path):
        found.save(path)
    show(f"saved to {path} after {time.monotonic() - began:.0f} s")
    if others > _BUSY:
        console.print(
            f"warning: other programs used {others:.1f} processors in the minute before, so this "
            "machine may do more than what was measured; calibrate again when nothing else runs",
            style="yellow",
            highlight=False,
        )


def _shown(found: Calibration) -> Iterator[tuple[str, list[str]]]:
    """What was measured in words: a name, and a value for each number of ranks."""
    from shardwise.insight.planning.calibrate import links_of, rate

    every = list(found.costs.values())
    for unit, (name, per_second) in _RATES.items():
        yield name, [f"{rate(costs, unit) / 1e9:,.0f} {per_second}" for costs in every]
    yield "each operation of forward", [f"{1e6 * c['call.forward']:.1f} µs" for c in every]
    links = [links_of(costs) for costs in every]
    for name in sorted({name for each in links for name in each}):
        words = [_words_of(each[name]) if name in each else "" for each in links]
        yield f"collectives over {name}", words


def _words_of(link: Link) -> str:
    each = f"{1e6 * link.launch:,.0f} µs each"
    return f"{1 / link.host_cost / 1e9:.2f} GB/s, {each}" if link.host_cost else each


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Report a file that cannot be written."""
    try:
        yield
    except OSError as error:
        expected = "a file that can be written: --out FILE writes to another one"
        raise UserError(f"{path}: found {error.strerror}, expected {expected}") from None


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the commands."""
    options = Options(default=PlanConfig(), shows=_SHOWS)

    def plan(given: Mapping[str, Any]) -> None:
        # Code that is named on the command line is looked for where the command is called.
        sys.path.insert(0, "")
        options.read(given).run(given["model"])

    cli.command("calibrate", epilog=_CALIBRATE)(calibrate)
    cli.command("plan", epilog=_PLAN)(with_options(plan, [options], _TEXT, (MODEL_ARGUMENT,)))
