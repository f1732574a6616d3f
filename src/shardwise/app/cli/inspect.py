"""``shardwise inspect``: plan a layout, or that of a run, and print it or write it to a file."""

from __future__ import annotations

import dataclasses
import difflib
import json as json_module
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from typer import Option

from shardwise.app.cli.options import (
    Html,
    Integer,
    Json,
    Layers,
    PathArgument,
    PathOption,
    read_name,
)
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.base.errors import UserError
from shardwise.base.units import binary_size, printable
from shardwise.frontends.strategies import REPLICATE, MeshError, Strategy, WantedMesh
from shardwise.insight.planning.presets import MODELS, find_settings
from shardwise.insight.schema.option import OptionError, flatten, naming, require

if TYPE_CHECKING:
    from shardwise.insight.blueprint import Blueprint
    from shardwise.insight.inspect.report import ParameterReport, Report

_MODEL, _MESH = "llama-150m", "dp=8"

EXAMPLES = """
[bold]Examples[/bold]

A small Llama, sharded over two ranks on top of tensor parallelism over four:
  [cyan]shardwise inspect --model llama-150m --mesh dp=2,tp=4[/cyan]

What rank 5 holds:
  [cyan]shardwise inspect --model llama-150m --mesh dp=2,tp=4 --rank 5[/cyan]

All blocks of the embedding, and a picture of it:
  [cyan]shardwise inspect --model llama-150m --mesh dp=8 \\
      --param model.embed_tokens.weight --svg embedding.svg[/cyan]

What the ranks of a run hold:
  [cyan]shardwise inspect runs/lm[/cyan]

A page for the browser, for a transformers model on 512 ranks:
  [cyan]shardwise inspect --model my-llama/config.json \\
      --mesh dp_replicate=4,dp_shard=16,tp=8 --html plan.html[/cyan]
"""

Run = Annotated[
    Path | None,
    PathArgument(
        metavar="RUN",
        help="The folder of a run of shardwise train: its model, on the mesh of its last session.",
    ),
]
Model = Annotated[
    str | None,
    Option(
        parser=read_name,
        metavar="NAME",
        help=", ".join(MODELS) + ", or the path of a config.json of transformers.",
        show_default=_MODEL,
    ),
]
Mesh = Annotated[
    str | None,
    Option(
        help="Ranks by dimension: dp=N, or dp_replicate=R,dp_shard=S; then tp=T.",
        metavar="MESH",
        show_default=f"{_MESH}, or that of the run",
    ),
]
Rank = Annotated[int | None, Integer(help="Show what this rank holds.", show_default="all ranks")]
Param = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Show all blocks of these parameters: a name, or a pattern with *.",
        show_default="all, in brief",
    ),
]
Full = Annotated[
    bool, Option("--full", help="Show layers one by one, and all blocks of every parameter.")
]
Values = Annotated[
    bool, Option("--values", help="Show where elements go, as if parameters counted 0, 1, 2, ...")
]
Svg = Annotated[
    Path | None,
    PathOption(help="Write a picture of the --param, which has to be one.", show_default=False),
]


def inspect(
    *,
    run: Run = None,
    model: Model = None,
    mesh: Mesh = None,
    rank: Rank = None,
    param: Param = None,
    layers: Layers = False,
    full: Full = False,
    values: Values = False,
    json: Json = False,
    html: Html = None,
    svg: Svg = None,
) -> None:
    """Show which rank holds what of a model, before anything runs or of a run.

    One process, and no memory for parameters: the model is built on the meta
    device and sharded over a mesh that need not exist. In a running job,
    shardwise.inspect(model) makes the same report.
    """
    own: WantedMesh | None = None
    if run is None:
        name = _MODEL if model is None else model
        if ":" not in name:  # else a function in code, which is called later
            naming("--model")(find_settings)(name)
        build: Build = partial(_find, name)
    else:
        require(model is None, "--model", f"{model} with a RUN", "none: a run has its model")
        build, own = _of_run(RunDir(run))
    with naming("--mesh"):
        wanted = own if own and mesh is None else WantedMesh.parse(_MESH if mesh is None else mesh)
    if rank is not None:
        last = wanted.size - 1
        require(0 <= rank <= last, "--rank", rank, f"a rank from 0 to {last}")
    require(svg is None or param is not None, "--svg", "no --param", "one, to draw it")
    from shardwise.insight.inspect.page import page
    from shardwise.insight.inspect.read import plan, with_counted_values
    from shardwise.insight.inspect.text import View, as_text

    blueprint = build()
    with naming("--mesh"):
        blueprint.check_mesh(wanted)
    report = plan(blueprint, wanted)
    found = _matching(report, param)
    if svg is not None:
        _write(svg, _drawing(report, found, rank))
    if html is not None:
        _write(html, page(report))
    if values:
        report = with_counted_values(report)
    if json:
        print(json_module.dumps(report.to_json(param), separators=(",", ":")))
    elif html is None and svg is None:
        print(as_text(report, View(rank=rank, pattern=param, layers=layers, full=full)))


def _matching(report: Report, param: str | None) -> Sequence[ParameterReport]:
    found = report.matching(param)
    if param is not None and not found:
        names = [name for each in report.parameters for name in (each.name, *each.aliases)]
        near = difflib.get_close_matches(param, names, n=1, cutoff=0.3)
        hint = f", such as {near[0]}" if near else ""
        count = len(report.parameters)
        expected = f"the name of one of the {count} parameters{hint}, or a pattern with *"
        raise OptionError("--param", param, expected)
    return found


def _drawing(report: Report, found: Sequence[ParameterReport], rank: int | None) -> str:
    from shardwise.insight.inspect.page import drawing

    what = f"a pattern that matches {len(found)} parameters"
    require(len(found) == 1, "--param", what, "one that matches a single parameter, for --svg")
    return drawing(report, found[0], rank)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    typer.echo(printable(f"wrote {path}: {binary_size(path.stat().st_size)}"), err=True)


# -- what is inspected -----------------------------------------------------------------------------


#: Builds a model on the meta device. Imports torch and transformers.
Build: TypeAlias = "Callable[[], Blueprint]"


def _of_run(files: RunDir) -> tuple[Build, WantedMesh]:
    """Return the model of a run of ``shardwise train``, and the mesh of its last session.

    Raises:
        UserError: the folder contains no run, or the run did not record its model or mesh.
    """
    if not files.run_json.is_file():
        raise UserError(
            f"RUN: found no run in {files.root}, expected a folder with run.json; the name of a "
            "model goes with --model"
        )
    record = files.read("RUN")
    name = f"{record.get('model', {}).get('name', 'model')} of {files.root}"
    if record.get("recipe") == "mnist":
        build: Build = partial(_convnet, name)
    elif files.model_config.is_file():
        build = partial(_build, name, naming("RUN")(find_settings)(str(files.model_config), {}))
    else:
        raise UserError(f"RUN: found no {files.model_config}, expected the model's settings")
    settings = flatten(record.get("config", {}))
    mesh = _mesh_of(files, record, settings)
    if settings.get("nested", True):
        return build, mesh
    return lambda: dataclasses.replace(build(), blocks=()), mesh


def _mesh_of(files: RunDir, record: Mapping[str, Any], settings: Mapping[str, Any]) -> WantedMesh:
    """The mesh of the last session; with DiLoCo, of one replica: replicas differ in values."""
    sessions = record.get("sessions", [])
    sizes = sessions[-1].get("mesh") if sessions else None
    if not isinstance(sizes, Mapping) or not sizes:
        raise UserError(f"RUN: found no mesh in {files.run_json}, expected that of a session")
    if settings.get("strategy") == Strategy.DILOCO.value:
        sizes = {name: size for name, size in sizes.items() if name != REPLICATE}
    try:
        return WantedMesh.parse(",".join(f"{name}={size}" for name, size in sizes.items()))
    except MeshError as error:
        raise UserError(f"RUN: {files.run_json}, 'mesh': {error}") from None


def _find(name: str) -> Blueprint:
    from shardwise.insight.planning.models import find_model

    return naming("--model")(find_model)(name)


def _build(name: str, settings: dict[str, Any]) -> Blueprint:
    from shardwise.insight.planning.models import of_settings

    return naming("--model")(of_settings)(name, settings)


def _convnet(name: str) -> Blueprint:
    from shardwise.app.recipes.mnist import blueprint
    from shardwise.app.recipes.vision.config import MnistConfig

    return dataclasses.replace(blueprint(MnistConfig(nested=True)), name=name)


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the command."""
    cli.command("inspect", epilog=EXAMPLES)(inspect)
