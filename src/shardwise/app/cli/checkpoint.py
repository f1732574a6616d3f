"""``shardwise checkpoint``: list, show, verify, compare and convert checkpoints; ``merge-lora``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from shardwise.app.cli import checkpoint_show as show
from shardwise.app.cli.values import (
    Json,
    Layers,
    help_if_alone,
    read_name,
    read_path,
    read_size,
)
from shardwise.app.recipes.core.begin import check_extras
from shardwise.base.errors import CheckpointError
from shardwise.base.units import printable
from shardwise.elastic.errors import UserError

commands = typer.Typer(
    name="checkpoint",
    help="Show checkpoints, verify them, and convert them to other formats.",
    invoke_without_command=True,
)

Checkpoint = Annotated[
    Path,
    Argument(
        parser=read_path,
        metavar="SRC",
        help="A checkpoint of any format, or a run (its newest complete checkpoint).",
        show_default=False,
    ),
]
Buffer = Annotated[
    int, Option(parser=read_size, metavar="SIZE", help="Memory for buffers: 8MiB, 1GB.")
]
Target = Annotated[
    Path,
    Argument(parser=read_path, metavar="DST", help="The folder to write.", show_default=False),
]
Force = Annotated[bool, Option("--force", help="Replace the checkpoint that is at DST.")]
DEFAULT_BUFFER: Any = "32MiB"
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


def existing(path: Path) -> Path:
    """Return the path of something that exists.

    Raises:
        UserError: nothing does.
    """
    if not path.exists():
        raise UserError(f"found nothing at {path}, expected a checkpoint")
    return path


@commands.command(epilog=_example("ls runs/lm"))
def ls(
    directory: Annotated[
        Path,
        Argument(
            parser=read_path,
            metavar="DIR",
            help="A run, or a folder of checkpoints.",
            show_default=False,
        ),
    ],
    json: Json = False,
) -> None:
    """List checkpoints: step, size, whether they are complete, and the mesh they were saved on."""
    from shardwise.checkpoint.tools.survey import list_checkpoints

    with reporting_errors():
        found = list_checkpoints(existing(directory))
    show.listing(directory, found, json=json)


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
        with show.progress("verifying") as watch:
            damages = list(run(path, buffer=buffer, watch=watch))
    show.damages(path, damages, json=json)
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
        show.contents(source, values=values, layers=layers, json=json)


@commands.command(epilog=_example("diff runs/lm/checkpoints/step-00000200 runs/lm"))
def diff(
    first: Annotated[Path, Argument(parser=read_path, metavar="A", show_default=False)],
    second: Annotated[Path, Argument(parser=read_path, metavar="B", show_default=False)],
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
        show.progress("comparing") as watch,
    ):
        found = list(differences(a, b, buffer=buffer, watch=watch))
    show.differences(a.where, b.where, found, layers=layers, json=json)
    if found:
        raise typer.Exit(1)


@commands.command(epilog=_example("consolidate runs/lm lm.safetensors --buffer 8MiB"))
def consolidate(
    src: Checkpoint,
    dst: Annotated[
        Path,
        Argument(
            parser=read_path,
            metavar="DST",
            help="file.safetensors; file.pt, .pth or .bin; or a name without an extension, for a "
            "folder of safetensors files.",
            show_default=False,
        ),
    ],
    max_shard_size: Annotated[
        int | None,
        Option(
            parser=read_size,
            metavar="SIZE",
            help="Largest size of a file in a folder.",
            show_default="50GB",
        ),
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

    with reporting_errors(), show.progress("consolidating") as watch:
        run(
            existing(src),
            dst,
            everything=everything,
            force=force,
            buffer=buffer,
            max_shard_size=max_shard_size,
            watch=watch,
        )
    show.written(dst)


@commands.command(epilog=_example("convert runs/lm lm-hf --to hf --max-shard-size 5GB"))
def convert(
    src: Checkpoint,
    dst: Target,
    to: Annotated[str, Option(metavar="FORMAT", help="shardwise, dcp or hf.", show_default=False)],
    max_shard_size: Annotated[
        int | None,
        Option(
            parser=read_size,
            metavar="SIZE",
            help="Largest size of a file, for hf.",
            show_default="50GB",
        ),
    ] = None,
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

    with reporting_errors(), show.progress("converting") as watch:
        run(
            existing(src),
            dst,
            Format(to),
            force=force,
            buffer=buffer,
            max_shard_size=max_shard_size,
            watch=watch,
        )
    show.written(dst)


def merge_lora(
    src: Annotated[
        Path,
        Argument(
            parser=read_path,
            metavar="SRC",
            help="A folder of adapters, as peft writes it, or a run with --lora.",
            show_default=False,
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
    max_shard_size: Annotated[
        int, Option(parser=read_size, metavar="SIZE", help="Largest size of a file.")
    ] = _FILE_SIZE,
    force: Force = False,
    buffer: Buffer = DEFAULT_BUFFER,
) -> None:
    """Merge LoRA adapters into the weights of their base model, one layer at a time.

    transformers loads the result alone: weights, config.json and tokenizer.
    """
    check_extras(["peft", "transformers"])
    from shardwise.frontends.pretrained.merging import merge_lora as run

    adapters = existing(src) / "adapters"
    if not adapters.is_dir():
        adapters = src
    with reporting_errors(), show.progress("merging") as watch:
        run(
            adapters,
            dst,
            base,
            force=force,
            buffer=buffer,
            max_shard_size=max_shard_size,
            watch=watch,
        )
    show.written(dst)


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the commands."""
    commands.callback()(help_if_alone)
    cli.add_typer(commands)
    cli.command("merge-lora", epilog=MERGE)(merge_lora)
