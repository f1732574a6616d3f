"""What ``shardwise generate`` is asked for. No torch here."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

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
from shardwise.insight.schema.training import read_nproc


class LoadedAs(enum.Enum):
    """Dtypes of parameters; their names are torch's."""

    FLOAT32 = "fp32"
    BFLOAT16 = "bf16"
    FLOAT16 = "fp16"


@dataclass(frozen=True, kw_only=True)
class Request(Config):
    """A text to generate, and how.

    Attributes:
        source: a run, a checkpoint, a folder of ``save_pretrained``, a URL, or a name on the
            Hub.
    """

    source: str = ""
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
    dtype: LoadedAs | None = setting(None, "{choices}.", metavar="DTYPE", shown="as saved")
