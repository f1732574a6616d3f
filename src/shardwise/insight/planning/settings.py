"""What a plan is made for: mesh, strategy, batch, dtypes, optimizer. All plain values.

No torch here: the command line checks its options with it.
"""

from __future__ import annotations

import enum
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from shardwise.base.errors import NotPossibleError
from shardwise.frontends.strategies import (
    DATA,
    REPLICATE,
    SHARD,
    TENSOR,
    MeshError,
    Runtime,
    ShardingPlan,
    WantedMesh,
    reshard_over,
    resolve,
)
from shardwise.insight.schema.option import (
    MODEL,
    SHARDING,
    TRAINING,
    Bounds,
    Config,
    OptionError,
    as_json,
    require,
    setting,
)
from shardwise.insight.schema.sharding import (
    Gathers,
    PrecisionName,
    StepConfig,
    StrategyConfig,
)
from shardwise.insight.schema.training import (
    DilocoConfig,
    Logits,
    OptimizerConfig,
    OptimizerName,
    SgdConfig,
)

MOST_RANKS = 100_000  # of a mesh to plan for
#: More ranks on CPUs are rehearsed with plain collectives, unless a transport is named: messages
#: and shared memory take time for each peer, in a rehearsal too.
MOST_PEERS = 16
ONE_HOST = 8  # ranks on a host, unless it is given
MOST_ACCUMULATED = 1000  # microbatches; each of them is rehearsed
MOST_SIZE = 10**9  # of anything else that is counted

#: The optimizers that can be named: those of trainings, of which ``sgd`` is without momentum here,
#: and some that no recipe trains with.
OPTIMIZERS = (*(each.value for each in OptimizerName), "sgd-momentum", "adam", "adagrad", "none")

#: What torch's own fully_shard has no argument for.
_OURS_ALONE = ("collective_wire", "transport", "stepping", "offload_parameters")

_SIZES = Bounds(least=1, most=MOST_SIZE)
MACHINE = "Machine"  # a panel of --help


class SettingsError(NotPossibleError):
    """A setting that cannot be planned for."""


class UntraceableError(ValueError):
    """A module that computes with values in a way that a plan cannot stand in for."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(
            f"module {module or 'of the model itself'!r}: found {why}, whose result depends on "
            "values, and a plan has none; expected operations whose shapes follow from those of "
            "the batch. Leave the module out of the model to plan for, or replace it by one of "
            "the same size without that operation"
        )


class RehearsalError(ValueError):
    """Code of the user, or a model, that raises in a rehearsal.

    Args:
        where: what was being done, such as ``"forward of module layers.0"``.
        error: what it raises.
    """

    def __init__(self, where: str, error: Exception) -> None:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        super().__init__(
            f"{where}: found {reason}; expected a step that runs on tensors without values. If the "
            "model needs other inputs, give `batch` and `step`"
        )


class Products(enum.Enum):
    """The dtype that matrix products compute in."""

    AS_STORED = "as-stored"  # that of the parameters in forward
    FLOAT8 = "float8"


@dataclass(frozen=True, kw_only=True)
class PlannedStep(StepConfig):
    """The step of a plan, on samples that it has to make.

    Attributes:
        batch_size: samples (sequences, images) of a rank and microbatch.
        accumulate: microbatches of a step, all of which are rehearsed.
        stepping: when the optimizer steps: ``"after-backward"``, or ``"in-backward"``; see
            :func:`shardwise.optim.in_backward`.
        seq_length: tokens of a sequence; ``None`` for models without sequences.
        image_size: height and width of an image; ``None``: as the model's configuration says.
        optimizer: ``"adamw"`` or another name that ``shardwise plan --help`` lists, a function from
            parameters to an optimizer, or the configuration of a training's.
        clip_grad: the largest norm of the gradients; 0: none is computed; ``math.inf``: it is
            computed, as by ``shardwise train`` without clipping.
        batch: makes a microbatch of n samples on the current default device; ``None``: made
            for models of transformers from ``batch_size`` and ``seq_length`` or ``image_size``.
        step: computes the loss of a model on a batch; ``None``: the ``loss`` of a transformers
            model, else the mean of what the model returns.
        logits: of a language model of transformers without ``step``: ``"whole"`` as its own loss
            has them, ``"chunks"`` as :func:`shardwise.pretrained.causal_lm_loss`, or ``"auto"`` as
            ``shardwise train lm``.
        runtime: whose ``fully_shard`` is rehearsed.

    The three functions may be named: ``"package.module:function"``.
    """

    seq_length: Annotated[int, _SIZES] | None = setting(
        None, "Tokens of a sequence.", TRAINING, metavar="N", shown="the model's, at most 4,096"
    )
    image_size: Annotated[int, _SIZES] | None = setting(
        None, "Height and width of an image, in pixels.", TRAINING, metavar="N", shown="the model's"
    )
    optimizer: str | OptimizerConfig | SgdConfig | Callable[[list[Any]], Any] = setting(
        "adamw",
        f"{', '.join(OPTIMIZERS)}, or a function in code: package.module:function.",
        TRAINING,
        metavar="NAME",
    )
    clip_grad: Annotated[float, Bounds(least=0, most=math.inf)] = setting(
        1.0,
        "Maximum gradient norm; 0: none is computed; inf: it is, without clipping.",
        TRAINING,
    )
    batch: str | Callable[[int], Any] | None = setting(
        None,
        "package.module:function, from a number of samples to a batch, for models "
        "that are not of transformers.",
        MODEL,
        metavar="NAME",
    )
    step: str | Callable[[Any, Any], Any] | None = setting(
        None,
        "package.module:function, from model and batch to a loss.",
        MODEL,
        metavar="NAME",
        shown="the model's own loss, else the mean of what it returns",
    )
    logits: Logits = setting(
        Logits.WHOLE,
        "How the own loss of a language model of transformers is computed: {choices}.",
        TRAINING,
        metavar="NAME",
    )
    runtime: Runtime = setting(
        Runtime.SHARDWISE,
        "Whose fully_shard is rehearsed: {choices}.",
        SHARDING,
        metavar="NAME",
    )

    def check_values(self) -> None:
        """Check numbers, and the name of the optimizer.

        Raises:
            OptionError: names the first option that is wrong.
        """
        super().check_values()
        name, most = self.optimizer, MOST_ACCUMULATED
        known = not isinstance(name, str) or name in OPTIMIZERS or ":" in name or "." in name
        expected = f"one of {', '.join(OPTIMIZERS)}, or a function in code"
        require(known, "--optimizer", name, expected)
        expected = f"at most {most:,}, each of which is rehearsed"
        require(self.accumulate <= most, "--accumulate", f"{self.accumulate:,}", expected)


@dataclass(frozen=True, kw_only=True)
class MachineConfig(Config):
    """What a plan runs on.

    Attributes:
        device: a known device, such as ``"h100"``, or ``"cpu"``: this machine, as
            ``shardwise calibrate`` measured it. By default the same, if it was measured.
        link: a known link between hosts, such as ``"ib-400"``.
        ranks_per_host: ranks that share a host; ``None``: all of them, at most 8.
        device_file: a TOML file that describes device and links.
        products: the dtype that matrix products compute in.
    """

    device: str | None = setting(
        None,
        "The device of every rank, such as h100; cpu: this machine, as `shardwise calibrate` "
        "measured it.",
        MACHINE,
        metavar="NAME",
        shown="cpu, if it was measured",
    )
    link: str | None = setting(
        None,
        "The link between hosts, such as ib-400 or ethernet-100.",
        MACHINE,
        metavar="NAME",
        shown="ib-400",
    )
    ranks_per_host: Annotated[int, _SIZES] | None = setting(
        None, "Ranks that share a host.", MACHINE, metavar="N", shown="8"
    )
    device_file: Path | None = setting(
        None,
        "TOML file that describes device and links, in place of --device.",
        MACHINE,
        metavar="FILE",
    )
    products: Products = setting(
        Products.AS_STORED,
        "Dtype of matrix products.",
        MACHINE,
        flags={"--float8": (Products.FLOAT8, "Plan for matrix products in float8.")},
    )


@dataclass(frozen=True, kw_only=True)
class Settings(StrategyConfig, PlannedStep):
    """What a plan is made for: a strategy and a step, on a mesh.

    Attributes:
        mesh: the ranks, as the user names them: ``dp=8,tp=2``. See :attr:`world`.
        backend: the process group's backend by its name in torch; ``None``: that of the device.
        device_type: type of the device as torch names it.
        ranks_per_host: ranks that share a host; ``None``: all of them, at most 8.
        products: dtype of matrix products.
        diloco: how replicas that train apart exchange parameters.
        gathers: how often parameters that stay in memory after forward are gathered.
        after_step: called with the model after each step; ``None``: nothing is.
        replicate_every: steps between versions that hosts keep in memory; 0: none.
    """

    mesh: WantedMesh
    shard_dtype: PrecisionName | None = None
    backend: str | None = None
    device_type: str = "cpu"
    ranks_per_host: int | None = None
    products: Products = Products.AS_STORED
    diloco: DilocoConfig | None = None
    gathers: Gathers = Gathers.EVERY_MICROBATCH
    after_step: Callable[[Any], None] | None = None
    replicate_every: int = 0

    @classmethod
    def of(cls, *configs: Config, **own: Any) -> Settings:
        """Return what configurations ask for, the first one that has a field.

        Args:
            configs: they share fields with this, by their names.
            own: fields that they do not share.
        """
        for config in configs:
            names = {each.name for each in fields(cls)} & {each.name for each in fields(config)}
            own = {**{name: getattr(config, name) for name in names}, **own}
        return cls(**own)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: a value is impossible.
            MeshError: the mesh does not fit the strategy.
        """
        try:
            super().__post_init__()
            self.check_values()
        except OptionError as error:  # named as in code
            name = error.option.removeprefix("--").replace("-", "_")
            raise SettingsError(name, error.found, error.expected) from None
        plan = self.sharding
        names = plan.names[1:] if plan.apart else plan.names
        if self.runtime is Runtime.TORCH:
            self._check_torch()
        unknown = self.collective_wire.unknown(names)
        if unknown is not None:
            raise SettingsError("wire", f"the dimension {unknown}", f"one of {', '.join(names)}")

    def _check_torch(self) -> None:
        """Check that torch's own ``fully_shard`` can do what is planned for.

        Raises:
            SettingsError: it cannot.
        """
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if name in _OURS_ALONE and value != each.default:
                shown = value.value if isinstance(value, enum.Enum) else value
                expected = "none given: torch's fully_shard has no such argument"
                raise SettingsError(name, str(shown), expected)
        if self.sharding.apart:
            raise SettingsError("strategy", self.strategy.value, "one of torch's FSDP2")

    @property
    def sharding(self) -> ShardingPlan:
        """The mesh of data parallelism, and ``reshard_after_forward`` of the strategy.

        A dimension has the name that the user gave it. Without data parallelism, there is one
        dimension of one rank.

        Raises:
            MeshError: the strategy does not fit the mesh.
        """
        sizes = dict(zip(self.mesh.names, self.mesh.shape, strict=True))
        ranks = math.prod(size for name, size in sizes.items() if name != TENSOR)
        replicas = sizes.get(REPLICATE)
        if replicas == 1 and not self.strategy.is_hybrid:
            replicas = None
        if self.strategy.is_hybrid and replicas is None:
            raise MeshError(
                f"{self.mesh} with strategy {self.strategy.value}",
                f"the number of replicas: {REPLICATE}=R,{SHARD}=S",
            )
        plan = resolve(self.strategy, ranks, replicas=replicas)
        if len(plan.shape) == 1 and DATA in sizes:
            plan = replace(plan, names=(DATA,))
        asked, tensor = self.reshard_after_forward, self.mesh.tensor_parallel
        if asked is None:
            return plan
        if isinstance(asked, str) and tensor > 1:
            found = f"{asked} beside tp={tensor}"
            raise SettingsError("reshard_after_forward", found, "none given, or no tp")
        try:
            return replace(plan, reshard_after_forward=reshard_over(plan, asked, self.on_host))
        except MeshError as error:
            raise SettingsError("reshard_after_forward", error.found, error.expected) from None

    @property
    def max_norm(self) -> float | None:
        """The largest norm of gradients; ``None``: no norm is computed."""
        return self.clip_grad or None

    @property
    def world(self) -> WantedMesh:
        """The mesh of all ranks: that of :attr:`sharding`, and tensor parallelism innermost."""
        plan = self.sharding
        if self.mesh.tensor_parallel == 1:
            return WantedMesh(plan.names, plan.shape)
        return WantedMesh((*plan.names, TENSOR), (*plan.shape, self.mesh.tensor_parallel))

    @property
    def on_host(self) -> int:
        """Ranks that share a host."""
        return min(self.ranks_per_host or ONE_HOST, self.mesh.size)

    @property
    def samples(self) -> int:
        """Samples of an optimizer step on all ranks. Tensor parallel ranks share theirs."""
        return self.batch_size * self.accumulate * (self.mesh.size // self.mesh.tensor_parallel)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain values; functions by their names."""
        values = as_json(
            replace(self, batch=None, step=None, after_step=None, optimizer="none", clip_grad=0.0)
        )
        for name in ("batch", "step", "after_step", "compile", "diloco"):
            del values[name]
        values["clip_grad"] = None if math.isinf(self.clip_grad) else self.clip_grad
        values["wire"] = values.pop("collective_wire")
        sizes = dict(zip(self.mesh.names, self.mesh.shape, strict=True))
        compiled, optimizer = "blocks" if self.compile else "nothing", name_of(self.optimizer)
        return {**values, "mesh": sizes, "optimizer": optimizer, "compiled": compiled}


def name_of(optimizer: str | OptimizerConfig | SgdConfig | Callable[..., Any]) -> str:
    """Return the name of an optimizer, however it was given."""
    match optimizer:
        case str():
            return optimizer
        case OptimizerConfig(algorithm=algorithm):
            return algorithm.value
        case SgdConfig():
            return OptimizerName.SGD.value
    return getattr(optimizer, "__name__", "function")
