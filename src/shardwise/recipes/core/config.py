"""What a training is asked to do: frozen values, checked in one place, before anything starts.

Nothing here imports torch, so that a mistake is answered at once.

How replicas that train apart meet, as the command line asks. No torch here.
"""

from __future__ import annotations

import difflib
import enum
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.checkpoint.disk.strict import check_depth
from shardwise.diloco.settings import OuterSGD, Streaming, WireFormat
from shardwise.errors import CheckpointError
from shardwise.frontends.strategies import (
    REPLICATE,
    SHARD,
    MeshError,
    ShardingPlan,
    Strategy,
    parse_mesh,
    resolve,
)
from shardwise.launch.errors import UserError
from shardwise.launch.world import World


class OptionError(UserError, ValueError):
    """An option that cannot be honoured.

    Attributes:
        option: its name on the command line, ``--steps``.
    """

    def __init__(self, option: str, found: object, expected: str) -> None:
        super().__init__(f"{option}: found {found}, expected {expected}")
        self.option = option


class Precision(enum.Enum):
    """Dtypes that parameters may compute in and gradients may be reduced in."""

    FP32 = "fp32"
    BF16 = "bf16"


class Existing(enum.Enum):
    """What to do about a run that is in the folder already."""

    REFUSE = "refuse"
    RESUME = "resume"
    AUTO = "auto-resume"  # resume if a checkpoint was committed, else overwrite; rank 0 decides
    OVERWRITE = "overwrite"


class Device(enum.Enum):
    """Where to train."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class TransportName(enum.Enum):
    """Who moves bytes between ranks."""

    AUTO = "auto"
    SHM = "shm"
    C10D = "c10d"
    COLLECTIVES = "collectives"


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW and its schedule.

    Attributes:
        lr: peak learning rate.
        betas: decay of the running mean and square of the gradient.
        weight_decay: on weights of two and more dimensions.
        warmup: steps over which the learning rate rises.
        clip_grad: largest norm of the gradient; 0 leaves it as it is.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup: int = 20
    clip_grad: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SgdConfig:
    """Stochastic gradient descent with momentum.

    Attributes:
        lr: peak learning rate.
        momentum: of the running gradient.
        weight_decay: on all parameters.
        clip_grad: largest norm of the gradient; 0 leaves it as it is.
    """

    lr: float
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip_grad: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How the model is spread over ranks, and in which dtypes it computes.

    Attributes:
        strategy: see :mod:`shardwise.frontends.strategies`.
        replicas: copies of the model, for hybrid strategies; None: one per host.
        over_hosts: whether the job was asked for over several hosts; then hybrid strategies make
            do with the one that may remain.
        mesh: the same said as a mesh, ``dp_replicate=2,dp_shard=4``.
        param_dtype: of parameters and activations in forward and backward. Shards and optimizer
            state are fp32.
        reduce_dtype: of the gradient's reduction.
        transport: who moves bytes; None leaves it to the runtime.
        activation_checkpointing: compute activations again in backward instead of keeping them.
    """

    strategy: Strategy = Strategy.FULL_SHARD
    replicas: int | None = None
    over_hosts: bool = False
    mesh: str | None = None
    param_dtype: Precision = Precision.FP32
    reduce_dtype: Precision = Precision.FP32
    transport: TransportName | None = None
    activation_checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is kept, and where.

    Attributes:
        out: folder of the run.
        checkpoint_every: steps between checkpoints; 0: only when training ends or is stopped.
        keep_last: checkpoints to keep.
        async_checkpoint: train on while checkpoints are written, from a copy of every rank's
            shards; the last one, and one on a signal, are waited for.
        eval_every: steps between evaluations, or epochs in a training that is counted in
            epochs; 0: only at the end.
        tensorboard: write event files too.
        existing: what to do about a run that is in ``out`` already.
    """

    out: Path
    checkpoint_every: int = 100
    keep_last: int = 2
    async_checkpoint: bool = False
    eval_every: int = 100
    tensorboard: bool = False
    existing: Existing = Existing.REFUSE


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training, whatever its model and data.

    Attributes:
        steps: optimizer steps from the beginning of the run, or None where epochs decide.
        epochs: epochs from the beginning of the run, or None where steps decide. Given both, the
            run ends with whichever is reached first.
        batch_size: examples per rank and microbatch.
        optimizer: which, and its settings.
        accumulate: microbatches per step.
        seed: of initial weights, order of data and dropout.
        device: where to train.
        diloco: with the strategy of that name, and with no other.
        peer_timeout: seconds after which a rank that does not answer in a collective is lost;
            None: torch's own, half an hour.
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int
    optimizer: AdamWConfig | SgdConfig
    output: OutputConfig
    diloco: DilocoConfig | None = None
    sharding: ShardingConfig = ShardingConfig()
    accumulate: int = 1
    seed: int = 0
    device: Device = Device.AUTO
    peer_timeout: float | None = None

    def examples_per_step(self, world_size: int) -> int:
        """Examples that all ranks together take for one step."""
        return self.batch_size * self.accumulate * world_size


def require(condition: bool, option: str, found: object, expected: str) -> None:
    """Raise :class:`OptionError` unless the condition holds."""
    if not condition:
        raise OptionError(option, found, expected)


def check_train(config: TrainConfig) -> None:
    """Check everything that does not depend on the world.

    Raises:
        OptionError: naming the first option that is wrong.
    """
    if config.steps is not None:
        _at_least("--steps", config.steps, 1)
    if config.epochs is not None:
        _at_least("--epochs", config.epochs, 1)
    _at_least("--batch-size", config.batch_size, 1)
    _at_least("--accumulate", config.accumulate, 1)
    if config.peer_timeout is not None:
        found, expected = config.peer_timeout, "a number above 0"
        require(0 < found < math.inf, "--peer-timeout", found, expected)
    require(0 <= config.seed < 2**63, "--seed", config.seed, "0 to 2^63 - 1")
    _check_optimizer(config.optimizer)
    _check_output(config.output, counts_epochs=config.epochs is not None)
    sharding = config.sharding
    require(
        sharding.mesh is None or sharding.replicas is None,
        "--mesh",
        "--replicas too",
        "one of the two",
    )
    _check_diloco(config)


def _check_diloco(config: TrainConfig) -> None:
    apart = config.sharding.strategy is Strategy.DILOCO
    strategy = config.sharding.strategy.value
    require(
        apart == (config.diloco is not None),
        "--strategy",
        f"{strategy} with{'out' if apart else ''} settings of DiLoCo",
        "another: only train lm has them" if apart else Strategy.DILOCO.value,
    )
    if config.diloco is not None:
        try:
            config.diloco.streaming.check(config.diloco.local_steps)
        except ValueError as error:
            raise OptionError("--local-steps", config.diloco.local_steps, str(error)) from None


def _check_optimizer(config: AdamWConfig | SgdConfig) -> None:
    # Written so that NaN fails every one of them.
    require(0 < config.lr < math.inf, "--lr", config.lr, "a number above 0")
    match config:
        case AdamWConfig():
            for name, beta in zip(("--beta1", "--beta2"), config.betas, strict=True):
                require(0 <= beta < 1, name, beta, "0 to 1, without 1")
            _at_least("--warmup", config.warmup, 0)
        case SgdConfig(momentum=momentum):
            require(0 <= momentum < 1, "--momentum", momentum, "0 to 1, without 1")
    decay = config.weight_decay
    require(0 <= decay < math.inf, "--weight-decay", decay, "0 or more")
    require(0 <= config.clip_grad < math.inf, "--clip-grad", config.clip_grad, "0 or more")


def _check_output(config: OutputConfig, *, counts_epochs: bool) -> None:
    _at_least("--checkpoint-every", config.checkpoint_every, 0)
    _at_least("--keep-last", config.keep_last, 1)
    _at_least("--eval-interval" if counts_epochs else "--eval-every", config.eval_every, 0)


def _at_least(option: str, found: int, low: int) -> None:
    require(found >= low, option, found, f"{low} or more")


def check_nproc(nproc: int | None, world: World | None) -> int:
    """How many processes to start, or to expect on this host.

    Args:
        nproc: ``--nproc``, None where not given.
        world: the world that this process found, None where it found none.

    Raises:
        OptionError: below 1, or not what the world that started this process has.
    """
    if nproc is not None:
        _at_least("--nproc", nproc, 1)
    if world is None:
        return nproc or 1
    require(
        nproc in (None, world.local_size),
        "--nproc",
        nproc,
        f"{world.local_size} or none given: the environment has {world.local_size} on this host",
    )
    return world.local_size


def resolve_sharding(config: ShardingConfig, world_size: int, hosts: int = 1) -> ShardingPlan:
    """The mesh of a run and the arguments of ``fully_shard``.

    Raises:
        OptionError: strategy, mesh and world contradict each other.
    """
    if config.mesh is None:
        option = "--strategy" if config.replicas is None else "--replicas"
        hint = "; say --replicas R" if config.replicas is None else ""
        replicas = config.replicas
        if replicas is None and config.over_hosts and config.strategy.is_hybrid:
            replicas = hosts
        return _resolve(option, config.strategy, world_size, replicas, hosts, hint)
    try:
        sizes = parse_mesh(config.mesh)
    except MeshError as error:
        raise OptionError("--mesh", error.found, error.expected) from None
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
    try:
        return resolve(strategy, world_size, replicas=replicas, hosts=hosts)
    except MeshError as error:
        raise OptionError(option, error.found, error.expected + hint) from None


def as_json(config: Any) -> dict[str, Any]:
    """A configuration as plain values that JSON can hold."""

    def plain(value: object) -> object:
        return value.value if isinstance(value, enum.Enum) else str(value)

    values: dict[str, Any] = json.loads(json.dumps(asdict(config), default=plain))
    return values


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings by their innermost names, as the command line has them."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(flatten(value) if isinstance(value, Mapping) else {name: value})
    return flat


@dataclass(frozen=True, kw_only=True)
class DilocoConfig:
    """How replicas that train apart meet; see :class:`shardwise.diloco.DiLoCo`.

    Attributes:
        local_steps: inner steps of a round.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum.
        outer_warmup: rounds over which that rises from 0.
        wire: what pseudo-gradients are on the wire.
        error_feedback: send what encoding has lost the next time.
        streaming: fragments, and the overlap of their exchange with inner steps.
    """

    local_steps: int = 500
    outer_lr: float = OuterSGD.lr
    outer_momentum: float = OuterSGD.momentum
    outer_warmup: int = OuterSGD.warmup
    wire: WireFormat = WireFormat.FP32
    error_feedback: bool = False
    streaming: Streaming = field(default_factory=Streaming)

    @property
    def outer(self) -> OuterSGD:
        """The outer optimizer."""
        return OuterSGD(lr=self.outer_lr, momentum=self.outer_momentum, warmup=self.outer_warmup)

    def __str__(self) -> str:
        return f"meet every {self.local_steps} steps, {self.wire.value} on the wire"


def find_settings(model: str, presets: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings of a preset, or of a ``config.json`` in the format of ``transformers``.

    Args:
        model: a preset's name, the path of a config file, or of a folder that holds one.
        presets: settings by name.

    Raises:
        OptionError: neither, or a file that is no model configuration.
    """
    if model in presets:
        return presets[model]
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        names = ", ".join(presets)
        near = difflib.get_close_matches(model, presets, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError("--model", model, f"{names}, or the path of a config.json{hint}")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        check_depth(settings, "it")
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        raise OptionError("--model", f"{file}, no JSON ({error})", "a config.json") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise OptionError("--model", f'{file} without "model_type"', "a config.json")
    return settings
