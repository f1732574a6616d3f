"""How long one operation takes on a device.

On devices that are known from data sheets, matrix products, convolutions and attention need the
time of their arithmetic, and everything else that of reading and writing its tensors. On a machine
that was calibrated, each unit of work has a cost that was read from recorded steps: an operation of
matrix products, a byte, a call.

What a compiler makes of a log, and what float8 does, follows simple rules: logs in, logs out. A
compiler fuses what stands between two matrix products, or attention, into one kernel: it takes as
long as the largest operation of them would in the dtype of what they leave, since what is between
them stays in registers. Float8 products compute in another dtype, and each of their two inputs is
cast first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise.insight.planning.events import Change, Event, Op, StepPhase
from shardwise.insight.planning.machine import Device, Execution

#: Seconds that the smallest kernel of an accelerator takes.
KERNEL = 2e-6

#: Operations that read rows of a table, and little else of it.
_LOOKUPS = frozenset({"embedding", "index", "gather", "index_select"})

#: The units of calls: of the phases of a step, and of the sharding runtime.
CALLS = ("call.forward", "call.backward", "call.optimizer", "call.runtime")
#: The units of work inside of calls.
WORK = (
    *("product.float32", "product.bfloat16", "attention.float32", "attention.bfloat16"),
    *("bytes.float32", "bytes.bfloat16", "bytes.lookup", "bytes.optimizer", "bytes.runtime"),
)


def is_attention(op: Op) -> bool:
    """Whether an operation is fused attention."""
    return "_dot_product_" in op.name or "flash_attention" in op.name


def calls_of(op: Op) -> tuple[str, int]:
    """Return the unit of an operation's call, and how many: optimizers work tensor by tensor."""
    if op.phase is StepPhase.OPTIMIZER:
        return "call.optimizer", max(1, len(op.shapes))
    if op.runtime:
        return "call.runtime", 1
    return ("call.backward" if op.phase is StepPhase.BACKWARD else "call.forward"), 1


def amount_of(op: Op) -> tuple[str, float]:
    """Return the unit of what an operation does, and how much of it."""
    dtype = "bfloat16" if op.dtype in ("bfloat16", "float16") else "float32"
    if op.phase is StepPhase.OPTIMIZER:
        return "bytes.optimizer", op.nbytes
    if is_attention(op):
        return f"attention.{dtype}", op.flops
    if op.flops:
        return f"product.{dtype}", op.flops
    if op.name.partition(".")[2].partition(".")[0] in _LOOKUPS and op.shapes:
        return "bytes.lookup", 2 * 4 * math.prod(op.shapes[-1])
    return ("bytes.runtime" if op.runtime else f"bytes.{dtype}"), op.nbytes


def op_seconds(op: Op, device: Device) -> float:
    """Return the seconds that a device takes; 0 for operations that touch no memory."""
    if device.costs:
        unit, amount = amount_of(op)
        seconds = device.costs[unit] * amount
        queued = device.execution is Execution.QUEUED
        return seconds + (_call_seconds(op, device) if queued else 0.0)
    if not op.nbytes and not op.flops:
        return 0.0
    moved = op.nbytes / (device.memory_bandwidth * device.memory_efficiency)
    if not op.flops:
        return KERNEL + moved
    share = device.attention_efficiency if is_attention(op) else device.matmul_efficiency
    return KERNEL + max(moved, op.flops / (device.peak(op.dtype) * share))


def host_seconds(op: Op, device: Device) -> float:
    """Return the seconds that the host takes beside an operation."""
    if device.costs and device.execution is Execution.DIRECT:
        return _call_seconds(op, device)
    return device.op_overhead


def _call_seconds(op: Op, device: Device) -> float:
    unit, count = calls_of(op)
    return device.costs[unit] * count


# -- compilers and float8 --------------------------------------------------------------------------

_FLOAT8 = "float8_e4m3fn"
_ITEMSIZES = {"float32": 4, "float64": 8, "int64": 8, "bfloat16": 2, "float16": 2}


def fused(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events of a step whose blocks are compiled."""
    run: list[Op] = []
    for event in events:
        if isinstance(event, Op) and _fuses(event):
            if run and run[-1].phase is not event.phase:
                yield _kernel(run)
                run = []
            run.append(event)
            continue
        if run and not isinstance(event, Change):
            yield _kernel(run)
            run = []
        yield event
    if run:
        yield _kernel(run)


def _fuses(op: Op) -> bool:
    is_computed = not op.flops and not is_attention(op) and not op.runtime
    return is_computed and op.phase is not StepPhase.OPTIMIZER and _in_block(op)


def _in_block(op: Op) -> bool:
    """Whether an operation is in a repeated block, such as ``model.layers.3.mlp``."""
    return any(part.isdigit() for part in op.module.split("."))


def _kernel(run: list[Op]) -> Op:
    last = run[-1]
    moved = max(sum(math.prod(shape) for shape in op.shapes) for op in run)
    nbytes = moved * _ITEMSIZES.get(last.dtype, 4)
    return replace(last, name="fused", nbytes=min(nbytes, sum(op.nbytes for op in run)))


def in_float8(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events of a step whose blocks multiply in float8, scaled by tensor.

    What makes an input finds its largest value, too. A cast reads the input and writes a byte for
    each element, which the product reads.
    """
    for event in events:
        if isinstance(event, Op) and event.flops and _in_block(event) and not is_attention(event):
            elements = [math.prod(shape) for shape in event.shapes]
            inputs = sum(elements[:2])
            itemsize = _ITEMSIZES.get(event.dtype, 4)
            cast = replace(event, name="cast", flops=0, nbytes=inputs * (itemsize + 1))
            yield cast
            nbytes = inputs + sum(elements[2:]) * itemsize
            yield replace(event, dtype=_FLOAT8, nbytes=nbytes)
        else:
            yield event
