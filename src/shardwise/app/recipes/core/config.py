"""The configuration of a training: frozen values, checked before anything starts.

A default and its help stand here alone: the command line is generated from these classes (see
:mod:`shardwise.app.recipes.core.option`). Nothing here imports torch, so that a mistake is reported
at once.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from shardwise.app.recipes.core.option import (
    DILOCO,
    GROUP,
    HOSTS,
    OPTION,
    OUTPUT,
    SEEDS,
    SHARDING,
    TRAINING,
    Bounds,
    Count,
    Fraction,
    Group,
    Natural,
    NotNegative,
    Positive,
    Seconds,
    bounds_of,
    option,
    option_name,
)
from shardwise.app.recipes.core.wire_option import parse_wires
from shardwise.base.places import OffloadPlace
from shardwise.diloco.settings import (
    OuterSGD,
    Overlapped,
    Streaming,
    WireFormat,
    check_streaming,
)
from shardwise.elastic.errors import UserError
from shardwise.elastic.world import World, most_ranks
from shardwise.frontends.strategies import (
    HOST,
    REPLICATE,
    SHARD,
    MeshError,
    ShardingPlan,
    Strategy,
    parse_mesh,
    reshard_over,
    resolve,
)
from shardwise.insight.planning import presets as planning
from shardwise.insight.planning.presets import ModelError
from shardwise.insight.planning.settings import Checkpointing, Stepping
from shardwise.transport.wire import PLAIN, WireError, Wires


class OptionError(UserError, ValueError):
    """An option with a value that cannot be used.

    Attributes:
        option: its name on the command line, ``--steps``.
    """

    def __init__(self, option: str, found: object, expected: str) -> None:
        super().__init__(f"{option}: found {found}, expected {expected}")
        self.option = option


class PrecisionName(enum.Enum):
    """Dtypes that parameters may compute in and gradients may be reduced in."""

    FP32 = "fp32"
    BF16 = "bf16"


class LogName(enum.Enum):
    """Where the metrics of a run go."""

    JSONL = "jsonl"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


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


class TransportName(enum.Enum):
    """How bytes move between ranks."""

    AUTO = "auto"
    SHM = "shm"
    C10D = "c10d"
    COLLECTIVES = "collectives"


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
_PARAM_GROUPS: Any = field(
    default=(),
    metadata=option(
        "Peak lr, weight_decay, or both, separated by a comma, of parameters whose names match a "
        "pattern: 'embed*:lr=1e-4'. May be repeated.",
        TRAINING,
        name=_GROUP,
        metavar="RULE",
    ),
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer, and how its learning rate changes; see :func:`~.build.learning_rate`."""

    algorithm: OptimizerName = field(
        default=OptimizerName.ADAMW,
        metadata=option(
            "What updates parameters: {choices}. adamw8bit keeps AdamW's moments in a quarter of "
            "the memory. muon is for the matrices of hidden layers, and leaves the rest to AdamW. "
            "lion and adafactor have other defaults of --lr.",
            TRAINING,
            name="--optimizer",
            metavar="NAME",
        ),
    )
    lr: Positive = field(metadata=option("Peak learning rate.", TRAINING))
    warmup: Natural = field(
        default=20, metadata=option("Steps of linear warmup, at most half of all.", TRAINING)
    )
    schedule: ScheduleName = field(
        default=ScheduleName.COSINE,
        metadata=option("Learning rate after the warmup: {choices}.", TRAINING, metavar="NAME"),
    )
    decay_steps: Count | None = field(
        default=None,
        metadata=option(
            "The last steps of the run, in which the learning rate decays; until then it stays at "
            "its peak.",
            TRAINING,
            shown="all after the warmup; a tenth of the run with warmup-stable-decay",
        ),
    )
    min_lr: NotNegative | None = field(
        default=None,
        metadata=option(
            "Learning rate at the end of the decay.", TRAINING, shown="a tenth of --lr"
        ),
    )
    betas: tuple[Fraction, Fraction] = field(
        default=(0.9, 0.95),
        metadata=option(
            "AdamW's and Lion's betas.",
            TRAINING,
            parts={
                "--beta1": "First beta of AdamW and of Lion.",
                "--beta2": "Second beta of AdamW and of Lion, for which the default is 0.99.",
            },
        ),
    )
    momentum: Fraction | None = field(
        default=None,
        metadata=option(
            "Momentum of Muon and of SGD.", TRAINING, shown="0.95 for muon, 0.9 for sgd"
        ),
    )
    weight_decay: NotNegative = field(
        default=0.1,
        metadata=option("Weight decay of matrices; norms and biases have none.", TRAINING),
    )
    param_groups: tuple[str, ...] = _PARAM_GROUPS
    clip_grad: NotNegative = field(
        default=1.0, metadata=option("Maximum gradient norm; 0: no clipping.", TRAINING)
    )

    def usual_for(self, algorithm: OptimizerName) -> OptimizerConfig:
        """Return this with the defaults that go with an optimizer, if these are AdamW's.

        The paper of Lion, arXiv 2302.06675, advises a learning rate that is 3 to 10 times smaller.
        A weight with a root mean square of 0.04 moves under Adafactor as under AdamW.
        """
        match algorithm:
            case OptimizerName.LION:
                lr, decay = self.lr / LION_FACTOR, self.weight_decay * LION_FACTOR
                return replace(self, lr=lr, weight_decay=decay, betas=(0.9, 0.99))
            case OptimizerName.ADAFACTOR:
                return replace(self, lr=self.lr * ADAFACTOR_FACTOR)
            case _:
                return self


@dataclass(frozen=True, kw_only=True)
class SgdConfig:
    """Stochastic gradient descent with momentum."""

    lr: Positive = field(metadata=option("Peak learning rate.", TRAINING))
    momentum: Fraction = field(default=0.9, metadata=option("Momentum of SGD.", TRAINING))
    weight_decay: NotNegative = field(
        default=1e-4, metadata=option("Weight decay of all parameters.", TRAINING)
    )
    param_groups: tuple[str, ...] = _PARAM_GROUPS
    clip_grad: NotNegative = field(
        default=0.0, metadata=option("Maximum gradient norm; 0: no clipping.", TRAINING)
    )


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """What is sharded, in which dtypes, and where: what a training and its plan both ask for."""

    strategy: Strategy = field(
        default=Strategy.FULL_SHARD,
        metadata=option("What is sharded: {choices}.", SHARDING, metavar="NAME"),
    )
    shard_dtype: PrecisionName = field(
        default=PrecisionName.FP32,
        metadata=option(
            "Dtype of parameters, gradients and optimizer state between steps.", SHARDING
        ),
    )
    param_dtype: PrecisionName | None = field(
        default=None,
        metadata=option("Dtype of forward and backward.", SHARDING, shown="that of --shard-dtype"),
    )
    reduce_dtype: PrecisionName = field(
        default=PrecisionName.FP32, metadata=option("Dtype to reduce gradients in.", SHARDING)
    )
    collective_wire: str | None = field(
        default=None,
        metadata=option(
            "What is sent between hosts: bf16, fp8 or int8; or parts of gather=bf16, reduce=int8 "
            "and error-feedback, separated by commas. See docs/meshes.md.",
            SHARDING,
            name="--wire",
            metavar="FORMATS",
            shown="fp32",
            completions=("bf16", "fp8", "int8", "reduce=int8,error-feedback"),
        ),
    )
    reshard_after_forward: str | None = field(
        default=None,
        metadata=option(
            "Between forward and backward, keep the parameters of each block cut over the ranks "
            "of a host (host) or over this many ranks: only forward gathers between hosts.",
            SHARDING,
            metavar="RANKS",
            shown="all ranks",
            completions=(HOST,),
        ),
    )
    offload: str | None = field(
        default=None,
        metadata=option(
            "Keep optimizer states on the host of an accelerator (host) or in a folder of a local "
            "disk (disk:FOLDER), except during the step.",
            TRAINING,
            metavar="PLACE",
            shown="in memory",
        ),
    )
    offload_parameters: str | None = field(
        default=None,
        metadata=option(
            "Keep the parameters there, too, except while they are used: host or disk:FOLDER.",
            TRAINING,
            metavar="PLACE",
            shown="in memory",
        ),
    )
    master_dtype: PrecisionName | None = field(
        default=None,
        metadata=option(
            "With --offload: dtype of copies of the parameters that the optimizer updates, kept "
            "with its states; --shard-dtype is that of the parameters.",
            TRAINING,
            shown="no copies",
        ),
    )

    @property
    def wires(self) -> Wires:
        """The formats between hosts.

        Raises:
            OptionError: there are no such.
        """
        if self.collective_wire is None:
            return PLAIN
        try:
            return parse_wires(self.collective_wire)
        except WireError as error:
            raise OptionError("--wire", error.found, error.expected) from None

    @property
    def compute_dtype(self) -> PrecisionName:
        """The dtype of forward and backward."""
        return self.shard_dtype if self.param_dtype is None else self.param_dtype


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(StrategyConfig):
    """How the model is sharded over ranks, and in which dtypes it is kept and computes."""

    replicas: Count | None = field(
        default=None,
        metadata=option(
            "Copies of the model, for strategies that have several.",
            SHARDING,
            shown="one per host",
        ),
    )
    #: Whether the job was started for several hosts. Hybrid strategies then go on with one host,
    #: if only one is left.
    over_hosts: bool = False
    mesh: str | None = field(
        default=None,
        metadata=option("The same as a mesh: dp_replicate=R,dp_shard=S.", SHARDING),
    )
    activation_checkpointing: Checkpointing = field(
        default=Checkpointing.NONE,
        metadata=option(
            "Activations that are recomputed in backward instead of being kept.",
            SHARDING,
            former=("--use-gradient-checkpointing",),
            flags={
                "--activation-checkpointing": (
                    Checkpointing.FULL,
                    "Recompute activations in backward instead of keeping them.",
                ),
                "--selective-checkpointing": (
                    Checkpointing.SELECTIVE,
                    "The same, but keep the results of matrix products, convolutions and "
                    "attention.",
                ),
                "--keep-activations": (
                    Checkpointing.NONE,
                    "Keep all activations, whatever --config says.",
                ),
            },
        ),
    )
    compile: bool = field(
        default=False,
        metadata=option("Compile each block with torch.compile before the first step.", SHARDING),
    )
    transport: TransportName | None = field(
        default=None,
        metadata=option(
            "How bytes move between ranks: {choices}.",
            SHARDING,
            metavar="NAME",
            shown="auto",
            env="SHARDWISE_TRANSPORT",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class DilocoConfig:
    """How replicas that train apart exchange parameters; see :class:`shardwise.diloco.DiLoCo`."""

    local_steps: Count = field(
        default=500, metadata=option("Steps of each replica between two exchanges.", DILOCO)
    )
    outer_lr: Positive = field(
        default=OuterSGD.lr, metadata=option("Learning rate of the outer optimizer.", DILOCO)
    )
    outer_momentum: Fraction = field(
        default=OuterSGD.momentum,
        metadata=option("Nesterov momentum of the outer optimizer.", DILOCO),
    )
    outer_warmup: Natural = field(
        default=OuterSGD.warmup,
        metadata=option("Exchanges over which that momentum rises from 0.", DILOCO),
    )
    wire: str = field(
        default=WireFormat.FP32.value,
        metadata=option(
            "Format of what is sent: fp32, fp16, bf16, fp8, int8, int4 or ternary.",
            DILOCO,
            name="--diloco-wire",
            metavar="NAME",
            completions=tuple(each.value for each in WireFormat),
        ),
    )
    error_feedback: bool = field(
        default=False,
        metadata=option(
            "Add what the format lost to the next exchange; int4 and ternary always do.",
            DILOCO,
            name="--diloco-error-feedback",
        ),
    )
    fragments: int = field(
        default=Streaming.fragments,
        metadata=option(
            "Parts of the model, exchanged one after another.", DILOCO, name="--diloco-fragments"
        ),
    )
    overlap: int = field(
        default=Streaming.overlap,
        metadata=option(
            "Training steps that an exchange may overlap with.", DILOCO, name="--diloco-overlap"
        ),
    )
    alpha: Fraction = field(
        default=Streaming.alpha,
        metadata=option(
            "Share of its own parameters that a replica keeps at an exchange, 0 to 1.",
            DILOCO,
            name="--diloco-alpha",
        ),
    )

    overlapped: Overlapped = field(
        default=Streaming.overlapped,
        metadata=option(
            "What becomes of the steps during an exchange: {choices}.",
            DILOCO,
            name="--diloco-overlapped",
            metavar="NAME",
        ),
    )

    deadline: Seconds | None = field(
        default=None,
        metadata=option(
            "Make every replica a world of its own, which may be lost and come back. A round waits "
            "this many seconds for one that is late.",
            DILOCO,
            name="--diloco-deadline",
            metavar="SECONDS",
        ),
    )

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
    def format(self) -> WireFormat:
        """The format of what is sent.

        Raises:
            OptionError: there is none of that name.
        """
        try:
            return WireFormat(self.wire.strip())
        except WireError as error:
            raise OptionError("--diloco-wire", error.found, error.expected) from None

    @property
    def keeps_errors(self) -> bool:
        """Whether what the format loses is kept for the next exchange."""
        return self.error_feedback or self.format.needs_error_feedback

    def __str__(self) -> str:
        return f"exchange every {self.local_steps} steps, sent as {self.format.value}"


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What a run writes, where, and how often."""

    out: Path = field(metadata=option("Folder of the run.", OUTPUT, metavar="PATH"))
    checkpoint_every: Natural = field(
        default=100,
        metadata=option("Steps between checkpoints; 0: only at the end or when stopped.", OUTPUT),
    )
    keep_last: Count = field(default=2, metadata=option("Checkpoints to keep.", OUTPUT))
    keep_best: bool = field(
        default=False,
        metadata=option(
            "Save whenever the validation loss is the lowest so far, and keep that checkpoint "
            "beside the last ones.",
            OUTPUT,
        ),
    )
    async_checkpoint: bool = field(
        default=False,
        metadata=option(
            "Train on while a checkpoint is written; needs memory for a copy of each rank's "
            "shards and optimizer state.",
            OUTPUT,
        ),
    )
    eval_every: Natural = field(
        default=100,
        metadata=option(
            "Steps between evaluations; 0: only at the end.", OUTPUT, former=("--eval-interval",)
        ),
    )
    timeline: str | None = field(
        default=None,
        metadata=option(
            "Record what every rank does in some steps, such as 5-8; auto: four, after four more. "
            "See docs/timeline.md.",
            OUTPUT,
            metavar="STEPS",
            completions=("auto",),
        ),
    )
    log: str = field(
        default="jsonl",
        metadata=option(
            "Where metrics go, separated by commas: jsonl, tensorboard, wandb. Every run writes "
            "metrics.jsonl.",
            OUTPUT,
            metavar="NAMES",
            completions=("jsonl", "tensorboard", "wandb"),
        ),
    )
    tensorboard: bool = field(
        default=False, metadata=option("The same as --log tensorboard.", OUTPUT)
    )
    page: bool = field(
        default=False,
        metadata=option(
            "Write report.html, the page of the run, every few seconds, and not only at the end.",
            OUTPUT,
        ),
    )
    existing: Existing = field(
        default=Existing.REFUSE,
        metadata=option(
            "What to do about a run that is in --out already.",
            OUTPUT,
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
        ),
    )

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
        own = {LogName.TENSORBOARD} if self.tensorboard else set[LogName]()
        return frozenset({known[name] for name in names} | own | {LogName.JSONL})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training, whatever its model and data.

    It ends after ``steps`` or ``epochs``, whichever comes first; one of the two may be None.
    """

    steps: Count | None = field(
        default=None,
        metadata=option("Optimizer steps of the whole run, from its beginning.", TRAINING),
    )
    epochs: Count | None = field(
        default=None,
        metadata=option("Epochs of the whole run, from its beginning.", TRAINING),
    )
    batch_size: Count = field(metadata=option("Examples per rank and microbatch.", TRAINING))
    accumulate: Count = field(
        default=1, metadata=option("Microbatches per step; gradients are reduced once.", TRAINING)
    )
    stepping: Stepping = field(
        default=Stepping.AFTER_BACKWARD,
        metadata=option(
            "When the optimizer steps.",
            TRAINING,
            flags={
                "--step-in-backward": (
                    Stepping.IN_BACKWARD,
                    "Step with each group as soon as its gradients are reduced, which saves the "
                    "memory of gradients; --clip-grad then goes by the norm of the step before.",
                ),
                "--step-after-backward": (
                    Stepping.AFTER_BACKWARD,
                    "Step after backward, whatever --config says.",
                ),
            },
        ),
    )
    optimizer: OptimizerConfig | SgdConfig
    seed: Annotated[int, SEEDS] = field(
        default=0,
        metadata=option("Seed of initial weights, order of data and dropout.", TRAINING),
    )
    device: str = field(
        default=AUTO,
        metadata=option(
            "Type of device, as torch names it; auto: accelerators if there is one for every rank, "
            "else CPUs.",
            TRAINING,
            metavar="TYPE",
            completions=(AUTO, "cpu"),
        ),
    )
    peer_timeout: Seconds | None = field(
        default=None,
        metadata=option(
            "Seconds after which a process that does not answer in a collective counts as lost.",
            HOSTS,
            shown="torch's, 1800",
        ),
    )
    sharding: ShardingConfig = ShardingConfig()
    diloco: DilocoConfig | None = field(
        default=None,
        metadata={GROUP: Group(DilocoConfig(), "strategy", Strategy.DILOCO)},
    )
    output: OutputConfig

    def examples_per_step(self, world_size: int) -> int:
        """Examples of one step, over all ranks."""
        return self.batch_size * self.accumulate * world_size


def require(condition: bool, option: str, found: object, expected: str) -> None:
    """Raise :class:`OptionError` unless the condition holds."""
    if not condition:
        raise OptionError(option, found, expected)


def check_number(option: str, found: float, bounds: Bounds) -> None:
    """Raise :class:`OptionError` unless a number is within its bounds."""
    expected = bounds.expected_for(found)
    require(expected is None, option, found, str(expected))


def check_bounds(config: Any) -> None:
    """Check every number of a configuration, and of those within, against its option's bounds.

    Raises:
        OptionError: names the first option that is out of them.
    """
    kind: Any = type(config)
    bounds = bounds_of(kind)
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            check_bounds(value)
        elif each.name in bounds and value is not None:
            option = each.metadata[OPTION]
            names = tuple(option.parts) or (option.name or option_name(each.name),)
            for name, number in zip(names, value if option.parts else (value,), strict=True):
                check_number(name, number, bounds[each.name])


def check_folders(config: StrategyConfig) -> None:
    """Check that the folders of a local disk exist: the mount of one is easily mistyped.

    Raises:
        OptionError: one does not.
    """
    check_offload(config)
    places = {"--offload": config.offload, "--offload-parameters": config.offload_parameters}
    for name, place in places.items():
        folder = None if place is None else OffloadPlace.parse(place).folder
        expected = "a folder that exists, where the local disk is mounted"
        require(folder is None or folder.is_dir(), name, f"{place}, no folder", expected)


def check_train(config: TrainConfig) -> None:
    """Check everything that does not depend on the world.

    Raises:
        OptionError: names the first option that is wrong.
    """
    check_bounds(config)
    _check_optimizer(config.optimizer)
    check_offload(config.sharding)
    _ = config.sharding.wires
    device = config.device
    require(device.isidentifier(), "--device", repr(device), "a type of device, such as cpu")
    out = str(config.output.out)
    expected = "a path in UTF-8: tokenizers and safetensors can write to no other"
    require(out == out.encode(errors="replace").decode(), "--out", ascii(out), expected)
    _ = config.output.logs
    if (asked := config.output.timeline) is not None:
        first, steps = steps_to_record(asked, 0, 1)[0], config.steps
        made = steps is None or first <= steps
        require(made, "--timeline", f"{asked} of {steps} steps", f"steps up to {steps}")
    sharding = config.sharding
    require(
        sharding.mesh is None or sharding.replicas is None,
        "--mesh",
        "--replicas too",
        "one of the two",
    )
    _check_diloco(config)


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


def check_offload(config: StrategyConfig) -> None:
    """Check where states and parameters are kept, and what is kept with them.

    Raises:
        OptionError: an option is impossible.
    """
    places = {"--offload": config.offload, "--offload-parameters": config.offload_parameters}
    for name, place in places.items():
        try:
            if place is not None:
                OffloadPlace.parse(place)
        except ValueError:
            expected = "host, or disk:FOLDER with a folder of a local disk"
            raise OptionError(name, place, expected) from None
    masters, shards = config.master_dtype, config.shard_dtype
    if masters is None:
        return
    expected = "--offload too: masters are kept where states are"
    require(config.offload is not None, "--master-dtype", masters.value, expected)
    require(
        masters is PrecisionName.FP32 and shards is not PrecisionName.FP32,
        "--master-dtype",
        f"{masters.value} with shards in {shards.value}",
        "fp32 with --shard-dtype bf16",
    )


def _check_diloco(config: TrainConfig) -> None:
    apart = config.sharding.strategy is Strategy.DILOCO
    strategy = config.sharding.strategy.value
    require(
        apart == (config.diloco is not None),
        "--strategy",
        f"{strategy} with{'out' if apart else ''} settings of DiLoCo",
        "another one: only train lm has them" if apart else Strategy.DILOCO.value,
    )
    if (diloco := config.diloco) is None:
        return
    sharding = config.sharding
    places = {"--offload": sharding.offload, "--offload-parameters": sharding.offload_parameters}
    for name, place in places.items():
        require(
            place is None,
            name,
            f"--strategy {strategy} too",
            "another strategy: replicas that train apart keep parameters and states in memory",
        )
    require(
        config.stepping is Stepping.AFTER_BACKWARD,
        "--step-in-backward",
        f"--strategy {strategy} too",
        "another strategy: replicas that train apart step after backward",
    )
    _ = diloco.format
    steps = diloco.local_steps
    parts, expected = diloco.fragments, f"1 to {steps}, the local steps"
    require(1 <= parts <= steps, "--diloco-fragments", parts, expected)
    kept = diloco.overlapped is Overlapped.KEPT
    require(
        not (kept and diloco.alpha), "--diloco-alpha", diloco.alpha, "0 with steps that are kept"
    )
    overlap, most = diloco.overlap, steps if kept else steps - 1
    expected = f"0 to {most} steps" + (
        "" if kept else ", or a whole round with steps that are kept"
    )
    require(0 <= overlap <= most, "--diloco-overlap", overlap, expected)
    if diloco.deadline is not None:
        expected = "one fragment, without overlap, with --diloco-deadline"
        require(parts == 1, "--diloco-fragments", parts, expected)
        require(overlap == 0, "--diloco-overlap", overlap, expected)
    try:
        check_streaming(diloco.streaming, steps)
    except ValueError as error:
        raise OptionError("--local-steps", steps, str(error)) from None


def _check_optimizer(config: OptimizerConfig | SgdConfig) -> None:
    if isinstance(config, OptimizerConfig):
        found, expected = config.momentum, "none: only muon and sgd have one"
        require(config.algorithm in MOMENTA or found is None, "--momentum", found, expected)
        _check_schedule(config)
    rules_of(config.param_groups)


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


def _check_schedule(config: OptimizerConfig) -> None:
    decays = config.schedule is not ScheduleName.CONSTANT
    for name, given in (("--decay-steps", config.decay_steps), ("--min-lr", config.min_lr)):
        expected = "none with --schedule constant, which does not decay"
        require(decays or given is None, name, given, expected)
    if config.min_lr is not None:
        expected = f"0 to {config.lr}, the peak of --lr"
        require(0 <= config.min_lr <= config.lr, "--min-lr", config.min_lr, expected)


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


def resolve_sharding(config: ShardingConfig, world_size: int, hosts: int = 1) -> ShardingPlan:
    """Return the mesh of a run and the arguments of ``fully_shard``.

    Raises:
        OptionError: strategy, mesh, world and wire contradict each other.
    """
    plan = _plan_of(config, world_size, hosts)
    has = plan.names[1:] if plan.apart else plan.names
    unknown = config.wires.unknown(has)
    require(unknown is None, "--wire", f"the dimension {unknown}", f"one of {', '.join(has)}")
    asked = config.reshard_after_forward
    if asked is None:
        return plan
    with naming_mesh("--reshard-after-forward"):
        return replace(plan, reshard_after_forward=reshard_over(plan, asked, world_size // hosts))


@contextlib.contextmanager
def naming_mesh(option: str, hint: str = "") -> Iterator[None]:
    """Report what does not fit the mesh as a mistake in an option."""
    try:
        yield
    except MeshError as error:
        raise OptionError(option, error.found, error.expected + hint) from None


def _plan_of(config: ShardingConfig, world_size: int, hosts: int) -> ShardingPlan:
    if config.mesh is None:
        option = "--strategy" if config.replicas is None else "--replicas"
        hint = "; say --replicas R" if config.replicas is None else ""
        replicas = config.replicas
        if replicas is None and config.over_hosts and config.strategy.is_hybrid:
            replicas = hosts
        return _resolve(option, config.strategy, world_size, replicas, hosts, hint)
    with naming_mesh("--mesh"):
        sizes = parse_mesh(config.mesh)
    replicas = sizes.get(REPLICATE, 1)
    ranks = replicas * sizes.get(SHARD, 1)
    require(
        ranks == world_size,
        "--mesh",
        f"{config.mesh}, a mesh of {ranks} {'rank' if ranks == 1 else 'ranks'}",
        f"one of {world_size}, the number of processes",
    )
    return _resolve("--mesh", config.strategy, world_size, replicas, hosts, "")


def _resolve(
    option: str, strategy: Strategy, world_size: int, replicas: int | None, hosts: int, hint: str
) -> ShardingPlan:
    with naming_mesh(option, hint):
        return resolve(strategy, world_size, replicas=replicas, hosts=hosts)


def as_json(config: Any) -> dict[str, Any]:
    """Return a configuration as plain values that JSON can hold."""

    def plain(value: object) -> object:
        return value.value if isinstance(value, enum.Enum) else str(value)

    values: dict[str, Any] = json.loads(json.dumps(asdict(config), default=plain))
    return values


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by their innermost names, as on the command line."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(flatten(value) if isinstance(value, Mapping) else {name: value})
    return flat


def find_settings(
    model: str, presets: Mapping[str, dict[str, Any]], option: str = "--model"
) -> dict[str, Any]:
    """Return the settings of a preset, or of a ``config.json`` of ``transformers``.

    Args:
        model: a preset's name, the path of a config file, or of a folder that holds one.
        presets: settings by name.
        option: what named the model, for errors.

    Raises:
        OptionError: it is neither, or the file is no model configuration.
    """
    with naming_model(option):
        return planning.find_settings(model, presets)


@contextlib.contextmanager
def naming_model(option: str = "--model") -> Iterator[None]:
    """Report a model that cannot be found or built as a mistake in an option."""
    try:
        yield
    except ModelError as error:
        raise OptionError(option, error.found, error.expected) from error.__cause__
