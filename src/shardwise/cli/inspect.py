"""``shardwise inspect``: options in, one plan, and the report to the terminal or a file."""

from __future__ import annotations

import contextlib
import json as json_module
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from shardwise.cli.names import read_name, read_path
from shardwise.frontends.strategies import MeshError, WantedMesh
from shardwise.launch.errors import UserError
from shardwise.recipes.core.config import OptionError, require
from shardwise.recipes.planned import (
    PLANNED,
    make_plan,
    near_parameters,
    settings_of,
    with_counted_values,
)
from shardwise.units import brief_size

EXAMPLES = """
[bold]Examples[/bold]

A small Llama, sharded over two ranks on top of tensor parallelism over four:
  [cyan]shardwise inspect --model llama-150m --mesh dp=2,tp=4[/cyan]

What rank 5 holds:
  [cyan]shardwise inspect --model llama-150m --mesh dp=2,tp=4 --rank 5[/cyan]

Every block of the embedding, and a picture of it:
  [cyan]shardwise inspect --model llama-150m --mesh dp=8 \\
      --param model.embed_tokens.weight --svg embedding.svg[/cyan]

A page to look at in a browser, for a model of transformers on 512 ranks:
  [cyan]shardwise inspect --model my-llama/config.json \\
      --mesh dp_replicate=4,dp_shard=16,tp=8 --html plan.html[/cyan]
"""


def inspect(
    *,
    model: Annotated[
        str,
        Option(
            parser=read_name,
            metavar="NAME",
            help=", ".join(PLANNED) + ", or the path of a config.json of transformers.",
        ),
    ] = "llama-150m",
    mesh: Annotated[
        str,
        Option(
            help="Ranks by dimension: dp=N, or dp_replicate=R,dp_shard=S, and tp=T.",
            metavar="MESH",
        ),
    ] = "dp=8",
    rank: Annotated[
        int | None, Option(help="Show what this rank holds.", show_default="all ranks")
    ] = None,
    param: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Show the blocks of these parameters: a name, or a pattern with *.",
            show_default="all, in brief",
        ),
    ] = None,
    layers: Annotated[
        bool, Option("--layers", help="Show layers that are cut alike one by one.")
    ] = False,
    full: Annotated[
        bool, Option("--full", help="Layers one by one, and all blocks of every parameter.")
    ] = False,
    values: Annotated[
        bool,
        Option(
            "--values",
            help="Show elements of small parameters, as if each counted 0, 1, 2, ... in its rows.",
        ),
    ] = False,
    json: Annotated[bool, Option("--json", help="Print JSON, for programs.")] = False,
    html: Annotated[
        Path | None,
        Option(
            parser=read_path, metavar="FILE", help="Write a page for browsers.", show_default=False
        ),
    ] = None,
    svg: Annotated[
        Path | None,
        Option(
            parser=read_path,
            metavar="FILE",
            help="Write a picture of the one --param.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show which rank would hold what of a model, before anything runs.

    One process, no memory for parameters: the model is built on the meta device
    and sharded over a mesh that is only pretended. In a running job,
    shardwise.inspect(model) makes the same report.
    """
    wanted = _wanted(mesh)
    settings = settings_of(model)
    if rank is not None:
        last = wanted.size - 1
        require(0 <= rank <= last, "--rank", rank, f"a rank from 0 to {last}")
    require(svg is None or param is not None, "--svg", "no --param", "one: the picture is of it")
    report = make_plan(settings, model, wanted, mesh)
    found = [each.name for each in report.matching(param)]
    if param is not None and not found:
        raise OptionError("--param", param, near_parameters(report, param))
    if values:
        report = with_counted_values(report)
    with _writing():
        if svg is not None:
            what = f"{param}, which matches {len(found)} parameters"
            require(len(found) == 1, "--param", what, "one, for --svg")
            report.to_svg(found[0], svg, rank=rank)
            _wrote(svg)
        if html is not None:
            report.to_html(html)
            _wrote(html)
    if json:
        print(json_module.dumps(report.to_json(param), separators=(",", ":"), ensure_ascii=False))
    elif html is None and svg is None:
        from shardwise.inspect.text import View, as_text

        print(as_text(report, View(rank=rank, pattern=param, layers=layers, full=full)))


def _wanted(mesh: str) -> WantedMesh:
    try:
        return WantedMesh.parse(mesh)
    except MeshError as error:
        raise OptionError("--mesh", error.found, error.expected) from None


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror or error}") from error


def _wrote(path: Path) -> None:
    typer.echo(f"wrote {path}: {brief_size(path.stat().st_size)}", err=True)
