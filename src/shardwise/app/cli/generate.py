"""``shardwise generate``: text from a run, a checkpoint or a published model, as it comes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer import Option

from shardwise.app.cli.options import Integer, NameArgument, Number
from shardwise.app.recipes.core.installed import check_extras
from shardwise.base.errors import UserError
from shardwise.base.progress import progress
from shardwise.elastic.rank import importing
from shardwise.insight.schema.option import SEEDS, Bounds, check_number, require
from shardwise.insight.schema.training import check_nproc

EXAMPLES = """\
[bold]Examples[/bold]

  [cyan]shardwise generate runs/lm --prompt "import torch"[/cyan]

An answer of a chat model, always the most likely token:
  [cyan]shardwise generate Qwen/Qwen3-0.6B --chat --temperature 0 \\
    --prompt "What is a shard?"[/cyan]

A model too large for one process, over four, with the prompt of a file:
  [cyan]shardwise generate my-model --nproc 4 --prompt - < prompt.txt[/cyan]\
"""


def generate(
    src: Annotated[
        str,
        NameArgument(
            metavar="SRC",
            help="A run (its newest checkpoint), a checkpoint, a folder of transformers, or a name "
            "on the Hugging Face Hub.",
        ),
    ],
    prompt: Annotated[
        str, Option(metavar="TEXT", help="Beginning of the text; - reads standard input.")
    ] = "",
    chat: Annotated[
        bool, Option("--chat", help="The prompt is a message, by the tokenizer's chat template.")
    ] = False,
    max_tokens: Annotated[int, Integer(metavar="N", help="The most tokens to generate.")] = 200,
    temperature: Annotated[
        float, Number(metavar="T", help="0: always the most likely token; 1: as the model says.")
    ] = 0.9,
    top_k: Annotated[
        int, Integer(metavar="K", help="Draw from the K most likely tokens; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float,
        Number(metavar="P", help="Draw from the most likely tokens with this probability; 1: all."),
    ] = 1.0,
    seed: Annotated[int, Integer(metavar="N", help="Seed of the drawing.")] = 0,
    nproc: Annotated[
        int, Integer(metavar="N", help="Processes on this host to shard the model over.")
    ] = 1,
    dtype: Annotated[
        str | None,
        Option(metavar="DTYPE", help="fp32, bf16 or fp16.", show_default="as saved"),
    ] = None,
) -> None:
    """Generate text with a language model, and print it as it comes.

    A text ends with the model's end-of-text token, or after --max-tokens.
    """
    check_number("--max-tokens", max_tokens, Bounds(least=1))
    check_number("--temperature", temperature, Bounds(least=0))
    check_number("--top-k", top_k, Bounds(least=0))
    require(0 < top_p <= 1, "--top-p", top_p, "more than 0, and 1 at most")
    check_number("--seed", seed, SEEDS)
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    if dtype is not None:
        require(dtype in names, "--dtype", dtype, f"one of {', '.join(names)}")
    check_extras(["transformers"])
    if "RANK" in os.environ:
        raise UserError(
            f"environment: found RANK={os.environ['RANK']}, expected a process that is no rank; "
            "--nproc starts the ranks"
        )
    processes = check_nproc(nproc, None)
    if prompt == "-":
        prompt = sys.stdin.read()

    with progress("importing torch and transformers"), importing():
        from shardwise.app.recipes.core.model import Sampling
        from shardwise.app.recipes.text.generate import Request
        from shardwise.app.recipes.text.generate import generate as run
        from shardwise.base import devices
        from shardwise.elastic.call import launch

    request = Request(
        source=src,
        prompt=prompt,
        chat=chat,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        dtype=None if dtype is None else names[dtype],
        device=devices.default_type(),
    )
    if processes == 1:
        run(request)
    else:
        launch(run, (request,), nproc=processes)


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the command."""
    cli.command("generate", epilog=EXAMPLES)(generate)
