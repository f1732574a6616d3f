"""The configuration of ``shardwise train lm``, and its models by name. No torch here."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shardwise.app.recipes.core.installed import check_extras, require_installed
from shardwise.app.recipes.core.position import Every, TrainingSpan
from shardwise.app.recipes.core.recipe import Inputs, RecipeConfig
from shardwise.app.recipes.text.published import (
    BaseFormat,
    Frozen,
    find_pretrained,
    fingerprint,
    parse_lora,
)
from shardwise.elastic.world import World
from shardwise.insight.planning.presets import LLAMAS, find_settings, longest_sequence
from shardwise.insight.schema.option import (
    BY_MODEL,
    MODEL,
    SAMPLE,
    TRAINING,
    Bounds,
    Count,
    Natural,
    NotNegative,
    OnResume,
    Reads,
    as_json,
    model_option,
    naming,
    option,
    require,
    setting,
)
from shardwise.insight.schema.training import (
    Logits,
    OptimizerConfig,
    OutputConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from shardwise.app.recipes.text.chat import ChatData
    from shardwise.app.recipes.text.data import TextData
    from shardwise.app.recipes.text.documents import Documents

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


#: The Llamas that are trained by name, with the defaults that go with each.
PRESETS = {
    "llama-tiny": Defaults(steps=600, batch_size=4, seq_length=128, lr=2e-3),
    "llama-34m": Defaults(steps=1000, batch_size=4, seq_length=512, lr=1e-3),
    "llama-150m": Defaults(steps=2000, batch_size=8, seq_length=1024, lr=4e-4),
}


class Packing(enum.Enum):
    """How chats are laid out in rows; see :mod:`.conversations`."""

    PACKED = "packed"
    PADDED = "padded"


#: What fine-tuning commonly uses. Sequences are no longer than the model's positions.
FOR_PRETRAINED = Defaults(steps=1000, batch_size=4, seq_length=1024, lr=2e-5)
FOR_CONFIG_FILES = Defaults(steps=1000, batch_size=4, seq_length=256, lr=4e-4)


@dataclass(frozen=True, kw_only=True)
class LmConfig(RecipeConfig):
    """A training of a language model."""

    module = recipe = "lm"

    model: str = field(metadata=model_option(PRESETS))
    pretrained: str | None = setting(
        None,
        "Weights and tokenizer to continue from, in place of --model: a folder, a URL of an object "
        "store, or a name on the Hugging Face Hub.",
        MODEL,
        name="--from",
        metavar="NAME",
        reads=Reads.NAME,
        on_resume=OnResume.DATA,
    )
    lora: str | None = setting(
        None,
        "Train adapters on the frozen weights of --from: r=16,alpha=32,targets=all-linear, or "
        "targets=q_proj+v_proj; and dropout=0.05.",
        MODEL,
        metavar="SETTINGS",
        shown="all weights are trained",
        on_resume=OnResume.FIXED,
    )
    base: BaseFormat | None = setting(
        None,
        "Keep the frozen linear layers of --lora in four bits: {choices}.",
        MODEL,
        metavar="FORMAT",
        shown="--shard-dtype",
        on_resume=OnResume.FIXED,
    )
    frozen: Frozen | None = setting(
        None,
        "What becomes of frozen parameters between forward and backward: {choices}.",
        MODEL,
        metavar="NAME",
        shown="keep where memory allows",
    )
    merge: bool = setting(False, "Merge the adapters into whole weights at the end.", MODEL)
    data: tuple[str, ...] = setting(
        (),
        "Text to train on: files, folders, patterns, URLs; .jsonl and .parquet are streamed; "
        "hf:NAME:CONFIG is a dataset of the Hugging Face Hub.",
        MODEL,
        metavar="TEXT",
        reads=Reads.NAME,
        shown="the Python standard library's source",
        on_resume=OnResume.DATA,
    )
    chat: tuple[str, ...] = setting(
        (),
        "Chats to train on, in place of --data: .jsonl files with messages, or with prompt and "
        "completion. The loss is on the assistant's tokens.",
        MODEL,
        metavar="FILE",
        reads=Reads.NAME,
        on_resume=OnResume.DATA,
    )
    packing: Packing = setting(
        Packing.PACKED,
        "How chats fill sequences: {choices}. Packed ones do not attend to each other.",
        MODEL,
        metavar="NAME",
        on_resume=OnResume.FIXED,
    )
    eval_data: tuple[str, ...] = setting(
        (),
        "Text or chats to evaluate on; of the same kind as what is trained on.",
        MODEL,
        metavar="TEXT",
        reads=Reads.NAME,
        shown="one part in 20 of --data or --chat",
        on_resume=OnResume.DATA,
    )
    tokenizer: str | None = setting(
        None,
        "A tokenizer of transformers, by name or folder; documents are then streamed.",
        MODEL,
        metavar="NAME",
        reads=Reads.NAME,
        shown="that of --from, else bytes",
        on_resume=OnResume.DATA,
    )
    streams: Count | None = setting(
        None,
        "Streams that documents are split into; a multiple of the world size is best.",
        MODEL,
        shown="by world size, 8 or more",
        on_resume=OnResume.FIXED,
    )
    shuffle_buffer: Natural = setting(
        0,
        "Documents of each stream that are shuffled together, by --seed; 0: the order of the "
        "source.",
        MODEL,
        on_resume=OnResume.FIXED,
    )
    seq_length: Count = field(
        metadata=option("Tokens per sequence.", MODEL, shown=BY_MODEL, on_resume=OnResume.FIXED)
    )
    train: TrainConfig
    batch_tokens: Count | None = setting(
        None,
        "Tokens per step over all ranks. --accumulate follows from it; --batch-size is then "
        "the most sequences of a microbatch.",
        TRAINING,
    )
    logits: Logits = setting(
        Logits.AUTO,
        "How the loss is computed of logits: {choices}; auto: in chunks of tokens where whole ones "
        "take much memory.",
        TRAINING,
        metavar="NAME",
    )
    peak_flops: Annotated[float, Bounds(above=0, most=1e30)] | None = setting(
        None, "Peak FLOP/s of one device, for MFU.", TRAINING, shown="from a table of GPUs"
    )
    prompt: str | None = setting(
        None,
        "Beginning of the sample; with --chat, the question that it answers.",
        SAMPLE,
        reads=Reads.TEXT,
        shown="a line of Python; nothing with --data; a question that is held out with --chat",
    )
    sample_tokens: Natural = setting(200, "Tokens of the sample; 0: no sample.", SAMPLE)
    temperature: NotNegative = setting(0.9, "0: always the most likely token.", SAMPLE)

    @classmethod
    def for_model(cls, model: str) -> LmConfig:
        """Return the configuration with the defaults that go with ``--model``."""
        return cls._by(PRESETS.get(model, FOR_CONFIG_FILES), model)

    @classmethod
    def _by(cls, defaults: Defaults, model: str) -> LmConfig:
        return cls(
            model=model,
            seq_length=defaults.seq_length,
            train=TrainConfig(
                steps=defaults.steps,
                batch_size=defaults.batch_size,
                optimizer=OptimizerConfig(lr=defaults.lr),
                output=OutputConfig(out=Path("runs/lm")),
            ),
        )

    @classmethod
    def for_pretrained(cls, name: str) -> LmConfig:
        """Return the configuration with the defaults that go with ``--from``.

        Raises:
            OptionError: there is no such model, or it has no weights.
        """
        longest = longest_sequence(find_pretrained(name)) or FOR_PRETRAINED.seq_length
        config = cls._by(FOR_PRETRAINED, name)
        return replace(config, pretrained=name, seq_length=min(config.seq_length, longest))

    @property
    def prompt_text(self) -> str:
        """What the sample begins with."""
        if self.prompt is not None:
            return self.prompt
        return "" if self.data or self.chat or self.pretrained else DEFAULT_PROMPT

    @property
    def tokenizer_name(self) -> str | None:
        """Name or folder of the tokenizer; None: tokens are bytes."""
        return self.tokenizer or self.pretrained

    @property
    def shares(self) -> str:
        """What several hosts need in the folder of the run, for messages; empty: nothing."""
        return "the adapters of --lora" if self.lora is not None else ""

    @property
    def tokenizer_option(self) -> str:
        """The option that names the tokenizer."""
        return "--from" if self.tokenizer is None and self.pretrained else "--tokenizer"

    def check(self, world: World) -> LmInputs:
        """Check everything that can be checked without torch, and find the data.

        Raises:
            UserError: one line that says what is wrong.
        """
        settings = self._check(world)
        needed = ["transformers", *(["peft"] if self.lora is not None else [])]
        if self.base is not None:
            require_installed(f"--base {self.base.value}", ["bitsandbytes"])
        check_extras(needed, self.train.output.logs)
        config = with_microbatches(self, world.size)
        return LmInputs(config, settings, self._find_text(), self.train.batch_size)

    def _find_text(self) -> TextData | Documents | ChatData:
        # The command's help needs none of them, and nobody likes to wait for it.
        from shardwise.app.recipes.text.chat import load_chats
        from shardwise.app.recipes.text.data import load_text
        from shardwise.app.recipes.text.documents import find_documents, is_streamed

        tokenizer = self.tokenizer_name
        if self.chat:
            require(not self.data, "--data", "--chat too", "one of the two")
            expected = "--from a model with one, or --tokenizer"
            require(tokenizer is not None, "--chat", "no tokenizer", expected)
        elif is_streamed(self.data, tokenizer):
            expected = "--steps: how long an epoch of streamed documents is, nobody has counted"
            require(self.train.epochs is None, "--epochs", self.train.epochs, expected)
            return find_documents(self.data, tokenizer, self.eval_data)
        for name, given in (
            ("--streams", self.streams),
            ("--shuffle-buffer", self.shuffle_buffer),
        ):
            require(not given, name, given, _ONLY_DOCUMENTS)
        if self.chat:
            return load_chats(self.chat, self.eval_data)
        return load_text(self.data, self.seq_length, self.eval_data)

    def check_dry_run(self, world: World) -> None:
        """Check what ``--dry-run`` needs: no data, no folder.

        Raises:
            UserError: one line that says what is wrong.
        """
        self._check(world)
        check_extras(["transformers"])

    def _check(self, world: World) -> dict[str, Any]:
        self.check_values()
        require(
            self.pretrained in (None, self.model),
            "--model",
            f"{self.model} with --from {self.pretrained}",
            "one of the two: --model trains from scratch, --from continues from weights",
        )
        self._check_lora()
        self.check_world(world)
        settings = self.settings()
        longest = longest_sequence(settings)
        if longest is not None:
            expected = f"at most {longest}, the positions of {self.model}"
            require(self.seq_length <= longest, "--seq-length", self.seq_length, expected)
        return settings

    def _check_lora(self) -> None:
        beside = {"--base": self.base, "--frozen": self.frozen, "--merge": self.merge}
        for name, given in beside.items():
            require(self.lora is not None or not given, name, "no --lora", "it beside --lora")
        if self.lora is None:
            return
        parse_lora(self.lora)
        expected = "--from, the weights that adapters are trained on"
        require(self.pretrained is not None, "--lora", "no --from", expected)
        require(self.train.diloco is None, "--lora", "--strategy diloco", "another strategy")

    def check_world(self, world: World) -> None:
        """Check that the configuration fits the world; look at no files.

        Raises:
            OptionError: it does not fit.
        """
        super().check_world(world)
        with_microbatches(self, world.size)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the model, as in a ``config.json``.

        Raises:
            OptionError: no model has this name, or the one of ``--from`` has no weights.
        """
        if self.pretrained is not None:
            return find_pretrained(self.pretrained)
        llamas = {name: LLAMAS[name] for name in PRESETS}
        return naming("--model")(find_settings)(self.model, llamas)


#: The training with all its defaults, by its name.
DEFAULTS = {"lm": LmConfig.for_model("llama-tiny")}


@dataclass(frozen=True)
class LmInputs(Inputs):
    """A checked configuration, and what it refers to.

    Attributes:
        config: the configuration, with its microbatches.
        settings: of the model, as in a ``config.json``.
        text: the data.
        largest: sequences of a microbatch at most, with ``batch_tokens``: over other ranks, a run
            has other microbatches.
    """

    config: LmConfig
    settings: dict[str, Any]
    text: TextData | Documents | ChatData
    largest: int = 1

    @property
    def span(self) -> TrainingSpan:
        """How long the training is."""
        return replace(TrainingSpan.of(self.train), evaluation=Every.STEP)

    def facts(self) -> dict[str, Any]:
        """Return config, model and data for ``run.json``: what is the same in every session."""
        tokenizer = {"tokenizer": self.config.tokenizer_name or "bytes"}
        base, config = {}, self.config
        if config.batch_tokens is not None:
            config = config.with_train(batch_size=self.largest, accumulate=1)
        if self.config.lora is not None and self.config.pretrained is not None:
            base = {"base": fingerprint(self.config.pretrained)}
        return {
            "config": as_json(config),
            "model": {"name": self.config.model, "settings": self.settings, **base},
            "data": {**tokenizer, **self.text.facts()},
        }

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Check that settings, model and data are those of the run that is resumed."""
        super().check_same(before)
        base = self.facts()["model"].get("base")
        require(
            before.get("model", {}).get("base") == base,
            "--from",
            f"{self.config.pretrained}, whose weights have changed",
            "those that the adapters were trained on: checkpoints leave them out",
        )

    def of_data(self, data: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the option that names the data, what they are now, and what others are called."""
        return (
            "--chat" if self.config.chat else "--data",
            f"{self.text.summary}, tokenizer {self.config.tokenizer_name or 'bytes'}",
            f"{data.get('summary')}, tokenizer {data.get('tokenizer', 'bytes')}",
        )


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
        tokens % smallest == 0,
        "--batch-tokens",
        tokens,
        f"a multiple of {smallest}, which is {config.seq_length} tokens x {world_size} ranks, "
        f"such as {near}",
    )
    each = tokens // smallest
    size = max(n for n in range(1, min(config.train.batch_size, each) + 1) if each % n == 0)
    return config.with_train(batch_size=size, accumulate=each // size)
