"""``shardwise prove``: a model of the user's, on one process and sharded, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.app.cli.options import Options, check_page, with_options
from shardwise.app.cli.plan import MODEL_ARGUMENT, reporting
from shardwise.app.recipes.core.installed import check_extras
from shardwise.base.progress import LongWork, progress
from shardwise.base.say import say
from shardwise.elastic.rank import importing
from shardwise.frontends.strategies import DATA, WantedMesh
from shardwise.insight.planning.settings import PlannedStep, Settings
from shardwise.insight.schema.option import OUTPUT, TRAINING, Bounds, Config, setting
from shardwise.insight.schema.sharding import StrategyConfig
from shardwise.insight.schema.training import check_nproc, read_nproc

if TYPE_CHECKING:
    from shardwise.insight.proof import Proof

_EXAMPLES = """
[bold]Examples[/bold]

A module of your own code, on two processes of this machine:
  [cyan]shardwise prove my_models:build --batch my_models:make_batch --nproc 2[/cyan]

A small Llama that computes in bf16:
  [cyan]shardwise prove llama-tiny --seq-length 128 --param-dtype bf16[/cyan]
"""

_TEXT = """Train your model on one process, with torch's FSDP2 and with Shardwise.

Prints side by side how losses, gradients, memory, time and resuming compare,
and what happens when a rank skips a backward or is killed. The same is on a
page. The exit code is 0 only if all that is promised holds.
"""

#: What not all ways can do.
_WITHOUT = frozenset(
    {"runtime", "stepping", "offload", "offload_parameters", "master_dtype", "collective_wire"}
    | {"compile", "shard_dtype"}
)


@dataclass(frozen=True, kw_only=True)
class ProveConfig(Config):
    """What ``shardwise prove`` is asked for."""

    nproc: Annotated[int, Bounds(least=2)] = setting(
        2, "Ranks on this host.", metavar="N", shown="2", reads=read_nproc
    )
    steps: Annotated[int, Bounds(least=4)] = setting(10, "Steps of each training.", TRAINING)
    sharding: StrategyConfig = field(default=StrategyConfig(shard_dtype=None))
    step: PlannedStep = field(default=PlannedStep())
    json: bool = setting(False, "Print JSON, for programs.", OUTPUT)
    html: Path = setting(Path("proof.html"), "The page.", OUTPUT, metavar="FILE")

    def run(self, model: str) -> int:
        """Prove, print and write what was found, and return the exit code.

        Raises:
            UserError: an option is wrong, or the model cannot be trained.
        """
        check_extras(["transformers"])
        check_nproc(self.nproc, None)
        check_page(self.html)
        with reporting():
            mesh = WantedMesh.parse(f"{DATA}={self.nproc}")
            settings = Settings.of(self.sharding, self.step, mesh=mesh)
            with importing():
                from shardwise.insight.proof import JOBS
            with progress("proving", JOBS, "parts") as work:
                proof = self._prove(model, settings, work)
        proof.to_html(self.html)
        print(json.dumps(proof.to_json(), allow_nan=False) if self.json else proof)
        say(f"written to {self.html}")
        return 1 if proof.failures else 0

    def _prove(self, model: str, settings: Settings, work: LongWork) -> Proof:
        """Prove, and keep on the page what there is."""
        from shardwise.insight.proof import prove

        kept: list[Path] = []

        def begin(text: str) -> None:
            if work.doing != "proving":
                work.moved()
            work.doing = text

        def keep(proof: Proof) -> None:
            proof.to_html(self.html)
            kept[:] = [self.html]

        try:
            return prove(model, settings, self.steps, begin, keep)
        except BaseException:
            for page in kept:
                say(f"what was found so far is in {page}")
            raise


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the command."""
    options = Options(default=ProveConfig(), without=_WITHOUT)

    def prove(given: Mapping[str, Any]) -> None:
        # Code that is named on the command line is looked for where the command is called.
        sys.path.insert(0, "")
        raise typer.Exit(options.read(given).run(given["model"]))

    cli.command("prove", epilog=_EXAMPLES)(with_options(prove, [options], _TEXT, (MODEL_ARGUMENT,)))
