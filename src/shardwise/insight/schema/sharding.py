"""How a model is sharded and stepped: what a training and its plan both ask for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from typing import get_args

from shardwise.base.places import folder_of_place
from shardwise.base.units import counted
from shardwise.frontends.strategies import (
    HOST,
    REPLICATE,
    Checkpointing,
    MeshError,
    ShardingPlan,
    Strategy,
    WantedMesh,
    reshard_over,
    resolve,
)
from shardwise.insight.schema.option import (
    SHARDING,
    TRAINING,
    Config,
    Count,
    OnResume,
    OptionError,
    naming,
    require,
    setting,
)
from shardwise.transport.wire import PLAIN, Encoding, Wire, WireError, Wires


class PrecisionName(enum.StrEnum):
    """Dtypes that parameters may compute in and gradients may be reduced in."""

    FP32 = "fp32"
    BF16 = "bf16"


class TransportName(enum.StrEnum):
    """How bytes move between ranks."""

    AUTO = "auto"
    SHM = "shm"
    C10D = "c10d"
    COLLECTIVES = "collectives"


class Stepping(enum.Enum):
    """When the optimizer steps."""

    AFTER_BACKWARD = "after-backward"
    IN_BACKWARD = "in-backward"  # each group, as soon as its gradients are reduced


class Gathers(enum.Enum):
    """How often parameters that stay in memory between forward and backward are gathered."""

    EVERY_MICROBATCH = "every microbatch"
    EVERY_STEP = "every step"


def parse_wires(text: str) -> Wires:
    """Read what the command line says: ``int8``, or parts separated by commas.

    ``reduce=int8,error-feedback`` is one wire for all dimensions. ``dp_replicate:reduce=int8``
    names the dimension, and ``;`` separates several.

    Raises:
        WireError: it is something else.
    """
    common, named = Wire(), {}
    for part in text.split(";"):
        name, colon, rest = part.rpartition(":")
        name, made = name.strip(), _parse_one(rest)
        if not colon:
            common = made
        elif not name or name in named:
            raise WireError(repr(text), "each dimension by its name, once")
        else:
            named[name] = made
    if named and not common.is_plain:
        raise WireError(repr(text), "one wire for all dimensions, or wires of named ones")
    return Wires(common, tuple(sorted(named.items())))


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Config):
    """What is sharded, in which dtypes, and where it is kept.

    Attributes:
        strategy: what is sharded.
        shard_dtype: dtype of shards, their gradients and optimizer states; ``None``, in code: as
            the model was built.
        param_dtype: dtype of forward and backward; ``None``: that of the shards.
        reduce_dtype: dtype that gradients are reduced in; ``None``, in code: that of forward.
        collective_wire: the formats between hosts; in code also as text, as on the command line.
        reshard_after_forward: ``"host"`` or a number of ranks; in code also as for
            :func:`~shardwise.fully_shard`; ``None``: what the strategy says.
        activation_checkpointing: which activations of each block are recomputed.
        offload_activations: where inputs of blocks are kept, in the words of ``offload``, if
            ``activation_checkpointing`` offloads them; ``None``: on the host.
        recompute_every: of the blocks in order, every N-th is recomputed; the others keep all.
        compile: each block is compiled.
        transport: how bytes move between ranks.
        offload: where optimizer states are kept: ``"host"`` or ``"disk:FOLDER"``, as for
            :func:`shardwise.optim.offload`; ``None``: in memory.
        offload_parameters: where parameters are kept, in the same words.
        master_dtype: dtype of copies of the parameters that are kept with the states.
    """

    strategy: Strategy = setting(
        Strategy.FULL_SHARD, "What is sharded: {choices}.", SHARDING, metavar="NAME"
    )
    shard_dtype: PrecisionName | None = setting(
        PrecisionName.FP32,
        "Dtype of parameters, gradients and optimizer state between steps.",
        SHARDING,
        on_resume=OnResume.FIXED,
    )
    param_dtype: PrecisionName | None = setting(
        None, "Dtype of forward and backward.", SHARDING, shown="that of --shard-dtype"
    )
    reduce_dtype: PrecisionName | None = setting(
        PrecisionName.FP32, "Dtype to reduce gradients in.", SHARDING
    )
    collective_wire: Wires = setting(
        PLAIN,
        "What is sent between hosts: bf16, fp8 or int8; or parts of gather=bf16, reduce=int8 "
        "and error-feedback, separated by commas. See docs/meshes.md.",
        SHARDING,
        name="--wire",
        metavar="FORMATS",
        shown="fp32",
        reads=parse_wires,
        completions=("bf16", "fp8", "int8", "reduce=int8,error-feedback"),
    )
    reshard_after_forward: str | int | None = setting(
        None,
        "Between forward and backward, keep the parameters of each block cut over the ranks "
        "of a host (host) or over this many ranks: only forward gathers between hosts.",
        SHARDING,
        metavar="RANKS",
        shown="all ranks",
        completions=(HOST,),
    )
    activation_checkpointing: Checkpointing = setting(
        Checkpointing.NONE,
        "Activations that are recomputed in backward instead of being kept: {choices}. "
        "selective keeps the results of matrix products, convolutions and attention, op only "
        "every second of these products. offload recomputes all, and keeps what that begins with "
        "at --offload-activations.",
        SHARDING,
        metavar="NAME",
    )
    offload_activations: str | None = setting(
        None,
        "With --activation-checkpointing offload: keep the inputs of blocks on the host of an "
        "accelerator (host) or in a folder of a local disk (disk:FOLDER) until backward.",
        SHARDING,
        metavar="PLACE",
        shown="host",
    )
    recompute_every: Count = setting(
        1,
        "With activation checkpointing: recompute in every N-th block, and keep the "
        "activations of the others.",
        SHARDING,
        metavar="N",
    )
    compile: bool = setting(
        False, "Compile each block with torch.compile before the first step.", SHARDING
    )
    transport: TransportName = setting(
        TransportName.AUTO,
        "How bytes move between ranks: {choices}.",
        SHARDING,
        metavar="NAME",
        env="SHARDWISE_TRANSPORT",
    )
    offload: str | None = setting(
        None,
        "Keep optimizer states on the host of an accelerator (host) or in a folder of a local "
        "disk (disk:FOLDER), except during the step.",
        TRAINING,
        metavar="PLACE",
        shown="in memory",
    )
    offload_parameters: str | None = setting(
        None,
        "Keep the parameters there, too, except while they are used: host or disk:FOLDER.",
        TRAINING,
        metavar="PLACE",
        shown="in memory",
    )
    master_dtype: PrecisionName | None = setting(
        None,
        "With --offload: dtype of copies of the parameters that the optimizer updates, kept "
        "with its states; --shard-dtype is that of the parameters.",
        TRAINING,
        shown="no copies",
        on_resume=OnResume.FIXED,
    )

    @property
    def compute_dtype(self) -> PrecisionName | None:
        """The dtype of forward and backward; ``None``: as the model was built."""
        return self.param_dtype or self.shard_dtype

    @property
    def place_of_activations(self) -> str | None:
        """Where inputs of blocks are kept; ``None``: where they are computed."""
        offloads = self.activation_checkpointing is Checkpointing.OFFLOAD
        return (self.offload_activations or "host") if offloads else None

    @property
    def transport_argument(self) -> str | None:
        """The argument ``transport`` of ``fully_shard``."""
        return None if self.transport is TransportName.AUTO else self.transport

    def check_values(self) -> None:
        """Check where states and parameters are kept, and what is kept with them.

        Raises:
            OptionError: an option is impossible.
        """
        super().check_values()
        recomputes = self.activation_checkpointing is not Checkpointing.NONE
        expected = "--activation-checkpointing too"
        alone = self.recompute_every > 1 and not recomputes
        require(not alone, "--recompute-every", self.recompute_every, expected)
        offloads = self.activation_checkpointing is Checkpointing.OFFLOAD
        expected = "--activation-checkpointing offload too"
        place = self.offload_activations
        require(place is None or offloads, "--offload-activations", place, expected)
        for name, place in self._places.items():
            try:
                folder_of_place(place)
            except ValueError:
                expected = "host, or disk:FOLDER with a folder of a local disk"
                raise OptionError(name, place, expected) from None
        masters, shards = self.master_dtype, self.shard_dtype
        if masters is None:
            return
        expected = "--offload too: masters are kept where states are"
        require(self.offload is not None, "--master-dtype", masters, expected)
        require(
            masters is PrecisionName.FP32 and shards is not PrecisionName.FP32,
            "--master-dtype",
            f"{masters} with shards in {shards}",
            "fp32 with --shard-dtype bf16",
        )

    def check_folders(self) -> None:
        """Check that the folders of a local disk exist: the mount of one is easily mistyped.

        Raises:
            OptionError: one does not.
        """
        StrategyConfig.check_values(self)
        for name, place in self._places.items():
            folder = folder_of_place(place)
            expected = "a folder that exists, where the local disk is mounted"
            require(folder is None or folder.is_dir(), name, f"{place}, no folder", expected)

    @property
    def _places(self) -> dict[str, str]:
        places = {
            "--offload": self.offload,
            "--offload-parameters": self.offload_parameters,
            "--offload-activations": self.offload_activations,
        }
        return {name: place for name, place in places.items() if place is not None}


@dataclass(frozen=True, kw_only=True)
class StepConfig(Config):
    """What one step of the optimizer is.

    Attributes:
        batch_size: examples of a rank and microbatch.
        accumulate: microbatches of a step.
        stepping: when the optimizer steps.
    """

    batch_size: Count = setting(1, "Examples per rank and microbatch.", TRAINING)
    accumulate: Count = setting(1, "Microbatches per step; gradients are reduced once.", TRAINING)
    stepping: Stepping = setting(
        Stepping.AFTER_BACKWARD,
        "When the optimizer steps.",
        TRAINING,
        flags={
            "--step-in-backward": (
                Stepping.IN_BACKWARD,
                "Step with each group as soon as its gradients are reduced, which saves the "
                "memory of gradients; --clip-grad then goes by the norm of the step before.",
            ),
            "--no-step-in-backward": (Stepping.AFTER_BACKWARD, ""),
        },
    )


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(StrategyConfig):
    """How a training shards its model over the ranks that there are."""

    replicas: Count | None = setting(
        None,
        "Copies of the model, for strategies that have several.",
        SHARDING,
        shown="one per host",
    )
    #: Whether the job was started for several hosts. Hybrid strategies then go on with one host,
    #: if only one is left.
    over_hosts: bool = False
    mesh: str | None = setting(
        None, "The same as a mesh: dp=N, or dp_replicate=R,dp_shard=S.", SHARDING
    )

    def check_values(self) -> None:
        """Check what is kept where, and that the mesh is said once.

        Raises:
            OptionError: an option is impossible.
        """
        super().check_values()
        once = self.mesh is None or self.replicas is None
        require(once, "--mesh", "--replicas too", "one of the two")


def resolve_sharding(config: ShardingConfig, world_size: int, hosts: int = 1) -> ShardingPlan:
    """Return the mesh of a run and the arguments of ``fully_shard``.

    Raises:
        OptionError: strategy, mesh, world and wire contradict each other.
    """
    plan = _plan_of(config, world_size, hosts)
    has = plan.names[1:] if plan.apart else plan.names
    unknown = config.collective_wire.unknown(has)
    require(unknown is None, "--wire", f"the dimension {unknown}", f"one of {', '.join(has)}")
    asked = config.reshard_after_forward
    if asked is None:
        return plan
    with naming("--reshard-after-forward"):
        return replace(plan, reshard_after_forward=reshard_over(plan, asked, world_size // hosts))


def _plan_of(config: ShardingConfig, world_size: int, hosts: int) -> ShardingPlan:
    option, replicas, hint = "--replicas", config.replicas, ""
    if config.mesh is not None:
        option = "--mesh"
        with naming(option):
            mesh = WantedMesh.parse(config.mesh)
            if mesh.tensor_parallel > 1:
                raise MeshError(config.mesh, "dimensions of data parallelism: dp_replicate, dp")
        replicas = dict(zip(mesh.names, mesh.shape, strict=True)).get(REPLICATE, 1)
        found = f"{config.mesh}, a mesh of {counted(mesh.size, 'rank')}"
        expected = f"one of {world_size}, the number of processes"
        require(mesh.size == world_size, option, found, expected)
    elif replicas is None:
        option, hint = "--strategy", "; say --replicas R"
        replicas = hosts if config.over_hosts and config.strategy.is_hybrid else None
    with naming(option, hint):
        return resolve(config.strategy, world_size, replicas=replicas, hosts=hosts)


# -- wires in one line of text ---------------------------------------------------------------------

_SHORT = ", ".join(get_args(Encoding))


def _parse_one(text: str) -> Wire:
    """Read one wire."""
    text = text.strip()
    if text in get_args(Encoding):
        return Wire(gather=text, reduce=text)  # type: ignore[arg-type]  # checked just before
    found: dict[str, object] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        item: object
        if name in ("error-feedback", "error_feedback") and not value:
            name, item = "error_feedback", True
        elif name == "stochastic" and not value:
            name, item = "rounding", name
        elif name == "seed" and value.isdecimal() and len(value) < 20:
            item = int(value)
        elif name in ("gather", "reduce"):
            item = value
        else:
            raise WireError(
                repr(part.strip()),
                f"{_SHORT}, or gather=FORMAT, reduce=FORMAT, error-feedback, stochastic and "
                "seed=N, separated by commas",
            )
        if name in found:
            raise WireError(f"{name} twice in {text!r}", "each once")
        found[name] = item
    assert found.keys() <= {each.name for each in fields(Wire)}
    return Wire(**found)  # type: ignore[arg-type]  # __post_init__ checks the values
