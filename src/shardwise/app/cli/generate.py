"""``shardwise generate``: text from a run, a checkpoint or a published model, as it comes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from shardwise.app.cli.options import NameArgument, Options, keyword_only, with_options
from shardwise.app.recipes.core.installed import check_extras
from shardwise.app.recipes.text.request import Request
from shardwise.base.errors import UserError
from shardwise.base.progress import progress
from shardwise.elastic.rank import importing
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import check_nproc

_EXAMPLES = """\
[bold]Examples[/bold]

  [cyan]shardwise generate runs/lm --prompt "import torch"[/cyan]

An answer of a chat model, always the most likely token:
  [cyan]shardwise generate Qwen/Qwen3-0.6B --chat --temperature 0 \\
    --prompt "What is a shard?"[/cyan]

A model too large for one process, over four, with the prompt of a file:
  [cyan]shardwise generate my-model --nproc 4 --prompt - < prompt.txt[/cyan]\
"""


_TEXT = """Generate text with a language model, and print it as it comes.

A text ends with the model's end-of-text token, or after --max-tokens.
"""

_SRC = keyword_only(
    "src",
    Annotated[
        str,
        NameArgument(
            metavar="SRC",
            help="A run (its newest checkpoint), a checkpoint, a folder of transformers, or a name "
            "on the Hugging Face Hub.",
        ),
    ],
)


def run(request: Request) -> None:
    """Generate, and print.

    Raises:
        UserError: an option is wrong, or there is no such model.
    """
    check_extras(["transformers"])
    if "RANK" in os.environ:
        raise UserError(
            f"environment: found RANK={os.environ['RANK']}, expected a process that is no rank; "
            "--nproc starts the ranks"
        )
    processes = check_nproc(request.nproc, None)
    try:
        if request.prompt == "-":
            request = replace(request, prompt=sys.stdin.read())
        request.prompt.encode()
    except UnicodeError:  # by the locale, bytes that are none are an error, or stand for themselves
        raise OptionError("--prompt", "bytes that are no UTF-8", "text in UTF-8") from None
    with progress("importing torch and transformers"), importing():
        from shardwise.app.recipes.text.generate import generate
        from shardwise.elastic.call import launch

    if processes == 1:
        generate(request)
    else:
        launch(generate, (request,), nproc=processes)


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the command."""
    options = Options(default=Request())

    def generate(given: Mapping[str, Any]) -> None:
        run(replace(options.read(given), source=given["src"]))

    cli.command("generate", epilog=_EXAMPLES)(with_options(generate, [options], _TEXT, [_SRC]))
