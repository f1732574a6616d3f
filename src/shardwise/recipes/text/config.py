"""What ``shardwise train lm`` is asked to do, and whether that can be done. No torch here.

Language models by name, with settings that suit them. No torch here: the command line asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.launch.world import World
from shardwise.recipes.core.begin import check_extras
from shardwise.recipes.core.config import (
    OptionError,
    TrainConfig,
    as_json,
    check_train,
    find_settings,
    require,
    resolve_sharding,
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
class LmConfig:
    """A training of a language model.

    Attributes:
        model: a preset's name or the path of a ``config.json``.
        data: files, folders and patterns; the standard library's source where empty.
        seq_length: tokens of a sequence.
        prompt: what the sample begins with; None: what suits the data.
        sample_tokens: length of the sample; 0: none.
        temperature: of the sample.
        tokenizer: name or folder of a tokenizer of ``transformers``; None: tokens are bytes.
        streams: into how many streams documents are dealt out; None: what suits the world.
        shuffle_buffer: documents of a stream that are shuffled together; 0: none are.
        batch_tokens: tokens of a step over all ranks, from which microbatches follow; None: they
            follow from ``train.batch_size`` and ``train.accumulate``.
        peak_flops: of one device, for its utilisation; None: from a table.
        train: everything that is not particular to language models.
    """

    model: str
    data: tuple[str, ...] = ()
    seq_length: int
    prompt: str | None = None
    sample_tokens: int = 200
    temperature: float = 0.9
    tokenizer: str | None = None
    streams: int | None = None
    shuffle_buffer: int = 0
    batch_tokens: int | None = None
    peak_flops: float | None = None
    train: TrainConfig

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
        """See :func:`check_lm`."""
        return check_lm(self, world)

    def check_world(self, world: World) -> None:
        """Check what is asked for against the world alone.

        Raises:
            OptionError: it does not fit.
        """
        resolve_sharding(self.train.sharding, world.size, world.hosts)
        sized(self, world.size)


@dataclass(frozen=True)
class LmInputs:
    """What a configuration refers to.

    Attributes:
        config: the configuration.
        settings: of the model, as in a ``config.json``.
        text: the data.
    """

    recipe = "lm"

    config: LmConfig
    settings: dict[str, Any]
    text: TextData | Documents

    @property
    def train(self) -> TrainConfig:
        """How to train."""
        return self.config.train

    @property
    def span(self) -> Span:
        """How long."""
        return Span.of(self.train)

    def facts(self) -> dict[str, Any]:
        """For ``run.json``: what is the same whenever the run goes on."""
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


def check_lm(config: LmConfig, world: World) -> LmInputs:
    """Check everything that can be checked without torch, and find the inputs.

    Raises:
        UserError: one line saying what is wrong.
    """
    check_train(config.train)
    _check_numbers(config)
    config.check_world(world)
    settings = model_settings(config.model)
    longest = longest_sequence(settings)
    if longest is not None:
        expected = f"at most {longest}, the positions of {config.model}"
        require(config.seq_length <= longest, "--seq-length", config.seq_length, expected)
    check_extras(["transformers", "matplotlib"], tensorboard=config.train.output.tensorboard)
    if is_streamed(config.data, config.tokenizer):
        documents = find_documents(config.data, config.tokenizer)
        return LmInputs(sized(config, world.size), settings, documents)
    for option, given in (
        ("--streams", config.streams),
        ("--shuffle-buffer", config.shuffle_buffer),
    ):
        require(not given, option, given, _ONLY_DOCUMENTS)
    text = load_text(config.data, config.seq_length)
    return LmInputs(sized(config, world.size), settings, text)


def _check_numbers(config: LmConfig) -> None:
    require(config.seq_length >= 1, "--seq-length", config.seq_length, "1 or more")
    require(config.sample_tokens >= 0, "--sample-tokens", config.sample_tokens, "0 or more")
    require(0 <= config.temperature < math.inf, "--temperature", config.temperature, "0 or more")
    if config.streams is not None:
        require(config.streams >= 1, "--streams", config.streams, "1 or more")
    buffer = config.shuffle_buffer
    require(buffer >= 0, "--shuffle-buffer", buffer, "0 or more documents")
    if config.peak_flops is not None:
        found, expected = config.peak_flops, "operations a second of one device, as 312e12"
        require(0 < found < math.inf, "--peak-flops", found, expected)


def sized(config: LmConfig, world_size: int) -> LmConfig:
    """The configuration with its microbatches, where ``batch_tokens`` says how large a step is.

    A step has the same examples in every world that can share them out evenly: a microbatch has as
    many sequences as go into a step without a rest, at most ``train.batch_size``.

    Raises:
        OptionError: the tokens cannot be shared out.
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
    size = max(n for n in range(1, config.train.batch_size + 1) if each % n == 0)
    train = replace(config.train, batch_size=size, accumulate=each // size)
    return replace(config, train=train)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a training does unless told otherwise.

    Attributes:
        steps: optimizer steps.
        batch_size: sequences per rank.
        seq_length: tokens of a sequence.
        lr: peak learning rate.
    """

    steps: int
    batch_size: int
    seq_length: int
    lr: float


@dataclass(frozen=True, kw_only=True)
class LlamaPreset:
    """The shape of a Llama. The sizes in the names count everything but the vocabulary's rows.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width inside the feed-forward blocks.
        layers: number of decoder layers.
        heads: attention heads.
        positions: longest sequence.
        defaults: for its training.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    positions: int
    defaults: Defaults

    def settings(self) -> dict[str, Any]:
        """As ``transformers`` names them."""
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


def defaults_for(model: str) -> Defaults:
    """The defaults that go with ``--model``."""
    preset = PRESETS.get(model)
    return FOR_CONFIG_FILES if preset is None else preset.defaults


def model_settings(model: str) -> dict[str, Any]:
    """The settings of a language model; see :func:`find_settings`."""
    return find_settings(model, {name: preset.settings() for name, preset in PRESETS.items()})


def longest_sequence(settings: dict[str, Any]) -> int | None:
    """How many positions a model has, where its settings say."""
    found = settings.get("max_position_embeddings", settings.get("n_positions"))
    return found if isinstance(found, int) else None
