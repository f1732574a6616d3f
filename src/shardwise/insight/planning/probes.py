"""Operations to time on this machine: what each is, in which sizes, and on which tensors.

Tensors that a training reads have rarely been written just before: weights, gradients and what
forward has saved come from memory, not from a cache. So a probe has many sets of inputs, more than
a cache holds, and takes them in turns. What it returns is allocated anew each time, as in a
training.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from shardwise._torch import autograd, fake
from shardwise.insight.planning.events import Op, StepPhase
from shardwise.insight.planning.machine import Curve
from shardwise.insight.planning.work import tensors_in, traits_of, work_of

_POOL = 48 * 2**20  # bytes of inputs that take turns
_MOST_SETS = 64
_BATCHES = 5  # of calls; the median counts

#: Elements of the tensors of a probe.
_NUMELS = (2**10, 2**14, 2**17, 2**20, 2**22)
#: Width of the rows of what works by rows.
_WIDTH = 512
#: Rows of tables that are looked up in.
_ROWS = 8192

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class TimedOperation:
    """One operation in one size.

    Attributes:
        family: the operations that it stands for; see :mod:`shardwise.insight.planning.costs`.
        inputs: one set of them.
        call: the operation.
    """

    family: str
    inputs: Inputs
    call: Callable[..., object]


def probes(dtype: torch.dtype) -> Iterator[TimedOperation]:
    """Yield all probes in a dtype, families one after the other, by size."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    for side in (32, 128, 256, 512, 1024):
        yield TimedOperation("product", (rand(side, side), rand(side, side)), _product)
    for length in (32, 128, 256):
        q, k, v = (rand(2, 8, length, 64) for _ in range(3))
        yield TimedOperation("attention", (q, k, v), _attention)
        saved = (rand(2, 8, length, 64), q, k, v, *_attention(q, k, v))
        yield TimedOperation("attention_backward", saved, _attention_backward)
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    for numel in _NUMELS:
        width = min(numel, _WIDTH)
        rows = numel // width
        x, y = rand(rows, width), rand(rows, width)
        yield TimedOperation("arithmetic", (x, y), torch.mul)
        yield TimedOperation("unary", (x,), torch.neg)
        yield TimedOperation("exponential", (x,), F.silu)
        yield TimedOperation("exponential_backward", (x, y), torch.ops.aten.silu_backward.default)
        yield TimedOperation("copy", (x, y), torch.Tensor.copy_)
        yield TimedOperation("in_place", (x, y), torch.Tensor.add_)
        yield TimedOperation("cast", (x,), functools.partial(torch.Tensor.to, dtype=other))
        yield TimedOperation("strided", (x,), _contiguous_heads)
        yield TimedOperation("cat", (x, y), _joined)
        yield TimedOperation("row_sum", (x,), functools.partial(torch.mean, dim=-1, keepdim=True))
        yield TimedOperation("column_sum", (x,), functools.partial(torch.sum, dim=0))
        yield TimedOperation("softmax", (x,), functools.partial(torch.log_softmax, dim=-1))
        yield TimedOperation("softmax_backward", (x, y), _softmax_backward)
        yield TimedOperation("norm", (x,), _norm)
        moments = rand(rows, 1), rand(rows, 1)
        yield TimedOperation("norm_backward", (x, y, *moments, rand(width)), _norm_backward)
        ids = torch.randint(_ROWS, (rows,))
        yield TimedOperation("lookup", (rand(_ROWS, width), ids), torch.embedding)
        yield TimedOperation("lookup_backward", (x, ids), _lookup_backward)
        yield TimedOperation("fill", (x,), torch.zeros_like)
    for numel in (*_NUMELS, 2**23):
        states = rand(numel), rand(numel), rand(numel), rand(numel).abs(), torch.ones(())
        yield TimedOperation("adamw", states, _adamw)
        yield TimedOperation("total_norm", states[:1], _total_norm)


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Inputs:
    out: Inputs = autograd.cpu_attention(q, k, v, 0.0, True)
    return out


def _attention_backward(*saved: torch.Tensor) -> object:
    return autograd.cpu_attention_backward(*saved, 0.0, True)


def _contiguous_heads(x: torch.Tensor) -> torch.Tensor:
    """Swap heads and sequence, as attention does."""
    return x.view(x.shape[0], -1, math.gcd(x.shape[1], 64)).transpose(0, 1).contiguous()


def _joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Join halves of rows, as rotary embeddings do."""
    half = x.shape[1] // 2
    return torch.cat((x[:, half:], y[:, :half]), dim=-1)


def _softmax_backward(g: torch.Tensor, y: torch.Tensor) -> object:
    return autograd.log_softmax_backward(g, y, -1, y.dtype)


def _norm(x: torch.Tensor) -> object:
    return F.layer_norm(x, x.shape[-1:])


def _norm_backward(g: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor) -> object:
    mean, rstd, weight = rest
    return torch.ops.aten.native_layer_norm_backward(
        g, x, x.shape[-1:], mean, rstd, weight, weight, [True, True, True]
    )


def _lookup_backward(g: torch.Tensor, ids: torch.Tensor) -> object:
    return torch.ops.aten.embedding_dense_backward(g, ids, _ROWS, -1, False)


def _total_norm(x: torch.Tensor) -> object:
    return autograd.foreach_norm([x], 2.0)


def _adamw(*states: torch.Tensor) -> None:
    p, g, m, v, step = states
    autograd.fused_adamw(
        *([p], [g], [m], [v], [], [step]),
        lr=1e-9,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


# -- timing ----------------------------------------------------------------------------------------


def measure(
    dtype: torch.dtype, each: float, together: Callable[[], object], clock: Callable[[], float]
) -> Mapping[str, Curve]:
    """Time all probes in a dtype.

    Args:
        dtype: of their tensors.
        each: seconds to spend on a probe, beside making its inputs.
        together: waits until all processes that measure at once are here.
        clock: what to read the time from.

    Returns:
        Seconds by size, by family. The size of products and attention is their operations; else
        the bytes that are read and written.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    with torch.no_grad():
        for probe in probes(dtype):
            first = probe.inputs
            size, nbytes = _size(probe)
            sets = min(_MOST_SETS, max(2, int(_POOL // max(1, nbytes))))
            pool = [first, *(_copies(first) for _ in range(sets - 1))]
            together()
            found.setdefault(probe.family, []).append((size, _time(probe.call, pool, each, clock)))
    return {
        family: Curve(*(tuple(column) for column in zip(*sorted(points), strict=True)))
        for family, points in found.items()
    }


def _copies(inputs: Inputs) -> Inputs:
    return tuple(each.detach().clone() for each in inputs)


def _time(
    call: Callable[..., object],
    pool: Sequence[Inputs],
    seconds: float,
    clock: Callable[[], float],
) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    for inputs in pool[:2]:
        call(*inputs)
    once = (time.perf_counter() - began) / 2
    batches = _BATCHES if once < seconds else 3
    calls = max(1, min(1000, int(seconds / batches / max(once, 1e-7))))
    took = []
    at = 0
    for _ in range(batches):
        begin = clock()
        for _ in range(calls):
            call(*pool[at % len(pool)])
            at += 1
        took.append((clock() - begin) / calls)
    # Whatever else runs here adds to the time on the clock, and little to processor time.
    return min(took) if clock is time.perf_counter else statistics.median(took)


class OperationRecorder(fake.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down operations as a rehearsal does, and runs them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.written = 0
        self._phase = StepPhase.FORWARD

    def enter(self, phase: StepPhase) -> None:
        """Begin a part of a step."""
        self._phase = phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does with its shards counts
        out = self.call(func, args, kwargs or {})
        self.note(func, args, out, kwargs)
        return out

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation."""
        return func(*args, **kwargs)

    def note(self, func: Any, args: tuple[Any, ...], out: Any, kwargs: Any = None) -> bool:
        """Write down a call if it computes anything."""
        traits = traits_of(func)
        written = tensors_in(out)
        if not traits.computes or not (traits.writes or _makes(args, written)):
            return False
        work = work_of(func, args, kwargs or {}, out, written)
        self.ops.append(
            Op(
                name=traits.name,
                module="",
                phase=self._phase,
                flops=work.flops.done,
                nbytes=work.nbytes,
                shapes=work.shapes,
                dtype=work.dtype,
                runtime=False,
            )
        )
        self.written += sum(each.nbytes for each in written)
        return True


def _makes(args: Any, written: list[torch.Tensor]) -> bool:
    """Whether a call returns memory that it was not given."""
    given = {each.untyped_storage().data_ptr() for each in tensors_in(args)}
    return any(each.untyped_storage().data_ptr() not in given for each in written)


def _size(probe: TimedOperation) -> tuple[float, int]:
    """Return the size that a curve has on its axis, and the bytes."""
    found = OperationRecorder()
    with found:
        probe.call(*probe.inputs)
    nbytes = sum(op.nbytes for op in found.ops)
    if probe.family == "lookup":  # most of the table is not read
        return float(found.written), nbytes
    return float(sum(op.flops for op in found.ops) or nbytes), nbytes
