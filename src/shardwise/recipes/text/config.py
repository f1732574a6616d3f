"""The configuration of ``shardwise train lm``, and its models by name. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.launch.world import World
from shardwise.recipes.core.begin import check_extras
from shardwise.recipes.core.config import (
    AdamWConfig,
    OptionError,
    OutputConfig,
    TrainConfig,
    as_json,
    check_train,
    find_settings,
    require,
    resolve_sharding,
)
from shardwise.recipes.core.option import (
    BY_MODEL,
    MODEL,
    SAMPLE,
    TRAINING,
    Reads,
    model_option,
    option,
)
from shardwise.recipes.core.position import Span
from shardwise.recipes.core.rundir import RunDir, check_same, check_same_model
from shardwise.recipes.text.data import TextData, load_text
from shardwise.recipes.text.documents import Documents, find_documents, is_streamed

_NOT_BOTH = "none given with --batch-tokens, from which it follows"
_ONLY_DOCUMENTS = (
    "none given where tokens are the bytes of files, whose sequences --seed shuffles; documents "
    "are hf:NAME, .jsonl, .parquet, or anything with --tokenizer"
)
DEFAULT_PROMPT = "class Shard:\n    def __init__(self, "  # for the default data


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a training uses unless the user says otherwise.

    Attributes:
        steps: optimizer steps.
        batch_size: sequences per rank and microbatch.
        seq_length: tokens per sequence.
        lr: peak learning rate.
    """

    steps: int
    batch_size: int
    seq_length: int
    lr: float


@dataclass(frozen=True, kw_only=True)
class LlamaPreset:
    """The shape of a Llama. Sizes in names count all parameters but the embedding and the head.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width inside the feed-forward blocks.
        layers: number of decoder layers.
        heads: number of attention heads.
        positions: tokens of the longest sequence.
        defaults: of its training.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    positions: int
    defaults: Defaults

    def settings(self) -> dict[str, Any]:
        """Return the settings, as in a ``config.json`` of ``transformers``."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.positions,
        }


PRESETS = {
    "llama-tiny": LlamaPreset(
        hidden=128,
        intermediate=384,
        layers=4,
        heads=4,
        positions=1024,
        defaults=Defaults(steps=600, batch_size=4, seq_length=128, lr=2e-3),
    ),
    "llama-34m": LlamaPreset(
        hidden=512,
        intermediate=2048,
        layers=8,
        heads=8,
        positions=2048,
        defaults=Defaults(steps=1000, batch_size=4, seq_length=512, lr=1e-3),
    ),
    "llama-150m": LlamaPreset(
        hidden=1024,
        intermediate=2688,
        layers=12,
        heads=16,
        positions=2048,
        defaults=Defaults(steps=2000, batch_size=8, seq_length=1024, lr=4e-4),
    ),
}

FOR_CONFIG_FILES = Defaults(steps=1000, batch_size=4, seq_length=256, lr=4e-4)


@dataclass(frozen=True, kw_only=True)
class LmConfig:
    """A training of a language model."""

    model: str = field(metadata=model_option(PRESETS))
    data: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Text to train on: files, folders, patterns; .jsonl and .parquet are streamed; "
            "hf:NAME:CONFIG is a dataset of the Hugging Face Hub.",
            MODEL,
            metavar="TEXT",
            reads=Reads.NAME,
            shown="the Python standard library's source",
            takes_arguments=True,
        ),
    )
    tokenizer: str | None = field(
        default=None,
        metadata=option(
            "A tokenizer of transformers, by name or folder; documents are then streamed.",
            MODEL,
            metavar="NAME",
            reads=Reads.NAME,
            shown="bytes",
        ),
    )
    streams: int | None = field(
        default=None,
        metadata=option(
            "Streams that documents are split into; a multiple of the world size is best.",
            MODEL,
            shown="by world size, 8 or more",
        ),
    )
    shuffle_buffer: int = field(
        default=0,
        metadata=option(
            "Documents of each stream that are shuffled together, by --seed; 0: the order of the "
            "source.",
            MODEL,
        ),
    )
    seq_length: int = field(metadata=option("Tokens per sequence.", MODEL, shown=BY_MODEL))
    train: TrainConfig
    batch_tokens: int | None = field(
        default=None,
        metadata=option(
            "Tokens per step over all ranks. --accumulate follows from it; --batch-size is then "
            "the most sequences of a microbatch.",
            TRAINING,
        ),
    )
    peak_flops: float | None = field(
        default=None,
        metadata=option(
            "Peak FLOP/s of one device, for MFU.", TRAINING, shown="from a table of GPUs"
        ),
    )
    prompt: str | None = field(
        default=None,
        metadata=option(
            "Beginning of the sample.",
            SAMPLE,
            shown="a line of Python, or nothing with --data",
        ),
    )
    sample_tokens: int = field(
        default=200, metadata=option("Tokens of the sample; 0: no sample.", SAMPLE)
    )
    temperature: float = field(
        default=0.9, metadata=option("0: always the most likely token.", SAMPLE)
    )

    @classmethod
    def for_model(cls, model: str) -> LmConfig:
        """Return the configuration with the defaults that go with ``--model``."""
        preset = PRESETS.get(model)
        defaults = FOR_CONFIG_FILES if preset is None else preset.defaults
        return cls(
            model=model,
            seq_length=defaults.seq_length,
            train=TrainConfig(
                steps=defaults.steps,
                batch_size=defaults.batch_size,
                optimizer=AdamWConfig(lr=defaults.lr),
                output=OutputConfig(out=Path("runs/lm")),
            ),
        )

    @property
    def files(self) -> RunDir:
        """The folder of the run."""
        return RunDir(self.train.output.out)

    @property
    def prompt_text(self) -> str:
        """What the sample begins with."""
        if self.prompt is not None:
            return self.prompt
        return "" if self.data else DEFAULT_PROMPT

    def check(self, world: World) -> LmInputs:
        """Check everything that can be checked without torch, and find the data.

        Raises:
            UserError: one line that says what is wrong.
        """
        settings = self._check(world)
        check_extras(["transformers", "matplotlib"], tensorboard=self.train.output.tensorboard)
        config = with_microbatches(self, world.size)
        if is_streamed(self.data, self.tokenizer):
            return LmInputs(config, settings, find_documents(self.data, self.tokenizer))
        for name, given in (
            ("--streams", self.streams),
            ("--shuffle-buffer", self.shuffle_buffer),
        ):
            require(not given, name, given, _ONLY_DOCUMENTS)
        return LmInputs(config, settings, load_text(self.data, self.seq_length))

    def check_dry_run(self, world: World) -> None:
        """Check what ``--dry-run`` needs: no data, no folder.

        Raises:
            UserError: one line that says what is wrong.
        """
        self._check(world)
        check_extras(["transformers"], tensorboard=False)

    def _check(self, world: World) -> dict[str, Any]:
        check_train(self.train)
        _check_numbers(self)
        self.check_world(world)
        settings = self.settings()
        longest = longest_sequence(settings)
        if longest is not None:
            expected = f"at most {longest}, the positions of {self.model}"
            require(self.seq_length <= longest, "--seq-length", self.seq_length, expected)
        return settings

    def check_world(self, world: World) -> None:
        """Check that the configuration fits the world; look at no files.

        Raises:
            OptionError: it does not fit.
        """
        resolve_sharding(self.train.sharding, world.size, world.hosts)
        with_microbatches(self, world.size)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the model, as in a ``config.json``.

        Raises:
            OptionError: no model has this name.
        """
        return find_settings(self.model, {name: each.settings() for name, each in PRESETS.items()})


@dataclass(frozen=True)
class LmInputs:
    """A checked configuration, and what it refers to.

    Attributes:
        config: the configuration, with its microbatches.
        settings: of the model, as in a ``config.json``.
        text: the data.
    """

    recipe = "lm"

    config: LmConfig
    settings: dict[str, Any]
    text: TextData | Documents

    @property
    def train(self) -> TrainConfig:
        """What does not depend on model and data."""
        return self.config.train

    @property
    def span(self) -> Span:
        """How long the training is."""
        return Span.of(self.train)

    def facts(self) -> dict[str, Any]:
        """Return config, model and data for ``run.json``: what is the same in every session."""
        return {
            "config": as_json(self.config),
            "model": {"name": self.config.model, "settings": self.settings},
            "data": self.text.facts(),
        }

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Check that model, data and order are those of the run that is resumed."""
        now = self.facts()
        data = before.get("data", {})
        # First, since the default of --seq-length goes with the model.
        check_same_model(before.get("model", {}), now["model"], {})
        config = {"shuffle_buffer": 0, **before.get("config", {})}  # as before there was one
        fixed = {"seq_length": "--seq-length", "shuffle_buffer": "--shuffle-buffer"}
        check_same(config, now["config"], fixed)
        if data.get("fingerprint") != now["data"]["fingerprint"]:
            raise OptionError(
                "--data",
                f"{self.text.summary}, tokenizer {self.config.tokenizer or 'bytes'}",
                f"{data.get('summary')}, tokenizer {data.get('tokenizer', 'bytes')}, as the run "
                "began that --resume goes on",
            )


def _check_numbers(config: LmConfig) -> None:
    require(config.seq_length >= 1, "--seq-length", config.seq_length, "1 or more")
    require(config.sample_tokens >= 0, "--sample-tokens", config.sample_tokens, "0 or more")
    require(0 <= config.temperature < math.inf, "--temperature", config.temperature, "0 or more")
    if config.streams is not None:
        require(config.streams >= 1, "--streams", config.streams, "1 or more")
    buffer = config.shuffle_buffer
    require(buffer >= 0, "--shuffle-buffer", buffer, "0 or more documents")
    if config.peak_flops is not None:
        found, expected = config.peak_flops, "FLOP/s of one device, such as 312e12"
        require(0 < found < math.inf, "--peak-flops", found, expected)


def with_microbatches(config: LmConfig, world_size: int) -> LmConfig:
    """Return the configuration with the microbatches that ``batch_tokens`` asks for, if it is set.

    A step has the same examples in every world that can divide them evenly. A microbatch has as
    many sequences as divide a rank's part of the step, and at most ``train.batch_size``.

    Raises:
        OptionError: the ranks cannot divide the tokens.
    """
    if config.batch_tokens is None:
        return config
    tokens, smallest = config.batch_tokens, config.seq_length * world_size
    require(config.train.accumulate == 1, "--accumulate", config.train.accumulate, _NOT_BOTH)
    near = max(1, round(tokens / smallest)) * smallest
    require(
        tokens > 0 and tokens % smallest == 0,
        "--batch-tokens",
        tokens,
        f"a multiple of {smallest}, which is {config.seq_length} tokens x {world_size} ranks, "
        f"such as {near}",
    )
    each = tokens // smallest
    size = max(n for n in range(1, min(config.train.batch_size, each) + 1) if each % n == 0)
    train = replace(config.train, batch_size=size, accumulate=each // size)
    return replace(config, train=train)


def longest_sequence(settings: dict[str, Any]) -> int | None:
    """Return the number of positions of a model; None if its settings do not say."""
    found = settings.get("max_position_embeddings", settings.get("n_positions"))
    return found if isinstance(found, int) else None
