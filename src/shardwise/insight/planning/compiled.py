"""What a compiler makes of a log, and what float8 does: logs in, logs out.

The model is a simple one. A compiler fuses what stands between two matrix products, or attention,
into one kernel: it takes as long as the largest operation of them would in the dtype of what they
leave, since what is between them stays in registers. Float8 products compute in another dtype, and
each of their two inputs is cast first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise.insight.planning.costs import is_attention
from shardwise.insight.planning.events import Change, Event, Op, StepPhase

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
