"""What a plan is made for: mesh, strategy, batch, dtypes, optimizer. All plain values.

No torch here: the command line checks its options with it.
"""

from __future__ import annotations

import enum
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import NotPossibleError
from shardwise.base.places import OffloadPlace
from shardwise.frontends.strategies import (
    DATA,
    REPLICATE,
    SHARD,
    TENSOR,
    MeshError,
    ShardingPlan,
    Strategy,
    WantedMesh,
    resolve,
)
from shardwise.transport.wire import PLAIN, WireFormat, Wires

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_RANKS = 100_000  # of a mesh to plan for
#: More ranks on CPUs are rehearsed with plain collectives, unless a transport is named: messages
#: and shared memory take time for each peer, in a rehearsal too.
MOST_PEERS = 16
ONE_HOST = 8  # ranks on a host, unless it is given
MOST_ACCUMULATED = 1000  # microbatches; each of them is rehearsed
MOST_SIZE = 10**9  # of anything else that is counted

#: The dtypes that can be named -> their names in torch.
DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

#: The optimizers that can be named.
OPTIMIZERS = (
    *("adamw", "adamw8bit", "adam", "muon", "lion", "adafactor"),
    *("sgd", "sgd-momentum", "adagrad", "none"),
)

#: The transports that can be named. Any other name is that of a backend of ``torch.distributed``.
TRANSPORTS = ("auto", "shm", "c10d", "collectives")


class SettingsError(NotPossibleError):
    """A setting that cannot be planned for."""


class UntraceableError(ValueError):
    """A module that computes with values in a way that a plan cannot stand in for.

    Attributes:
        module: its name.
        why: the operation.
    """

    def __init__(self, module: str, why: str) -> None:
        super().__init__(
            f"module {module or 'of the model itself'!r}: found {why}, whose result depends on "
            "values, and a plan has none; expected operations whose shapes follow from those of "
            "the batch. Leave the module out of the model to plan for, or replace it by one of "
            "the same size without that operation"
        )
        self.module = module
        self.why = why


class RehearsalError(ValueError):
    """Code of the user, or a model, that raises in a rehearsal.

    Attributes:
        where: what was being done, such as ``"forward of module layers.0"``.
    """

    def __init__(self, where: str, error: Exception) -> None:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        super().__init__(
            f"{where}: found {reason}; expected a step that runs on tensors without values. If the "
            "model needs other inputs, give `batch` and `step`"
        )
        self.where = where


class Checkpointing(enum.Enum):
    """Which activations of a block are recomputed in backward."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"  # all but the results of matrix products, convolutions and attention


class Stepping(enum.Enum):
    """When the optimizer steps."""

    AFTER_BACKWARD = "after-backward"
    IN_BACKWARD = "in-backward"  # each group, as soon as its gradients are reduced


class Compiled(enum.Enum):
    """What ``torch.compile`` compiles."""

    NOTHING = "nothing"
    BLOCKS = "blocks"  # each block by itself, as trainings do


class Products(enum.Enum):
    """The dtype that matrix products compute in."""

    AS_STORED = "as-stored"  # that of the parameters in forward
    FLOAT8 = "float8"


@dataclass(frozen=True)
class PlannedExchange:
    """What the replicas of DiLoCo exchange.

    Attributes:
        wire: the format.
        every: steps between two exchanges.
    """

    wire: WireFormat
    every: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a plan is made for.

    Attributes:
        mesh: the ranks, as the user names them: ``dp=8,tp=2``. See :attr:`world`.
        strategy: what is sharded.
        batch_size: samples (sequences, images) of a rank and microbatch.
        accumulate: microbatches of an optimizer step.
        seq_length: tokens of a sequence; ``None`` for models without sequences.
        image_size: height and width of an image; ``None``: as the model's configuration says.
        param_dtype: dtype of forward and backward; ``None``: that of the shards.
        reduce_dtype: dtype that gradients are reduced in; ``None``: that of forward and backward.
        shard_dtype: dtype of shards, their gradients and optimizer states; ``None``: as the model
            was built.
        optimizer: one of :data:`OPTIMIZERS`, or a function from parameters to an optimizer.
        clip_grad: the largest norm of the gradients; 0: no clipping.
        stepping: when the optimizer steps.
        offload: where optimizer states are kept: ``"host"`` or ``"disk:FOLDER"``; ``None``: in
            memory.
        offload_parameters: where parameters are kept, in the same words.
        master_dtype: dtype of copies of the parameters that are kept with them; ``None``: no
            copies.
        checkpointing: which activations are recomputed.
        reshard_after_forward: as for ``fully_shard``, in place of what the strategy says.
        transport: one of :data:`TRANSPORTS`.
        wire: the formats between hosts.
        backend: the process group's backend by its name in torch; ``None``: that of the device.
        device_type: type of the device as torch names it.
        ranks_per_host: ranks that share a host; ``None``: all of them, at most 8.
        compiled: what ``torch.compile`` compiles.
        products: dtype of matrix products.
        outer_states: fp32 copies of the trained shards that DiLoCo keeps.
        exchange: what DiLoCo's replicas exchange between steps.
        batch: makes a microbatch of n samples on the current default device; ``None``: made
            for models of transformers from ``batch_size`` and ``seq_length`` or ``image_size``.
        step: computes the loss of a model on a batch; ``None``: the ``loss`` of a transformers
            model, else the mean of what the model returns.
    """

    mesh: WantedMesh
    strategy: Strategy = Strategy.FULL_SHARD
    batch_size: int = 1
    accumulate: int = 1
    seq_length: int | None = None
    image_size: int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = "fp32"
    shard_dtype: str | None = None
    optimizer: str | Callable[[list[torch.Tensor]], torch.optim.Optimizer] = "adamw"
    clip_grad: float = 1.0
    stepping: Stepping = Stepping.AFTER_BACKWARD
    offload: str | None = None
    offload_parameters: str | None = None
    master_dtype: str | None = None
    checkpointing: Checkpointing = Checkpointing.NONE
    reshard_after_forward: bool | int | None = None
    transport: str = "auto"
    wire: Wires = PLAIN
    backend: str | None = None
    device_type: str = "cpu"
    ranks_per_host: int | None = None
    compiled: Compiled = Compiled.NOTHING
    products: Products = Products.AS_STORED
    outer_states: int = 0
    exchange: PlannedExchange | None = None
    batch: Callable[[int], Any] | None = None
    step: Callable[[nn.Module, Any], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingsError: a value is impossible.
            MeshError: the mesh does not fit the strategy.
        """
        for name in ("batch_size", "accumulate", "seq_length", "image_size", "ranks_per_host"):
            found = getattr(self, name)
            if found is not None and not (type(found) is int and found >= 1):
                raise SettingsError(name, found, "1 or more")
            most = MOST_ACCUMULATED if name == "accumulate" else MOST_SIZE
            if found is not None and found > most:
                raise SettingsError(name, f"{found:,}", f"at most {most:,}")
        for name in ("param_dtype", "reduce_dtype", "shard_dtype", "master_dtype"):
            found = getattr(self, name)
            if found is not None and found not in DTYPES:
                raise SettingsError(name, found, f"one of {', '.join(DTYPES)}")
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            expected = f"one of {', '.join(OPTIMIZERS)}, or a function in code"
            raise SettingsError("optimizer", self.optimizer, expected)
        for name in ("offload", "offload_parameters"):
            found = getattr(self, name)
            try:
                if found is not None:
                    OffloadPlace.parse(found)
            except ValueError:
                raise SettingsError(name, found, "host, or disk:FOLDER") from None
        if self.master_dtype is not None and self.offload is None:
            raise SettingsError("master_dtype", self.master_dtype, "none without offload")
        if self.transport not in TRANSPORTS:
            raise SettingsError("transport", self.transport, f"one of {', '.join(TRANSPORTS)}")
        names = self.sharding.names[1:] if self.sharding.apart else self.sharding.names
        unknown = self.wire.unknown(names)
        if unknown is not None:
            raise SettingsError("wire", f"the dimension {unknown}", f"one of {', '.join(names)}")
        number = isinstance(self.clip_grad, int | float)
        if not (number and 0 <= self.clip_grad < math.inf):
            raise SettingsError("clip_grad", self.clip_grad, "0 or more")
        _ = self.sharding

    @property
    def compute_dtype(self) -> str | None:
        """The dtype of forward and backward; ``None``: as the model was built."""
        return self.param_dtype or self.shard_dtype

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
            return ShardingPlan(plan.shape, (DATA,), plan.reshard_after_forward)
        return plan

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
        return {
            "mesh": dict(zip(self.mesh.names, self.mesh.shape, strict=True)),
            "strategy": self.strategy.value,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "seq_length": self.seq_length,
            "image_size": self.image_size,
            "param_dtype": self.param_dtype,
            "reduce_dtype": self.reduce_dtype,
            "shard_dtype": self.shard_dtype,
            "optimizer": name_of(self.optimizer),
            "clip_grad": self.clip_grad,
            "stepping": self.stepping.value,
            "offload": self.offload,
            "offload_parameters": self.offload_parameters,
            "master_dtype": self.master_dtype,
            "activation_checkpointing": self.checkpointing.value,
            "reshard_after_forward": self.reshard_after_forward,
            "transport": self.transport,
            "wire": str(self.wire),
            "backend": self.backend,
            "device_type": self.device_type,
            "ranks_per_host": self.ranks_per_host,
            "compiled": self.compiled.value,
            "products": self.products.value,
        }


def name_of(optimizer: str | Callable[..., Any]) -> str:
    """Return the name of an optimizer that was given by name or as a function."""
    return optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "function")
