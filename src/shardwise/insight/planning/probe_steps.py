"""Steps of small transformers to time on this machine: what operations take in company.

A probe times one operation again and again. In a step, each operation finds caches, memory and
threads as another kind has left them, and takes up to twice as long. So the steps of small
transformers are timed as well, operation by operation and as a whole:

- each measured curve is corrected by what its operations take in a step,
- what is left of the step is Python, autograd and torch's optimizers: an overhead per operation,
- what a step takes longer over ranks is what its collectives cost: each, and each byte.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.base.observe import Activity, Memory, Route, observing
from shardwise.frontends.fsdp2 import fully_shard
from shardwise.insight.planning import probes
from shardwise.insight.planning.clock import bytes_sent
from shardwise.insight.planning.costs import calls_of, family_of, op_seconds, size_of
from shardwise.insight.planning.events import Op, StepPhase
from shardwise.insight.planning.machine import Curve, Device, Link
from shardwise.optim.norms import clip_grad_norm_

Clock = Callable[[], float]
Curves = Mapping[str, Curve]

_PHASES = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER)


@dataclass(frozen=True)
class Size:
    """A small transformer and its batch.

    Attributes:
        width: of the residual stream.
        tokens: in one sequence.
        layers: how many blocks.
    """

    width: int
    tokens: int
    layers: int = 6


@dataclass(frozen=True)
class Sizes:
    """The sizes at which curves are corrected.

    Attributes:
        small: calling its operations takes longer than computing them.
        middle: the other way around.
        large: calling its operations takes next to nothing.
    """

    small: Size = Size(64, 32)
    middle: Size = Size(192, 256)
    large: Size = Size(512, 256)


class _Blocks(nn.Module):
    """A transformer like Llama."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(2048, size.width)
        self.blocks = nn.ModuleList(_Block(size.width) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, 2048, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = _normed(x, self.norms[0])
        shape = (*x.shape[:-1], -1, 64 if x.shape[-1] > 64 else 16)
        q, k, v = (each(h).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = _normed(x, self.norms[1])
        y: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y


def _normed(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    """Divide rows by their root mean square, as models of transformers do: in float32."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight * h.to(x.dtype)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Turn pairs of numbers by an angle, as rotary embeddings do."""
    half = x.shape[-1] // 2
    cos = torch.ones(x.shape[-2:], dtype=x.dtype)
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * cos


class ProbeStep:
    """Steps of a small transformer.

    Args:
        size: of it.
        dtype: of parameters and activations.
        transport: shard it over all ranks with this one; by default, each rank has its own.
    """

    def __init__(
        self, size: Size, dtype: torch.dtype = torch.float32, transport: str | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model = _Blocks(size).to(dtype)
        if transport is not None:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=mesh, transport=transport)
        self._ids = torch.randint(2048, (1, size.tokens))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def run(self, at: Callable[[StepPhase], object] = lambda _: None) -> None:
        """Take a step; ``at`` is called before each phase."""
        at(StepPhase.FORWARD)
        loss = self.model(self._ids)
        at(StepPhase.BACKWARD)
        loss.backward()
        at(StepPhase.OPTIMIZER)
        clip_grad_norm_(list(self.model.parameters()), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


class _Timed(probes.OperationRecorder):  # type: ignore[no-untyped-call]
    """Writes down operations, and how long each takes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.seconds: list[float] = []
        self._took = 0.0

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        begin = self._clock()
        out = func(*args, **kwargs)
        self._took = self._clock() - begin
        return out

    def note(self, func: Any, args: tuple[Any, ...], out: Any, kwargs: Any = None) -> bool:
        took = self._took  # of this one
        noted = super().note(func, args, out, kwargs)
        if noted:
            self.seconds.append(took)
        return noted


def corrected(
    curves: Curves, dtype: torch.dtype, sizes: Sizes, steps: int, clock: Clock
) -> dict[str, Curve]:
    """Return curves by what their operations take in steps of a dtype.

    Args:
        curves: by family and dtype, as probes have measured them.
        dtype: of the steps.
        sizes: of the transformers.
        steps: how many of each size.
        clock: what to read the time from.
    """
    device = device_of(curves)
    half = dtype is not torch.float32
    found: dict[str, dict[float, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for size in (sizes.small, sizes.middle, sizes.large):
        for op, took in _ops_in_steps(ProbeStep(size, dtype), steps, clock):
            if (op.dtype in ("bfloat16", "float16")) == half and op.nbytes:
                points = found[f"{family_of(op)}.{str(dtype).removeprefix('torch.')}"]
                points[size_of(op)].append((took, op_seconds(op, device)))
    return {name: _corrected(curve, found.get(name, {})) for name, curve in curves.items()}


def _ops_in_steps(step: ProbeStep, steps: int, clock: Clock) -> list[tuple[Op, float]]:
    """Return the operations of a step, each with its median seconds."""
    for _ in range(2):
        step.run()
    runs = []
    for _ in range(steps):
        dist.barrier()
        timed = _Timed(clock)
        with timed:
            step.run(timed.enter)
        runs.append(timed)
    columns = zip(*(each.seconds for each in runs), strict=True)
    return list(zip(runs[0].ops, map(statistics.median, columns), strict=True))


def _corrected(curve: Curve, found: Mapping[float, Sequence[tuple[float, float]]]) -> Curve:
    """Return a curve that goes through what was found in steps, by size.

    Elsewhere, it keeps its form: the correction is interpolated.
    """
    if not found:
        return curve
    sizes = sorted(found)
    ratios = [
        sum(took for took, _ in found[size]) / sum(guess for _, guess in found[size])
        for size in sizes
    ]

    def ratio(size: float) -> float:
        at = bisect.bisect_right(sizes, size)
        if at in (0, len(sizes)):
            return ratios[max(0, at - 1)]
        share = math.log(size / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
        return ratios[at - 1] * math.pow(ratios[at] / ratios[at - 1], share)

    every = sorted({*curve.sizes, *sizes})
    return Curve(tuple(every), tuple(curve(size) * ratio(size) for size in every))


def device_of(curves: Curves) -> Device:
    """Return a device that is known by its curves alone."""
    return Device(name="cpu", memory=1, memory_bandwidth=1.0, flops={"float32": 1}, curves=curves)


def ops_of(step: ProbeStep) -> list[Op]:
    """Return the operations of a step."""
    found = probes.OperationRecorder()
    with found:
        step.run(found.enter)
    return found.ops


def overheads(curves: Curves, size: Size, steps: int, clock: Clock) -> dict[str, float]:
    """Return the seconds beside each operation, by phase.

    The transformer should not be too small: where calls follow each other at once, they find Python
    and autograd in the caches, and take less. In the optimizer, overheads count for each tensor.
    """
    device = device_of(curves)
    step = ProbeStep(size)
    for _ in range(2):
        step.run()
    ops = ops_of(step)
    took: dict[StepPhase, list[float]] = {phase: [] for phase in _PHASES}
    for _ in range(steps):
        marks: list[float] = []
        step.run(lambda _, marks=marks: marks.append(clock()))  # type: ignore[misc]
        marks.append(clock())
        for phase, begin, end in zip(_PHASES, marks[:-1], marks[1:], strict=True):
            took[phase].append(end - begin)
    found = {}
    for phase in _PHASES:
        mine = [op for op in ops if op.phase is phase]
        inside = sum(op_seconds(op, device) for op in mine)
        calls = sum(calls_of(op) for op in mine)
        found[phase.value] = max(0.0, statistics.quantiles(took[phase], n=4)[0] - inside) / calls
    return found


def seconds_of(ops: Sequence[Op], device: Device, beside: Mapping[str, float]) -> float:
    """Return what operations take, with what is beside them."""
    return sum(op_seconds(op, device) + beside[op.phase.value] * calls_of(op) for op in ops)


def quick(step: ProbeStep, steps: int, clock: Clock) -> float:
    """Return the lower quartile of the seconds of steps that all ranks take at once."""
    took = []
    for _ in range(steps):
        dist.barrier()
        begin = clock()
        step.run()
        took.append(clock() - begin)
    return statistics.quantiles(took, n=4)[0]  # whatever else runs here only adds to it


def group_overhead(size: Size, steps: int, clock: Clock) -> float:
    """Return the seconds that the runtime takes beside each forward or backward of a group.

    Measured on one rank. Over several, it is in what each collective costs.
    """
    alone, sharded = ProbeStep(size), ProbeStep(size, transport="auto")
    for step in (alone, sharded):
        for _ in range(2):
            step.run()
    took = quick(sharded, steps, clock) - quick(alone, steps, clock)
    return max(0.0, took) / (2 * (size.layers + 1))


def with_costs(
    link: Link,
    transport: str,
    curves: Curves,
    beside: Mapping[str, float],
    sizes: Sizes,
    steps: tuple[int, int],
    clock: Clock,
) -> Link:
    """Return a link with the seconds of the host for each collective, and for each byte.

    Args:
        link: what is known of it.
        transport: which uses it.
        curves: what the operations take.
        beside: the overheads.
        sizes: of the transformers; the small and the large one count.
        steps: of the small one, and of the large one.
        clock: on the wall.
    """
    device = device_of(curves)
    found = []
    for size, times in zip((sizes.small, sizes.large), steps, strict=True):
        step = ProbeStep(size, transport=transport)
        for _ in range(2):
            step.run()
        counter = _Collectives()
        with observing(counter):
            ops = ops_of(step)
        rest = quick(step, times, clock) - seconds_of(ops, device, beside)
        found.append((counter.calls, counter.nbytes, rest))
    (calls, few, small), (_, many, large) = found
    # Two equations for what a call and what a byte costs. Neither can be negative.
    each_byte = min(max(0.0, (large - small) / (many - few)), max(0.0, large) / many)
    each_call = max(0.0, small - each_byte * few) / calls
    return dataclasses.replace(link, launch=each_call, host_cost=each_byte)


class _Collectives:
    """An observer that counts collectives, and the bytes that they send."""

    def __init__(self) -> None:
        self.calls = 0
        self.nbytes = 0

    def begin(self, activity: Activity, name: str, dimension: str, nbytes: int) -> int:
        return 1

    def collective(
        self, activity: Activity, name: str, wire: Route, nbytes: int, launches: int
    ) -> int:
        self.calls += 1
        self.nbytes += bytes_sent(activity, nbytes, wire.ranks)
        return 1

    def end(self, number: int) -> None:
        pass

    def memory(self, kind: Memory, name: str, nbytes: int) -> None:
        pass
