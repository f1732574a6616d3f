"""How long a step takes on a machine: the log of a rehearsal, replayed on a clock.

On devices that are known from data sheets, matrix products, convolutions and attention need the
time of their arithmetic, and everything else that of reading and writing its tensors. On a machine
that was calibrated, each unit of work has a cost that was read from recorded steps: an operation of
matrix products, a byte, a call.

What a compiler makes of a log, and what float8 does, follows simple rules: logs in, logs out. A
compiler fuses what stands between two matrix products, or attention, into one kernel: it takes as
long as the largest operation of them would in the dtype of what they leave, since what is between
them stays in registers. Float8 products compute in another dtype, and each of their two inputs is
cast first.

Three things run at once: the host, which issues what the log has, in its order; the device, which
computes it; and the wire of each mesh dimension, which moves one collective after the other. A wait
stalls the device until the wire is done with that collective; that time is *exposed*. Where the
host itself computes (CPUs), the first two are one. Where no thread moves bytes but the one that
waits (shared memory), the wire stands still until then.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise.base.observe import Activity
from shardwise.base.spans import Span, StepTime
from shardwise.insight.planning.events import (
    Change,
    Event,
    Log,
    Mark,
    Op,
    Start,
    StepPhase,
    Wait,
)
from shardwise.insight.planning.machine import (
    Device,
    Execution,
    Link,
    Machine,
    Progress,
    SharedBy,
    link_to_host,
)
from shardwise.insight.planning.settings import Products, Settings

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
        op = event if isinstance(event, Op) and _fuses(event) else None
        if run and not isinstance(event, Change) and (op is None or op.phase is not run[-1].phase):
            yield _kernel(run)
            run = []
        if op is None:
            yield event
        else:
            run.append(op)
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


#: The activities that marks begin, and that spans show beside collectives.
_PARTS = (Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER)


def step_time(
    log: Log,
    machine: Machine,
    settings: Settings,
) -> StepTime:
    """Return how long the step of a log takes.

    Args:
        log: of one rank.
        machine: what it would run on.
        settings: what was rehearsed. What is compiled, and the dtype of products, may be other
            than in the rehearsal.
    """
    if settings.compile:
        log = replace(log, events=tuple(fused(log.events)))
    if settings.products is Products.FLOAT8:
        log = replace(log, events=tuple(in_float8(log.events)))
    return _Replay(log, machine, settings).run()


def sent(start: Start) -> int:
    """Return the bytes that one rank sends in a collective.

    Each rank sends its part to all others, or the parts of all others: ``(n - 1) / n`` of the full
    tensors. An all-reduce is a reduce-scatter and an all-gather. An all-to-all says what it sends.
    """
    if start.activity in (Activity.ALL_TO_ALL, Activity.COPY):
        return start.nbytes
    once = start.nbytes * (start.ranks - 1) // max(start.ranks, 1)
    return 2 * once if start.activity is Activity.ALL_REDUCE else once


class _DeviceWork(enum.Enum):
    """What the device does, or waits for."""

    PRODUCTS = "matrix products"
    MEMORY = "memory bandwidth"
    OPTIMIZER = "optimizer"
    HOST = "host"


class _Replay:
    """A clock for the host, one for the device and one for each wire."""

    def __init__(self, log: Log, machine: Machine, settings: Settings) -> None:
        self._log = log
        self._machine = machine
        self._device: Device = machine.device
        self._settings = settings
        world = settings.world  # how many ranks apart the neighbors in each dimension are:
        self._apart = {n: math.prod(world.shape[at + 1 :]) for at, n in enumerate(world.names)}
        self._now = 0.0  # the device
        self._host = 0.0
        self._wires: dict[str, float] = defaultdict(float)
        self._starts: dict[int, Start] = {}
        self._ends: dict[int, float] = {}
        self._spent: dict[_DeviceWork, float] = defaultdict(float)
        self._exposed: dict[str, float] = defaultdict(float)
        self._spans: list[Span] = []
        self._open: tuple[Activity, str, float] | None = None

    def run(self) -> StepTime:
        for event in self._log.events:
            match event:
                case Op():
                    self._compute(event)
                case Start():
                    self._start(event)
                case Wait():
                    self._wait(event.number)
                case Mark() if event.activity in _PARTS:
                    self._close(self._now)
                    self._open = event.activity, event.group, self._now
        for number in [number for number, start in self._starts.items() if start.ranks > 1]:
            self._wait(number)  # reading the results waits
        seconds = max(self._now, self._host)
        self._idle(seconds)
        self._close(seconds)
        return self._summary(seconds)

    def _compute(self, op: Op) -> None:
        seconds = op_seconds(op, self._device)
        self._issue(host_seconds(op, self._device))
        self._now += seconds
        if self._device.execution is Execution.DIRECT:
            self._host = self._now
        if op.phase is StepPhase.OPTIMIZER:
            part = _DeviceWork.OPTIMIZER
        else:
            part = _DeviceWork.PRODUCTS if op.flops else _DeviceWork.MEMORY
        self._spent[part] += seconds

    def _issue(self, seconds: float) -> None:
        """Let the host issue something, and the device wait for it if it has nothing to do."""
        self._host += seconds
        self._idle(self._host)

    def _idle(self, until: float) -> None:
        if until > self._now:
            self._spent[_DeviceWork.HOST] += until - self._now
            self._now = until

    def _start(self, start: Start) -> None:
        self._starts[start.number] = start
        if start.ranks == 1:
            return
        link = self._link(start)
        self._issue(link.launch)
        if link.progress is Progress.ASYNCHRONOUS:
            # Shards are there from the last step on; gradients must have been computed.
            ready = self._host if start.activity is Activity.ALL_GATHER else self._now
            begin = max(ready, self._wires[start.dimension])
            self._run_on_wire(start, begin)

    def _run_on_wire(self, start: Start, begin: float) -> None:
        end = begin + self._seconds(start)
        self._wires[start.dimension] = self._ends[start.number] = end
        self._spans.append(Span(start.activity, start.group, begin, end, start.dimension))

    def _wait(self, number: int) -> None:
        start = self._starts.pop(number, None)
        if start is None or start.ranks == 1:
            return
        if number not in self._ends:
            self._run_on_wire(start, max(self._now, self._wires[start.dimension]))
        end = self._ends.pop(number)
        # Somebody has moved the bytes, on the processor of this rank.
        self._issue(self._link(start).host_cost * sent(start))
        if end > self._now:
            self._exposed[start.dimension] += end - self._now
            self._spans.append(Span(Activity.WAIT, start.group, self._now, end, start.dimension))
            self._now = end
        if self._device.execution is Execution.DIRECT:
            self._host = self._now

    def _close(self, end: float) -> None:
        if self._open is not None:
            activity, name, begin = self._open
            self._spans.append(Span(activity, name, begin, end))
            self._open = None

    # -- wires ------------------------------------------------------------------------------------

    def _link(self, start: Start) -> Link:
        if start.activity is Activity.COPY:
            return link_to_host(self._device)
        if self._hosts(start) > 1:
            return self._machine.between
        return self._machine.links.get(start.transport, self._machine.inside)

    def _hosts(self, start: Start) -> int:
        """Return how many hosts a collective spans."""
        apart = start.apart or self._apart.get(start.dimension, 1)
        here = min(start.ranks, max(1, self._machine.ranks_per_host // apart))
        return math.ceil(start.ranks / here)

    def _seconds(self, start: Start) -> float:
        """Return how long a wire needs: a ring through all ranks, hosts one after another."""
        if start.activity is Activity.COPY:
            return sent(start) / self._link(start).bandwidth
        machine, hosts = self._machine, self._hosts(start)
        link = machine.links.get(start.transport, machine.inside)
        bandwidth, inside = link.bandwidth, start.ranks
        latency = link.latency * (start.ranks - hosts)
        if hosts > 1:
            inside = math.ceil(start.ranks / hosts)
            # All rings through a host share its links, and each rank of this one has a part.
            every = machine.between.bandwidth
            if machine.between.shared_by is SharedBy.RANK:
                every *= machine.ranks_per_host
            between = every * min(1.0, inside / machine.ranks_per_host)
            bandwidth = between if inside == 1 else min(bandwidth, between)
            latency += machine.between.latency * hosts
        rounds = 2 if start.activity is Activity.ALL_REDUCE else 1
        return sent(start) / bandwidth + latency * rounds * max(1, start.launches)

    # -- summary ----------------------------------------------------------------------------------

    def _summary(self, seconds: float) -> StepTime:
        spent, log = self._spent, self._log
        shares = {part.value: spent[part] for part in _DeviceWork}
        shares |= {f"communication over {name}": each for name, each in self._exposed.items()}
        replicas = self._settings.mesh.size // self._settings.mesh.tensor_parallel
        peak = self._device.peak(_dtype_of_products(log))
        return StepTime(
            seconds=seconds,
            compute=spent[_DeviceWork.PRODUCTS] + spent[_DeviceWork.MEMORY],
            exposed=sum(self._exposed.values()),
            optimizer=spent[_DeviceWork.OPTIMIZER],
            host=spent[_DeviceWork.HOST],
            tokens_per_second=log.tokens * replicas / seconds if seconds else 0.0,
            mfu=log.flops / seconds / peak if seconds else 0.0,
            bound_by=max(shares, key=lambda name: shares[name]),
            spans=tuple(sorted(self._spans, key=lambda span: (span.begin, span.end))),
        )


def _dtype_of_products(log: Log) -> str:
    """Return the dtype in which most operations of matrix products are done."""
    flops: Counter[str] = Counter()
    for event in log.events:
        if isinstance(event, Op):
            flops[event.dtype] += event.flops
    return max(flops, key=lambda name: flops[name]) if flops else "float32"
