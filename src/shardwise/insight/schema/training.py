"""How a model is trained, whatever model and data are: optimizer, length, replicas, output."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from shardwise.base.errors import NotPossibleError
from shardwise.diloco.settings import (
    OuterSGD,
    Overlapped,
    Streaming,
    WireFormat,
    check_streaming,
)
from shardwise.elastic.world import World, most_ranks, usable_cores
from shardwise.frontends.strategies import Strategy
from shardwise.insight.schema.option import (
    DILOCO,
    HOSTS,
    OUTPUT,
    SEEDS,
    TRAINING,
    Config,
    Count,
    Fraction,
    Natural,
    NotNegative,
    OnResume,
    OptionError,
    Positive,
    Seconds,
    option,
    require,
    setting,
)
from shardwise.insight.schema.sharding import ShardingConfig, StepConfig, Stepping


class LogName(enum.Enum):
    """Where the metrics of a run go."""

    JSONL = "jsonl"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


class Logits(enum.Enum):
    """How a language model computes the loss of its logits."""

    AUTO = "auto"  # in chunks where whole ones take much memory, and the model lets it
    WHOLE = "whole"
    CHUNKS = "chunks"


class Existing(enum.Enum):
    """What to do about a run that is in the folder already."""

    REFUSE = "refuse"
    RESUME = "resume"
    AUTO = "auto-resume"  # resume if a checkpoint was committed, else overwrite; rank 0 decides
    OVERWRITE = "overwrite"


#: Values of ``--device`` beside the types of devices that torch knows.
AUTO = "auto"


#: ``--timeline auto``: the steps of a session before recording, and those recorded.
WARM_UP, STEADY = 4, 4


class ScheduleName(enum.Enum):
    """The shape of the learning rate after its warmup."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    WARMUP_STABLE_DECAY = "warmup-stable-decay"


class OptimizerName(enum.Enum):
    """What updates parameters."""

    ADAMW = "adamw"
    ADAMW8BIT = "adamw8bit"
    MUON = "muon"
    LION = "lion"
    ADAFACTOR = "adafactor"
    SGD = "sgd"


#: The momentum of an optimizer, unless ``--momentum`` says another.
MOMENTA = {OptimizerName.MUON: 0.95, OptimizerName.SGD: 0.9}

#: How much larger the learning rate of AdamW is than that of Lion, for which weight decay makes up.
LION_FACTOR = 4
#: How much larger the learning rate of Adafactor is: relative to parameters, and not absolute.
ADAFACTOR_FACTOR = 25

_GROUP = "--param-group"
_PARAM_GROUPS: Any = setting(
    (),
    "Peak lr, weight_decay, or both, separated by a comma, of parameters whose names match a "
    "pattern: 'embed*:lr=1e-4'. May be repeated.",
    TRAINING,
    name=_GROUP,
    metavar="RULE",
    on_resume=OnResume.FIXED,
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """An optimizer, and how its learning rate changes; see :func:`~.build.learning_rate`."""

    algorithm: OptimizerName = setting(
        OptimizerName.ADAMW,
        "What updates parameters: {choices}. adamw8bit keeps AdamW's moments in a quarter of "
        "the memory. muon is for the matrices of hidden layers, and leaves the rest to AdamW. "
        "lion and adafactor have other defaults of --lr.",
        TRAINING,
        name="--optimizer",
        metavar="NAME",
        on_resume=OnResume.FIXED,
    )
    lr: Positive = field(metadata=option("Peak learning rate.", TRAINING))
    warmup: Natural = setting(20, "Steps of linear warmup, at most half of all.", TRAINING)
    schedule: ScheduleName = setting(
        ScheduleName.COSINE, "Learning rate after the warmup: {choices}.", TRAINING, metavar="NAME"
    )
    decay_steps: Count | None = setting(
        None,
        "The last steps of the run, in which the learning rate decays; until then it stays at "
        "its peak.",
        TRAINING,
        shown="all after the warmup; a tenth of the run with warmup-stable-decay",
    )
    min_lr: NotNegative | None = setting(
        None, "Learning rate at the end of the decay.", TRAINING, shown="a tenth of --lr"
    )
    beta1: Fraction = setting(
        0.9, "First beta of AdamW and of Lion.", TRAINING, on_resume=OnResume.FIXED
    )
    beta2: Fraction = setting(
        0.95,
        "Second beta of AdamW and of Lion, for which the default is 0.99.",
        TRAINING,
        on_resume=OnResume.FIXED,
    )
    momentum: Fraction | None = setting(
        None,
        "Momentum of Muon and of SGD.",
        TRAINING,
        shown="0.95 for muon, 0.9 for sgd",
        on_resume=OnResume.FIXED,
    )
    weight_decay: NotNegative = setting(
        0.1,
        "Weight decay of matrices; norms and biases have none.",
        TRAINING,
        on_resume=OnResume.FIXED,
    )
    param_groups: tuple[str, ...] = _PARAM_GROUPS
    clip_grad: NotNegative = setting(1.0, "Maximum gradient norm; 0: no clipping.", TRAINING)

    @property
    def betas(self) -> tuple[float, float]:
        """Both betas, as torch takes them."""
        return self.beta1, self.beta2

    def check_values(self) -> None:
        """Check that the settings go with the optimizer and the schedule.

        Raises:
            OptionError: names the first option that does not.
        """
        super().check_values()
        found, expected = self.momentum, "none: only muon and sgd have one"
        require(self.algorithm in MOMENTA or found is None, "--momentum", found, expected)
        decays = self.schedule is not ScheduleName.CONSTANT
        for name, given in (("--decay-steps", self.decay_steps), ("--min-lr", self.min_lr)):
            expected = "none with --schedule constant, which does not decay"
            require(decays or given is None, name, given, expected)
        if self.min_lr is not None:
            expected = f"0 to {self.lr}, the peak of --lr"
            require(0 <= self.min_lr <= self.lr, "--min-lr", self.min_lr, expected)

    def usual_for(self, algorithm: OptimizerName) -> OptimizerConfig:
        """Return this with the defaults that go with an optimizer, if these are AdamW's.

        The paper of Lion, arXiv 2302.06675, advises a learning rate that is 3 to 10 times smaller.
        A weight with a root mean square of 0.04 moves under Adafactor as under AdamW.
        """
        match algorithm:
            case OptimizerName.LION:
                lr, decay = self.lr / LION_FACTOR, self.weight_decay * LION_FACTOR
                return replace(self, lr=lr, weight_decay=decay, beta1=0.9, beta2=0.99)
            case OptimizerName.ADAFACTOR:
                return replace(self, lr=self.lr * ADAFACTOR_FACTOR)
            case _:
                return self


@dataclass(frozen=True, kw_only=True)
class SgdConfig(Config):
    """Stochastic gradient descent with momentum."""

    lr: Positive = field(metadata=option("Peak learning rate.", TRAINING))
    momentum: Fraction = setting(0.9, "Momentum of SGD.", TRAINING, on_resume=OnResume.FIXED)
    weight_decay: NotNegative = setting(
        1e-4, "Weight decay of all parameters.", TRAINING, on_resume=OnResume.FIXED
    )
    param_groups: tuple[str, ...] = _PARAM_GROUPS
    clip_grad: NotNegative = setting(0.0, "Maximum gradient norm; 0: no clipping.", TRAINING)


@dataclass(frozen=True, kw_only=True)
class DilocoConfig(Config):
    """How replicas that train apart exchange parameters; see :class:`shardwise.diloco.DiLoCo`."""

    local_steps: Count = setting(500, "Steps of each replica between two exchanges.", DILOCO)
    outer_lr: Positive = setting(OuterSGD.lr, "Learning rate of the outer optimizer.", DILOCO)
    outer_momentum: Fraction = setting(
        OuterSGD.momentum, "Nesterov momentum of the outer optimizer.", DILOCO
    )
    outer_warmup: Natural = setting(
        OuterSGD.warmup, "Exchanges over which that momentum rises from 0.", DILOCO
    )
    wire: WireFormat = setting(
        WireFormat.FP32,
        "Format of what is sent: fp32, fp16, bf16, fp8, int8, int4 or ternary.",
        DILOCO,
        name="--diloco-wire",
        metavar="NAME",
        reads=lambda text: WireFormat(text.strip()),
        completions=tuple(each.value for each in WireFormat),
    )
    error_feedback: bool = setting(
        False,
        "Add what the format lost to the next exchange; int4 and ternary always do.",
        DILOCO,
        name="--diloco-error-feedback",
    )
    fragments: int = setting(
        Streaming.fragments,
        "Parts of the model, exchanged one after another.",
        DILOCO,
        name="--diloco-fragments",
    )
    overlap: int = setting(
        Streaming.overlap,
        "Training steps that an exchange may overlap with.",
        DILOCO,
        name="--diloco-overlap",
    )
    alpha: Fraction = setting(
        Streaming.alpha,
        "Share of its own parameters that a replica keeps at an exchange, 0 to 1.",
        DILOCO,
        name="--diloco-alpha",
    )

    overlapped: Overlapped = setting(
        Streaming.overlapped,
        "What becomes of the steps during an exchange: {choices}.",
        DILOCO,
        name="--diloco-overlapped",
        metavar="NAME",
    )

    deadline: Seconds | None = setting(
        None,
        "Make every replica a world of its own, which may be lost and come back. A round waits "
        "this many seconds for one that is late.",
        DILOCO,
        name="--diloco-deadline",
        metavar="SECONDS",
    )

    def check_values(self) -> None:
        """Check that fragments and overlap go with the steps between two exchanges.

        Raises:
            OptionError: names the first option that does not.
        """
        super().check_values()
        try:
            check_streaming(self.streaming, self.local_steps)
        except NotPossibleError as error:
            raise OptionError(f"--diloco-{error.name}", error.found, error.expected) from None
        if self.deadline is not None:
            expected = "one fragment, without overlap, with --diloco-deadline"
            require(self.fragments == 1, "--diloco-fragments", self.fragments, expected)
            require(self.overlap == 0, "--diloco-overlap", self.overlap, expected)

    @property
    def outer(self) -> OuterSGD:
        """The outer optimizer."""
        return OuterSGD(lr=self.outer_lr, momentum=self.outer_momentum, warmup=self.outer_warmup)

    @property
    def streaming(self) -> Streaming:
        """The fragments, and how their exchange overlaps with training."""
        return Streaming(
            fragments=self.fragments,
            overlap=self.overlap,
            alpha=self.alpha,
            overlapped=self.overlapped,
        )

    @property
    def keeps_errors(self) -> bool:
        """Whether what the format loses is kept for the next exchange."""
        return self.error_feedback or self.wire.needs_error_feedback

    def __str__(self) -> str:
        return f"exchange every {self.local_steps} steps, sent as {self.wire.value}"


@dataclass(frozen=True, kw_only=True)
class OutputConfig(Config):
    """What a run writes, where, and how often."""

    out: os.PathLike[str] = field(
        metadata=option(
            "Folder of the run, or its URL in an object store, such as s3://bucket/run.",
            OUTPUT,
            metavar="PATH|URL",
            on_resume=OnResume.START,
        )
    )
    checkpoint_every: Natural = setting(
        100, "Steps between checkpoints; 0: only at the end or when stopped.", OUTPUT
    )
    keep_last: Count = setting(2, "Checkpoints to keep.", OUTPUT)
    keep_best: bool = setting(
        False,
        "Save whenever the validation loss is the lowest so far, and keep that checkpoint "
        "beside the last ones.",
        OUTPUT,
    )
    async_checkpoint: bool = setting(
        False,
        "Train on while a checkpoint is written; needs memory for a copy of each rank's "
        "shards and optimizer state.",
        OUTPUT,
    )
    replicate_every: Natural = setting(
        0,
        "Steps between versions that each host keeps in memory for itself and for the host before "
        "it, from which --max-restarts goes on without a disk; 0: none.",
        OUTPUT,
    )
    eval_every: Natural = setting(100, "Steps between evaluations; 0: only at the end.", OUTPUT)
    timeline: str | None = setting(
        None,
        "Record what every rank does in some steps, such as 5-8; auto: four, after four more. "
        "See docs/timeline.md.",
        OUTPUT,
        metavar="STEPS",
        completions=("auto",),
        on_resume=OnResume.SESSION,
    )
    log_every: Count = setting(
        1, "Steps from one printed line to the next; metrics.jsonl has all steps.", OUTPUT
    )
    log: str = setting(
        "jsonl",
        "Where metrics go, separated by commas: jsonl, tensorboard, wandb. Every run writes "
        "metrics.jsonl.",
        OUTPUT,
        metavar="NAMES",
        completions=("jsonl", "tensorboard", "wandb"),
    )
    page: bool = setting(
        False,
        "Write report.html, the page of the run, every few seconds, and not only at the end.",
        OUTPUT,
    )
    existing: Existing = setting(
        Existing.REFUSE,
        "What to do about a run that is in --out already.",
        OUTPUT,
        on_resume=OnResume.START,
        flags={
            "--resume": (Existing.RESUME, "Go on from the newest checkpoint in --out."),
            "--auto-resume": (
                Existing.AUTO,
                "Go on if --out has checkpoints, else start over; for jobs that a scheduler "
                "restarts.",
            ),
            "--overwrite": (
                Existing.OVERWRITE,
                "Delete the run that is in --out, and start over.",
            ),
        },
    )

    def check_values(self) -> None:
        """Check that the folder can be named everywhere, and that the logs exist.

        Raises:
            OptionError: names the first option that is wrong.
        """
        super().check_values()
        out = str(self.out)
        expected = "a path in UTF-8: tokenizers and safetensors can write to no other"
        require(out == out.encode(errors="replace").decode(), "--out", ascii(out), expected)
        _ = self.logs

    @property
    def logs(self) -> frozenset[LogName]:
        """Where metrics go.

        Raises:
            OptionError: ``log`` has a name that is none.
        """
        names = [name.strip() for name in self.log.split(",")]
        known = {each.value: each for each in LogName}
        for name in names:
            expected = f"names among {', '.join(known)}, separated by commas"
            require(name in known, "--log", repr(self.log), expected)
        return frozenset({known[name] for name in names} | {LogName.JSONL})


@dataclass(frozen=True, kw_only=True)
class TrainConfig(StepConfig):
    """A training, whatever its model and data.

    It ends after ``steps`` or ``epochs``, whichever comes first; one of the two may be None.
    """

    steps: Count | None = setting(
        None, "Optimizer steps of the whole run, from its beginning.", TRAINING
    )
    epochs: Count | None = setting(None, "Epochs of the whole run, from its beginning.", TRAINING)
    optimizer: OptimizerConfig | SgdConfig
    seed: Annotated[int, SEEDS] = setting(
        0, "Seed of initial weights, order of data and dropout.", TRAINING, on_resume=OnResume.FIXED
    )
    device: str = setting(
        AUTO,
        "Type of device, as torch names it; auto: accelerators if there is one for every rank, "
        "else CPUs.",
        TRAINING,
        metavar="TYPE",
        completions=(AUTO, "cpu"),
    )
    peer_timeout: Seconds | None = setting(
        None,
        "Seconds after which a process that does not answer in a collective counts as lost.",
        HOSTS,
        shown="torch's, 1800",
    )
    sharding: ShardingConfig = field(default=ShardingConfig())
    diloco: DilocoConfig | None = None
    output: OutputConfig

    @property
    def max_norm(self) -> float:
        """The largest norm of gradients; infinite if none is clipped: it is shown all the same."""
        return self.optimizer.clip_grad or math.inf

    def examples_per_step(self, world_size: int) -> int:
        """Examples of one step, over all ranks."""
        return self.batch_size * self.accumulate * world_size

    def check_values(self) -> None:
        """Check everything that does not depend on the world.

        Raises:
            OptionError: names the first option that is wrong.
        """
        super().check_values()
        rules_of(self.optimizer.param_groups)
        device, steps = self.device, self.steps
        require(device.isidentifier(), "--device", repr(device), "a type of device, such as cpu")
        if (asked := self.output.timeline) is not None:
            made = steps is None or steps_to_record(asked, 0, 1)[0] <= steps
            require(made, "--timeline", f"{asked} of {steps} steps", f"steps up to {steps}")
        sharding, strategy = self.sharding, self.sharding.strategy.value
        apart = sharding.strategy is Strategy.DILOCO
        require(
            apart == (self.diloco is not None),
            "--strategy",
            f"{strategy} with{'out' if apart else ''} settings of DiLoCo",
            "another one: only train lm has them" if apart else Strategy.DILOCO.value,
        )
        in_memory = "keep parameters and states in memory"
        others = {
            "--offload": (sharding.offload, in_memory),
            "--offload-parameters": (sharding.offload_parameters, in_memory),
            "--step-in-backward": (self.stepping is Stepping.IN_BACKWARD, "step after backward"),
            "--replicate-every": (self.output.replicate_every, "have copies of all parameters"),
        }
        for name, (asked_for, why) in others.items():
            expected = f"another strategy: replicas that train apart {why}"
            require(not (apart and asked_for), name, f"--strategy {strategy} too", expected)


def steps_to_record(asked: str, done: int, left: int) -> range:
    """Return the steps that ``--timeline`` asks for.

    Args:
        asked: ``"5-8"``, ``"5"`` or ``"auto"``.
        done: steps that the run has behind it.
        left: steps that the session will make.

    Raises:
        OptionError: it is something else.
    """
    if asked == AUTO:
        last = done + min(left, WARM_UP + STEADY)
        return range(max(done + 1, last - STEADY + 1), last + 1)
    first, dash, last_one = asked.partition("-")
    steps = [first, last_one if dash else first]
    if not all(text.isascii() and text.isdigit() and len(text) < 10 for text in steps):
        raise OptionError("--timeline", repr(asked), "steps such as 5-8, or auto")
    begin, end = map(int, steps)
    if not 1 <= begin <= end:
        raise OptionError("--timeline", repr(asked), "steps from 1 up, the first one first")
    return range(begin, end + 1)


def rules_of(param_groups: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return settings by patterns of names, as ``--param-group`` says them.

    Args:
        param_groups: each ``PATTERN:SETTING=VALUE,...``.

    Raises:
        OptionError: one says something else, or two have the same pattern.
    """
    rules: dict[str, dict[str, float]] = {}
    for text in param_groups:
        pattern, _, settings = text.rpartition(":")
        expected = "PATTERN:SETTING=VALUE, such as 'embed*:lr=1e-4,weight_decay=0'"
        require(bool(pattern.strip() and settings), _GROUP, repr(text), expected)
        require(pattern not in rules, _GROUP, f"{pattern!r} twice", "all its settings together")
        rules[pattern] = dict(_setting(each, text) for each in settings.split(","))
        twice = len(rules[pattern]) < len(settings.split(","))
        require(not twice, _GROUP, f"a setting twice in {text!r}", "it once")
    return rules


def _setting(text: str, whole: str) -> tuple[str, float]:
    """Return the name and the value of a setting in ``--param-group``."""
    name, _, value = (each.strip() for each in text.partition("="))
    name = name.replace("-", "_")
    expected = "lr=VALUE or weight_decay=VALUE behind the pattern and a colon"
    require(name in ("lr", "weight_decay"), _GROUP, f"{text!r} in {whole!r}", expected)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    expected = f"a number, 0 or more, for {name}"
    require(0 <= number < math.inf, _GROUP, f"{value!r} in {whole!r}", expected)
    return name, number


def nproc_of_any_host(text: str) -> int | None:
    """Read a number of processes, without a look at this host; None: see :func:`read_nproc`.

    Raises:
        NotPossibleError: it is none.
    """
    if text.removeprefix("-").isdecimal() and len(text) < 20:
        return int(text)
    if text not in ("gpu", "cpu", AUTO):
        raise NotPossibleError("", repr(text), "a whole number, gpu, cpu or auto")
    return None


def read_nproc(text: str) -> int:
    """Read a number of processes: ``8``; ``gpu`` or ``cpu``, one for each; ``auto``, one of these.

    Raises:
        NotPossibleError: it is none.
    """
    if (count := nproc_of_any_host(text)) is not None:
        return count
    from shardwise.base import devices  # imports torch

    found = 0 if text == "cpu" else devices.count()
    if not found and text == "gpu":
        raise NotPossibleError("", text, "cpu, auto or a number: this host has no GPU")
    return found or usable_cores()


def check_nproc(nproc: int | None, world: World | None) -> int:
    """Return the number of processes to start, or to expect, on this host.

    Args:
        nproc: ``--nproc``; None: not given.
        world: the world that the environment names; None: none.

    Raises:
        OptionError: it is below 1, more than this host can carry, or the world has another number.
    """
    require(nproc is None or nproc >= 1, "--nproc", nproc, "1 or more")
    if world is None:
        most, expected = most_ranks()
        require(nproc is None or nproc <= most, "--nproc", nproc, expected)
        return nproc or 1
    require(
        nproc in (None, world.local_size),
        "--nproc",
        nproc,
        f"{world.local_size} or none given: the environment has {world.local_size} on this host",
    )
    return world.local_size
