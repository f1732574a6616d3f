"""``shardwise generate``: text from a run, a checkpoint or a published model, as it comes."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from shardwise.app.cli.options import NameArgument, Options, keyword_only, with_options
from shardwise.app.recipes.core.installed import check_extras
from shardwise.base.errors import UserError
from shardwise.base.progress import progress
from shardwise.elastic.rank import importing
from shardwise.insight.schema.option import (
    SEEDS,
    Bounds,
    Config,
    Count,
    Natural,
    NotNegative,
    Reads,
    setting,
)
from shardwise.insight.schema.training import check_nproc, read_nproc

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


class _Dtype(enum.Enum):
    FLOAT32 = "fp32"
    BFLOAT16 = "bf16"
    FLOAT16 = "fp16"


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Config):
    """What ``shardwise generate`` is asked for."""

    prompt: str = setting(
        "", "Beginning of the text; - reads standard input.", metavar="TEXT", reads=Reads.TEXT
    )
    chat: bool = setting(False, "The prompt is a message, by the tokenizer's chat template.")
    max_tokens: Count = setting(200, "The most tokens to generate.", metavar="N")
    temperature: NotNegative = setting(
        0.9, "0: always the most likely token; 1: as the model says.", metavar="T"
    )
    top_k: Natural = setting(0, "Draw from the K most likely tokens; 0: from all.", metavar="K")
    top_p: Annotated[float, Bounds(above=0, most=1)] = setting(
        1.0, "Draw from the most likely tokens with this probability; 1: all.", metavar="P"
    )
    seed: Annotated[int, SEEDS] = setting(0, "Seed of the drawing.", metavar="N")
    nproc: Count = setting(
        1,
        "Processes on this host to shard the model over: a number, gpu, cpu or auto.",
        metavar="N",
        shown="1",
        reads=read_nproc,
    )
    dtype: _Dtype | None = setting(None, "{choices}.", metavar="DTYPE", shown="as saved")

    def run(self, source: str) -> None:
        """Generate, and print.

        Raises:
            UserError: an option is wrong, or there is no such model.
        """
        check_extras(["transformers"])
        if "RANK" in os.environ:
            raise UserError(
                f"environment: found RANK={os.environ['RANK']}, expected a process that is no "
                "rank; --nproc starts the ranks"
            )
        processes = check_nproc(self.nproc, None)
        prompt = sys.stdin.read() if self.prompt == "-" else self.prompt

        with progress("importing torch and transformers"), importing():
            from shardwise.app.recipes.core.model import Sampling
            from shardwise.app.recipes.text.generate import Request, generate
            from shardwise.base import devices
            from shardwise.elastic.call import launch

        request = Request(
            source=source,
            prompt=prompt,
            chat=self.chat,
            max_tokens=self.max_tokens,
            sampling=Sampling(
                temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed
            ),
            dtype=None if self.dtype is None else self.dtype.name.lower(),
            device=devices.default_type(),
        )
        if processes == 1:
            generate(request)
        else:
            launch(generate, (request,), nproc=processes)


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the command."""
    options = Options(default=GenerateConfig())

    def generate(given: Mapping[str, Any]) -> None:
        options.read(given).run(given["src"])

    cli.command("generate", epilog=_EXAMPLES)(with_options(generate, [options], _TEXT, [_SRC]))
