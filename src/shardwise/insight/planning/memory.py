"""How much memory a rank needs, and when it needs most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.base.observe import Memory
from shardwise.insight.planning.events import Change, Log

#: Bytes that a process on CPUs takes for each byte of its tensors at the peak: holes in the heap of
#: the C library, buffers of the libraries that multiply, what gloo allocates. Measured by
#: benchmarks/plan_memory.py: the median of 35 ranks of 16 trainings. The interpreter and torch
#: themselves come on top.
PROCESS_FACTOR = 1.28


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """The memory of a rank at its peak.

    Attributes:
        parameters: bytes of the shards.
        gradients: bytes of gradients, sharded ones and full ones that are not yet reduced.
        optimizer: bytes of the optimizer's states.
        full_parameters: bytes of parameters that are gathered.
        transport: bytes of buffers, staging and scratch of collectives.
        activations: bytes that forward keeps for backward.
        other: bytes of logits, loss, gradients of activations, temporary results, buffers.
        peak: the sum of all.
        peak_moment: what the rank is doing then.
        ranks: how many ranks are of this kind.
        most: the most bytes of each kind during the step, each at a moment of its own.
        by_module: bytes of activations at the peak by module.
        offloaded: bytes of states and parameters on the host or on a disk, not counted above.
    """

    parameters: int
    gradients: int
    optimizer: int
    full_parameters: int
    transport: int
    activations: int
    other: int
    peak: int
    peak_moment: str
    ranks: int
    most: Mapping[Memory, int] = field(default_factory=dict)
    by_module: Mapping[str, int] = field(default_factory=dict)
    offloaded: int = 0


def memory(log: Log) -> RankBytes:
    """Find the peak of a step."""
    now = {kind: log.before.get(kind, 0) for kind in Memory}
    modules: dict[str, int] = {}
    groups: dict[str, int] = {}
    most, total = dict(now), sum(now.values())
    peak, moment = total, "between steps"
    at_peak, by_module, full = dict(now), dict(modules), 0
    risen = False  # since the last peak was noted
    for event in log.events:
        if not isinstance(event, Change):
            continue
        if event.nbytes < 0 and risen:
            at_peak, by_module = dict(now), {k: v for k, v in modules.items() if v}
            full = sum(1 for nbytes in groups.values() if nbytes)
            risen = False
        now[event.kind] += event.nbytes
        total += event.nbytes
        if event.kind is Memory.ACTIVATIONS:
            modules[event.module] = modules.get(event.module, 0) + event.nbytes
        elif event.kind is Memory.FULL_PARAMETERS:
            groups[event.module] = groups.get(event.module, 0) + event.nbytes
        most[event.kind] = max(most[event.kind], now[event.kind])
        if total > peak:
            peak, moment, risen = total, event.moment, True
    if risen:
        at_peak, by_module = dict(now), {k: v for k, v in modules.items() if v}
        full = sum(1 for nbytes in groups.values() if nbytes)
    unsharded = f", {full} {'group' if full == 1 else 'groups'} full" if full else ""
    return RankBytes(
        **{kind.value: at_peak[kind] for kind in Memory},
        peak=peak,
        ranks=1,
        peak_moment=f"{moment}{unsharded}",
        most=most,
        by_module=by_module,
        offloaded=log.offloaded,
    )
