"""``shardwise checkpoint``: list, show, verify, compare and convert checkpoints; ``merge-lora``."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from shardwise.app.cli.options import (
    Json,
    Layers,
    PathArgument,
    PlaceArgument,
    help_if_alone,
    read_name,
    read_size,
)
from shardwise.app.recipes.core.installed import check_extras
from shardwise.base.errors import CheckpointError, UserError
from shardwise.base.ordering import nan_last
from shardwise.base.progress import progress
from shardwise.base.units import binary_size, counted, printable, show
from shardwise.insight.inspect.words import Row, add_rows, fold, shape_in_words

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.entries import StatePath
    from shardwise.checkpoint.disk.place import Place
    from shardwise.checkpoint.formats.source import Source
    from shardwise.checkpoint.tools.diff import Difference
    from shardwise.checkpoint.tools.survey import Damage, Leftover, Listed


P = TypeVar("P", bound="Place")

commands = typer.Typer(
    name="checkpoint",
    help="Show checkpoints, verify them, and convert them to other formats.",
    invoke_without_command=True,
)

Checkpoint = Annotated[
    Any,  # a Place: typer takes no unions
    PlaceArgument(
        metavar="SRC",
        help="A checkpoint of any format, or a run (its newest complete checkpoint); a folder, or "
        "a URL of an object store.",
    ),
]
Buffer = Annotated[
    int, Option(parser=read_size, metavar="SIZE", help="Memory for buffers: 8MiB, 1GB.")
]
Target = Annotated[Path, PathArgument(metavar="DST", help="The folder to write.")]
Force = Annotated[bool, Option("--force", help="Replace the checkpoint that is at DST.")]
DEFAULT_BUFFER: Any = "32MiB"
ShardSize = partial(Option, parser=read_size, metavar="SIZE", show_default="50GB")
_FILE_SIZE: Any = "50GB"

MERGE = """\
[bold]Examples[/bold]

  [cyan]shardwise merge-lora runs/lm merged[/cyan]

  [cyan]shardwise merge-lora adapters merged --base Llama-3.2-1B[/cyan]\
"""


class DamagedError(UserError):
    """Damaged data, as opposed to a wrong command line."""

    exit_code = 1


def _example(arguments: str) -> str:
    return f"[bold]Example[/bold]\n\n  [cyan]shardwise checkpoint {arguments}[/cyan]"


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """Report errors in one line: exit code 2 for a wrong command line, 1 for damaged data."""
    try:
        yield
    except CheckpointError as error:
        raise DamagedError(str(error)) from error
    except BrokenPipeError:
        raise  # of the output, not of the checkpoint
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise DamagedError(f"{where}{error.strerror or error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error


def existing(path: P) -> P:
    """Return the path of something that exists. Of an object store, that is found out later.

    Raises:
        UserError: nothing does.
    """
    if isinstance(path, Path) and not path.exists():
        raise UserError(f"found nothing at {path}, expected a checkpoint")
    return path


@commands.command(epilog=_example("ls runs/lm"))
def ls(
    directory: Annotated[
        Any, PlaceArgument(metavar="DIR", help="A run, or a folder of checkpoints; or its URL.")
    ],
    leftovers: Annotated[
        bool, Option("--leftovers", help="List what killed saves have left instead.")
    ] = False,
    json: Json = False,
) -> None:
    """List checkpoints: step, size, whether they are complete, and the mesh they were saved on."""
    from shardwise.checkpoint.tools.survey import list_checkpoints, list_leftovers

    if leftovers:
        with reporting_errors():
            left = list_leftovers(existing(directory))
        _show_leftovers(directory, left, json=json)
        return
    with reporting_errors():
        found = list_checkpoints(existing(directory))
    _show_list(directory, found, json=json)


@commands.command(epilog=_example("clean runs/lm"))
def clean(
    directory: Annotated[
        Any, PlaceArgument(metavar="DIR", help="A run, or a folder of checkpoints; or its URL.")
    ],
) -> None:
    """Delete what killed saves have left, as the next save would. See: ls --leftovers.

    What a process may still be writing stays.
    """
    from shardwise.checkpoint.tools.survey import delete_leftovers, list_leftovers

    with reporting_errors():
        before = list_leftovers(existing(directory))
        delete_leftovers(directory)
        after = list_leftovers(directory)
    gone = sum(each.nbytes for each in before) - sum(each.nbytes for each in after)
    show(
        f"deleted {len(before) - len(after)} of {counted(before, 'leftover')}: {binary_size(gone)}"
    )
    if after:
        _show_leftovers(directory, after, json=False)


@commands.command(epilog=_example("verify runs/lm/checkpoints/step-00000300"))
def verify(path: Checkpoint, buffer: Buffer = DEFAULT_BUFFER, json: Json = False) -> None:
    """Read a checkpoint, and compare every checksum.

    Exit code 1: it is damaged, or the run has a newer checkpoint that is not
    complete.
    """
    from shardwise.checkpoint.formats.detect import Format, find_checkpoint, format_of
    from shardwise.checkpoint.tools.survey import newer_incomplete
    from shardwise.checkpoint.tools.survey import verify as run

    with reporting_errors():
        given = existing(path)
        path = find_checkpoint(given)
        skipped = newer_incomplete(given, path)
        if format_of(path) is not Format.SHARDWISE:
            raise UserError(f"{path}: found a format without checksums, expected shardwise's own")
        with progress("verifying", unit="bytes") as work:
            damages = list(run(path, buffer=buffer, watch=work.of))
    _show_damages(path, damages, json=json)
    for each in skipped:
        text = f"warning: {each.path} is newer but not complete: {each.problem}"
        typer.echo(printable(text), err=True)
    if damages or skipped:
        raise typer.Exit(1)


@commands.command("show", epilog=_example("show runs/lm"))
def show_(
    path: Checkpoint,
    values: Annotated[
        bool, Option("--values", help="Show plain values too: hyperparameters, step.")
    ] = False,
    layers: Layers = False,
    json: Json = False,
) -> None:
    """Show what a checkpoint contains: tensors with shapes, dtypes and placements."""
    from shardwise.checkpoint.formats.detect import open_source

    with reporting_errors(), open_source(existing(path)) as source:
        _show_contents(source, values=values, layers=layers, json=json)


@commands.command(epilog=_example("diff runs/lm/checkpoints/step-00000200 runs/lm"))
def diff(
    first: Annotated[Any, PlaceArgument(metavar="A")],
    second: Annotated[Any, PlaceArgument(metavar="B")],
    layers: Layers = False,
    buffer: Buffer = DEFAULT_BUFFER,
    json: Json = False,
) -> None:
    """Compare names, shapes, dtypes and values of two checkpoints. Exit code 1: they differ."""
    from shardwise.checkpoint.formats.detect import open_source
    from shardwise.checkpoint.tools.diff import differences

    with (
        reporting_errors(),
        open_source(existing(first)) as a,
        open_source(existing(second)) as b,
        progress("comparing", unit="bytes") as work,
    ):
        found = list(differences(a, b, buffer=buffer, watch=work.of))
    _show_differences(a.where, b.where, found, layers=layers, json=json)
    if found:
        raise typer.Exit(1)


@commands.command(epilog=_example("consolidate runs/lm lm.safetensors --buffer 8MiB"))
def consolidate(
    src: Checkpoint,
    dst: Annotated[
        Any,
        PlaceArgument(
            metavar="DST",
            help="file.safetensors; file.pt, .pth or .bin; or a name without an extension, for a "
            "folder of safetensors files; or a URL of an object store.",
        ),
    ],
    max_shard_size: Annotated[
        int | None, ShardSize(help="Largest size of a file in a folder.")
    ] = None,
    everything: Annotated[
        bool, Option("--everything", help="Include the optimizer and the rest, in a torch file.")
    ] = False,
    force: Force = False,
    buffer: Buffer = DEFAULT_BUFFER,
) -> None:
    """Write full tensors to plain files, with little memory for any size of checkpoint.

    safetensors, torch.load and from_pretrained read them. Needs no process group.
    """
    from shardwise.checkpoint.tools.convert import consolidate as run

    sizes = {"buffer": buffer, "max_shard_size": max_shard_size}
    _write("consolidating", run, existing(src), dst, everything=everything, force=force, **sizes)


@commands.command(epilog=_example("convert runs/lm lm-hf --to hf --max-shard-size 5GB"))
def convert(
    src: Checkpoint,
    dst: Annotated[
        Any,
        PlaceArgument(metavar="DST", help="The folder to write, or its URL in an object store."),
    ],
    to: Annotated[str, Option(metavar="FORMAT", help="shardwise, dcp or hf.", show_default=False)],
    max_shard_size: Annotated[int | None, ShardSize(help="Largest size of a file, for hf.")] = None,
    force: Force = False,
    buffer: Buffer = DEFAULT_BUFFER,
) -> None:
    """Convert a checkpoint to shardwise, dcp (torch's) or hf (Hugging Face's) format."""
    if to not in ("shardwise", "dcp", "hf"):
        raise UserError(f"--to: found {to!r}, expected one of 'shardwise', 'dcp', 'hf'")
    if max_shard_size is not None and to != "hf":
        raise UserError(f"--max-shard-size: found with --to {to}, expected with --to hf only")
    from shardwise.checkpoint.formats.detect import Format
    from shardwise.checkpoint.tools.convert import convert as run

    sizes = {"buffer": buffer, "max_shard_size": max_shard_size}
    _write("converting", run, existing(src), dst, Format(to), force=force, **sizes)


def merge_lora(
    src: Annotated[
        Path,
        PathArgument(
            metavar="SRC", help="A folder of adapters, as peft writes it, or a run with --lora."
        ),
    ],
    dst: Target,
    base: Annotated[
        str | None,
        Option(
            parser=read_name,
            metavar="NAME",
            help="The base model: a folder, or a name on the Hugging Face Hub.",
            show_default="the one that the adapters name",
        ),
    ] = None,
    max_shard_size: Annotated[int, ShardSize(help="Largest size of a file.")] = _FILE_SIZE,
    force: Force = False,
    buffer: Buffer = DEFAULT_BUFFER,
) -> None:
    """Merge LoRA adapters into the weights of their base model, one layer at a time.

    transformers loads the result alone: weights, config.json and tokenizer.
    """
    check_extras(["peft", "transformers"])
    from shardwise.pretrained.merging import merge_lora as run

    adapters = existing(src) / "adapters"
    if not adapters.is_dir():
        adapters = src
    sizes = {"buffer": buffer, "max_shard_size": max_shard_size}
    _write("merging", run, adapters, dst, base, force=force, **sizes)


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the commands."""
    commands.callback()(help_if_alone)
    cli.add_typer(commands)
    cli.command("merge-lora", epilog=MERGE)(merge_lora)


_MOST_DAMAGES = 20
_WIDE = 10_000  # columns of a list that is not shown in a terminal: each checkpoint on a line


def _write(
    doing: str, run: Callable[..., object], src: Place, dst: Place, *more: Any, **options: Any
) -> None:
    """Write a checkpoint in another form, and show what was written."""
    from shardwise.checkpoint.disk.place import in_memory

    if in_memory(dst):
        raise UserError(
            f"DST: found {dst}, expected a path or another URL: what is in memory ends with this "
            "command"
        )
    with (
        warnings.catch_warnings(record=True, action="always", category=UserWarning) as notes,
        reporting_errors(),
        progress(doing, unit="bytes") as work,
    ):
        run(src, dst, *more, watch=work.of, **options)
    _show_written(dst)
    for note in notes:
        show(f"note: {note.message}")


def _show_list(where: Place, found: Sequence[Listed], *, json: bool) -> None:
    """Show the checkpoints of a folder."""
    if json:
        _print_json([_listed(each) for each in found])
        return
    if not found:
        show(f"no checkpoints in {where}")
        return
    table = _table("step", "size", "state", "ranks", "mesh", "strategy", "format")
    for each in found:
        table.add_row(
            _text(each.path.name if each.step is None else str(each.step)),
            Text(binary_size(each.nbytes)),
            Text("incomplete", style="red") if each.problem else Text("complete", style="green"),
            *map(
                _text,
                (
                    "" if each.world_size is None else str(each.world_size),
                    each.mesh,
                    each.strategy,
                    each.format.value if each.format else "",
                ),
            ),
        )
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    console.print(table)
    for each in found:
        if each.problem:
            console.print(_text(f"{each.path.name}: {each.problem}", style="dim"))


def _show_leftovers(where: Place, found: Sequence[Leftover], *, json: bool) -> None:
    """Show what killed saves have left in a folder, and when it is deleted."""
    if json:
        _print_json([{**dataclasses.asdict(each), "path": str(each.path)} for each in found])
        return
    if not found:
        show(f"no leftovers in {where}")
        return
    table = _table("name", "size", "age", "deleted")
    for each in found:
        when = each.kept or "by the next save, or now with: shardwise checkpoint clean"
        age = f"{each.age / 3600:,.1f} h"
        table.add_row(_text(each.path.name), Text(binary_size(each.nbytes)), age, _text(when))
    Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False).print(table)


def _listed(each: Listed) -> dict[str, Any]:
    fields = dataclasses.asdict(each)
    return {
        **fields,
        "path": str(each.path),
        "format": each.format.value if each.format else None,
        "complete": not each.problem,
    }


def _show_damages(where: Place, found: Sequence[Damage], *, json: bool) -> None:
    """Show what ``verify`` found."""
    if json:
        _print_json({"path": str(where), "damaged": [dataclasses.asdict(each) for each in found]})
        return
    for each in found[:_MOST_DAMAGES]:
        show(f"damaged: file {each.file}, parameter {each.parameter}, piece {each.piece}")
        show(f"         {each.reason}")
    if len(found) > _MOST_DAMAGES:
        show(f"and {len(found) - _MOST_DAMAGES} more")
    if not found:
        show(f"{where}: every checksum is right")
    else:
        places = counted(found, "place")
        show(f"{where}: damaged in {places}; an older checkpoint may be intact, see: ls")


def _show_contents(source: Source, *, values: bool, layers: bool, json: bool) -> None:
    """Show what a checkpoint contains; JSON has everything, but values only if they are wanted."""
    if json:
        _print_json(_contents(source, values=values))
        return
    console = _console()
    console.print(_text(str(source.where), style="bold"))
    for line in source.about:
        console.print(_text(line))
    for section in ("model", "optimizer", "extra"):
        paths = [path for path in source.tensors if path[0] == section]
        if paths:
            _print_section(console, section, paths, source, layers=layers)
    if values and source.values:
        console.print()
        console.print(Text("values", style="bold"))
        for path, value in source.values.items():
            console.print(_text(f"{_dotted(path)} = {_short(repr(value))}"))


def _print_section(
    console: Console, section: str, paths: Sequence[StatePath], source: Source, *, layers: bool
) -> None:
    """Print the tensors of the model, the optimizer or the rest."""
    total = sum(source.tensors[path].nbytes for path in paths)
    numel = sum(source.tensors[path].numel for path in paths)
    console.print()
    title = f"{section}: {counted(paths, 'tensor')}, {numel:,} elements, {binary_size(total)}"
    console.print(Text(title, style="bold"))
    sharded = any(path in source.placements for path in paths)
    table = _table("name", "shape", "dtype", *(["placements"] if sharded else []))
    facts: dict[StatePath, tuple[str, ...]] = {}
    for path in paths:
        info, placed = source.tensors[path], source.placements.get(path, "")
        facts[path] = (shape_in_words(info.shape), info.dtype, placed)[: len(table.columns) - 1]
    add_rows(
        table,
        fold(
            paths,
            name=lambda path: _dotted(path[1:]),
            kind=lambda path: path if layers else facts[path],
        ),
        lambda row: facts[row.first],
    )
    console.print(table)


def _dotted(path: StatePath) -> str:
    from shardwise.checkpoint.disk.entries import dotted  # imports torch

    return dotted(path)


def _contents(source: Source, *, values: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "path": str(source.where),
        "about": list(source.about),
        "tensors": [
            {
                "section": str(path[0]),
                "name": _dotted(path[1:]),
                "shape": list(info.shape),
                "dtype": info.dtype,
                "nbytes": info.nbytes,
                "placements": source.placements.get(path, ""),
            }
            for path, info in source.tensors.items()
        ],
    }
    if values:
        found["values"] = {_dotted(path): repr(value) for path, value in source.values.items()}
    return found


def _show_differences(
    first: Place, second: Place, found: Sequence[Difference], *, layers: bool, json: bool
) -> None:
    """Show the differences of two checkpoints; JSON always has all of them."""
    if json:
        fields = [dataclasses.asdict(each) for each in found]
        for entry in fields:  # JSON has neither nan nor inf
            if entry["max_abs"] is not None and not math.isfinite(entry["max_abs"]):
                entry["max_abs"] = str(entry["max_abs"])
        _print_json({"a": str(first), "b": str(second), "differences": fields})
        return
    if not found:
        show(f"{first} and {second} hold the same")
        return
    rows = fold(
        found,
        name=lambda each: each.name,
        kind=lambda each: (each.what, each.first, each.second, layers and each.name),
    )
    table = _table("name", "differs in", "A", "B", "max abs", "elements")
    add_rows(table, rows, _difference_cells)
    console = _console()
    console.print(_text(f"A  {first}"))
    console.print(_text(f"B  {second}"))
    console.print(table)
    show(counted(found, "difference"))


def _difference_cells(row: Row[Difference]) -> tuple[str, ...]:
    """The largest difference of a row's members, and the number of elements in all of them."""
    largest = [each.max_abs for each in row.members if each.max_abs is not None]
    counts = [each.count for each in row.members if each.count is not None]
    return (
        row.first.what,
        _short(row.first.first),
        _short(row.first.second),
        f"{max(largest, key=nan_last):.3g}" if largest else "",
        f"{sum(counts):,}" if counts else "",
    )


def _show_written(path: Place) -> None:
    """Show what was written, and what ``from_pretrained`` will miss in it."""
    from shardwise.checkpoint.disk.companions import TOKENIZERS
    from shardwise.checkpoint.disk.place import read_whole
    from shardwise.checkpoint.formats.detect import Format, format_of
    from shardwise.checkpoint.formats.hf import CONFIG

    sizes = _sizes(path)
    what = f" in {counted(sizes, 'file')}" if sizes.keys() != {path.name} else ""
    show(f"wrote {path}: {binary_size(sum(sizes.values()))}{what}")
    if path.name in sizes or format_of(path) is not Format.HF:
        return
    if CONFIG not in sizes:
        show(f"note: from_pretrained needs {path / CONFIG}; the source has none, so add one")
        return
    config = json_module.loads(read_whole(path / CONFIG, sizes[CONFIG]))
    if "vocab_size" in config and not sizes.keys() & {*TOKENIZERS}:
        show(f"note: AutoTokenizer needs a tokenizer in {path}; the source has none, so add one")


def _sizes(path: Place) -> dict[str, int]:
    """The bytes of a file, or of the files of a folder, by their names."""
    if isinstance(path, Path):
        files = [path] if path.is_file() else sorted(filter(Path.is_file, path.iterdir()))
        return {each.name: each.stat().st_size for each in files}
    file = path.find()
    found = path.listed()[1] if file is None else {path.name: file}
    return {name: each.size for name, each in found.items()}


def _table(*columns: str) -> Table:
    """A table without lines. In a narrow terminal, text wraps and figures do not."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        figures = column in ("step", "size", "ranks", "max abs", "elements", "dtype", "state")
        table.add_column(
            column,
            overflow="fold",
            no_wrap=figures,
            justify="right" if column in ("step", "size", "ranks", "elements") else "left",
        )
    return table


def _console() -> Console:
    return Console(width=shutil.get_terminal_size((80, 24)).columns, highlight=False)


def _text(text: str, style: str = "") -> Text:
    """Text for a table or a console, as a terminal can show it."""
    return Text(printable(text), style)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _print_json(value: Any) -> None:
    print(json_module.dumps(value, indent=2))
