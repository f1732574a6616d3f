"""What happens in one step of one rank, in the order of the program.

A rehearsal writes such a log. ``memory.py`` reads which memory it needs, ``clock.py`` how long it
takes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.base.observe import Activity, Memory


class StepPhase(enum.Enum):
    """The part of a step that something belongs to."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"  # forward again, in backward
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"  # and clipping


@dataclass(frozen=True, slots=True)
class Op:
    """One operation that computes.

    Attributes:
        name: as torch calls it, such as ``"aten.mm.default"``.
        module: the innermost module, such as ``"model.layers.3.mlp"``; ``""`` outside of all.
        phase: where in the step.
        flops: floating-point operations of matrix products, convolutions and attention; else 0.
        nbytes: bytes that are read and written.
        shapes: of the tensors that are read and then of those that are written.
        dtype: of the first tensor written, such as ``"bfloat16"``.
        runtime: whether the sharding runtime calls it, and not the model or the optimizer.
    """

    name: str
    module: str
    phase: StepPhase
    flops: int
    nbytes: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    runtime: bool


@dataclass(frozen=True, slots=True)
class Change:
    """Memory is allocated or freed.

    Attributes:
        kind: what it is for.
        nbytes: positive if it is allocated, negative if it is freed.
        module: whose it is: the innermost module, or the group.
        moment: what the rank is doing, such as ``"backward of model.layers.31"``.
    """

    kind: Memory
    nbytes: int
    module: str
    moment: str


@dataclass(frozen=True, slots=True)
class Start:
    """A collective is issued.

    Attributes:
        number: which one it is; :class:`Wait` refers to it.
        activity: ``ALL_GATHER``, ``REDUCE_SCATTER`` or ``ALL_REDUCE``; ``COPY``: no collective, but
            a copy from or to the host.
        dimension: the mesh dimension, such as ``"dp_shard"``.
        ranks: how many ranks take part.
        group: the group of parameters; for tensor parallelism, the module.
        nbytes: of the full tensors, in the dtype that is sent, padding included.
        launches: how many calls of the wire it takes: messages to each peer, or collectives.
        transport: ``"shm"``, ``"gloo"``, ``"nccl"``, ``"collectives"`` or ``"local"``.
        apart: how many ranks of the world neighbors are apart; 0: as in the mesh dimension.
    """

    number: int
    activity: Activity
    dimension: str
    ranks: int
    group: str
    nbytes: int
    launches: int
    transport: str
    apart: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """The program waits for a collective."""

    number: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A group or a module begins something: what names moments, and divides a step into parts.

    Attributes:
        activity: what begins.
        group: whose.
    """

    activity: Activity
    group: str


Event = Op | Change | Start | Wait | Mark


@dataclass(frozen=True, kw_only=True)
class Log:
    """One step of one rank in its steady state: after the first, which makes optimizer states.

    Attributes:
        rank: the rank.
        before: bytes that the rank holds when the step begins, by kind.
        events: in the order of the program.
        tokens: what this rank trains on in the step; samples for models without sequences.
        flops: of the model alone, without recomputation, on this rank.
        formulas: modules that could not be traced, and why; their figures come from formulas.
        offloaded: bytes of states, parameters and, at their peak, activations that the rank keeps
            on its host or on a disk.
        exchanged: bytes that the rank sends in an exchange of DiLoCo.
    """

    rank: int
    before: Mapping[Memory, int]
    events: tuple[Event, ...]
    tokens: int
    flops: int
    formulas: Mapping[str, str] = field(default_factory=dict)
    offloaded: int = 0
    exchanged: int = 0
