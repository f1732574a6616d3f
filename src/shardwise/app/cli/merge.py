"""``shardwise merge-lora``: write the weights of a model with its adapters merged into them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from shardwise.app.cli import checkpoint_show as show
from shardwise.app.cli.checkpoint import DEFAULT_BUFFER, Buffer, Force, existing, reporting_errors
from shardwise.app.cli.values import read_name, read_path, read_size
from shardwise.app.recipes.core.begin import check_extras

EXAMPLES = """\
[bold]Examples[/bold]

  [cyan]shardwise merge-lora runs/lm merged[/cyan]

  [cyan]shardwise merge-lora adapters merged --base Llama-3.2-1B[/cyan]\
"""

_SIZE: Any = "50GB"


def merge(
    src: Annotated[
        Path,
        Argument(
            parser=read_path,
            metavar="SRC",
            help="A folder of adapters, as peft writes it, or a run with --lora.",
            show_default=False,
        ),
    ],
    dst: Annotated[
        Path,
        Argument(parser=read_path, metavar="DST", help="The folder to write.", show_default=False),
    ],
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
    ] = _SIZE,
    force: Force = False,
    buffer: Buffer = DEFAULT_BUFFER,
) -> None:
    """Merge LoRA adapters into the weights of their base model, one layer at a time.

    transformers loads the result alone: weights, config.json and tokenizer.
    """
    check_extras(["peft", "transformers"])
    from shardwise.frontends.pretrained.merging import merge_lora

    adapters = existing(src) / "adapters"
    if not adapters.is_dir():
        adapters = src
    with reporting_errors(), show.progress("merging") as watch:
        merge_lora(
            adapters,
            dst,
            base,
            force=force,
            buffer=buffer,
            max_shard_size=max_shard_size,
            watch=watch,
        )
    show.written(dst)
