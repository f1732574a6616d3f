"""The fastest way to train a model in a given memory.

Every strategy, checkpointing, batch size and mesh is estimated from rehearsals of the model with
few of its repeated layers and small batches: bytes and seconds grow in proportion to both.
Estimates only decide the order. What is returned was rehearsed in full.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.frontends.strategies import (
    DATA,
    REPLICATE,
    SHARD,
    TENSOR,
    Checkpointing,
    Strategy,
    WantedMesh,
)
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.activations import can_offload
from shardwise.insight.planning.report import Alternative
from shardwise.insight.planning.settings import Settings

#: Batch sizes that are tried, in samples of a rank and microbatch.
BATCHES = (1, 2, 4, 8, 16, 32, 64)
TENSOR_PARALLEL = (1, 2, 4, 8)
_FEW, _MORE = 1, 3  # layers of the models that are rehearsed for estimates
_MOST_REHEARSED = 6  # in full
_FINALISTS = 2  # that fit, of which the faster is returned
_SHOWN = 4  # alternatives that fit, and as many that do not


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a rehearsal tells.

    Attributes:
        peak: bytes of the rank that holds most.
        seconds: of a step.
    """

    peak: float
    seconds: float

    def __add__(self, other: Measured) -> Measured:
        return Measured(
            peak=max(self.peak + other.peak, 0.0), seconds=max(self.seconds + other.seconds, 0.0)
        )


#: Rehearses a model with settings.
Measure = Callable[[Blueprint, Settings], Measured]
Estimate = Callable[[Settings], Measured]


class NothingFitsError(ValueError):
    """No way to train a model fits into the memory.

    Attributes:
        nearest: what needs the least.
    """

    def __init__(self, nearest: Alternative, limit: int) -> None:
        self.nearest = nearest
        super().__init__(
            f"nothing fits into {limit:,} bytes; {nearest.words} needs the least, "
            f"{nearest.peak:,} bytes: use more ranks, or shorter sequences"
        )


def fit(
    blueprint: Blueprint, settings: Settings, limit: int, measure: Measure
) -> tuple[Settings, tuple[Alternative, ...]]:
    """Find the fastest strategy, batch size, checkpointing and mesh that fit.

    Args:
        blueprint: the model.
        settings: everything else, and the number of ranks.
        limit: bytes that a rank may use.
        measure: rehearses a model with settings.

    Returns:
        The fastest settings that fit, and estimates of others, the fastest first: some that fit,
        and some that are faster and do not.

    Raises:
        NothingFitsError: nothing fits.
    """
    found = sorted(
        _estimates(blueprint, settings, limit, measure), key=lambda pair: -pair[1].tokens_per_second
    )
    estimates = dict(found)
    exact: dict[Settings, Alternative] = {}
    for turn in range(1, _MOST_REHEARSED + 1):
        left = [case for case, each in estimates.items() if each.fits and case not in exact]
        if not left:
            break
        # The fastest first. If all of them need more than was estimated, what needs the least.
        last = turn == _MOST_REHEARSED
        case = min(left, key=lambda case: estimates[case].peak) if last else left[0]
        exact[case] = _alternative(case, measure(blueprint, case), limit)
        if sum(each.fits for each in exact.values()) == _FINALISTS:
            break
    estimates |= exact
    fitting = [case for case, each in exact.items() if each.fits]
    if not fitting:
        too_large = [each for each in estimates.values() if not each.fits]
        raise NothingFitsError(min(too_large, key=lambda each: each.peak), limit)
    best = max(fitting, key=lambda case: exact[case].tokens_per_second)
    rate = estimates.pop(best).tokens_per_second
    # An estimate that is faster than what was rehearsed was too high, and is left out.
    others = [e for e in estimates.values() if not (e.fits and e.tokens_per_second > rate)]
    others.sort(key=lambda each: -each.tokens_per_second)
    return best, _neighbors(others)


def _neighbors(others: Sequence[Alternative]) -> tuple[Alternative, ...]:
    fitting = [each for each in others if each.fits][:_SHOWN]
    slowest = fitting[-1].tokens_per_second if fitting else 0.0
    faster = [each for each in others if not each.fits and each.tokens_per_second > slowest]
    closest = sorted(faster, key=lambda each: each.peak)[:_SHOWN]
    return tuple(sorted((*fitting, *closest), key=lambda each: -each.tokens_per_second))


def _alternative(settings: Settings, measured: Measured, limit: int) -> Alternative:
    units = settings.samples * (settings.seq_length or 1)
    return Alternative(
        mesh=str(settings.mesh),
        strategy=settings.strategy.value,
        activation_checkpointing=settings.activation_checkpointing.value,
        batch_size=settings.batch_size,
        peak=round(measured.peak),
        tokens_per_second=units / measured.seconds if measured.seconds else 0.0,
        fits=measured.peak <= limit,
    )


def _estimates(
    blueprint: Blueprint, settings: Settings, limit: int, measure: Measure
) -> Iterator[tuple[Settings, Alternative]]:
    """Estimate all batch sizes of all strategies, checkpointings and meshes that may be best.

    Batch size and checkpointing are estimated for one strategy. What another strategy changes is
    estimated for the smallest batch, and added.
    """
    estimate = _estimator(blueprint, measure)
    best = 0.0
    for tensor_parallel in TENSOR_PARALLEL:
        meshes = list(_meshes(blueprint, settings, tensor_parallel))
        if not meshes:
            continue
        first = replace(settings, strategy=meshes[0][0], mesh=meshes[0][1])
        modes = _modes(first)
        lines = {each: _line(estimate, _recomputing(first, each)) for each in modes}
        own = 0.0
        for strategy, mesh in meshes:
            case = replace(settings, strategy=strategy, mesh=mesh)
            change = _difference(estimate, case, first)
            for checkpointing, batch_size in itertools.product(modes, BATCHES):
                at = replace(_recomputing(case, checkpointing), batch_size=batch_size)
                measured = lines[checkpointing](batch_size) + change
                alternative = _alternative(at, measured, limit)
                yield at, alternative
                if alternative.fits:
                    own = max(own, alternative.tokens_per_second)
        if own and own < best:
            return  # cutting matrices into smaller ones pays no more
        best = max(best, own)


def _recomputing(settings: Settings, mode: Checkpointing) -> Settings:
    """Return settings with another checkpointing, in as many blocks as before if in any."""
    every = 1 if mode is Checkpointing.NONE else settings.recompute_every
    place = settings.offload_activations if mode is Checkpointing.OFFLOAD else None
    return replace(
        settings, activation_checkpointing=mode, recompute_every=every, offload_activations=place
    )


def _modes(settings: Settings) -> list[Checkpointing]:
    """Return how activations can be recomputed: with inputs elsewhere only if there is a place."""
    offloads = can_offload(replace(settings, activation_checkpointing=Checkpointing.OFFLOAD))
    return [each for each in Checkpointing if offloads or each is not Checkpointing.OFFLOAD]


def _meshes(
    blueprint: Blueprint, settings: Settings, tensor_parallel: int
) -> Iterator[tuple[Strategy, WantedMesh]]:
    """Return all strategies with a mesh of all ranks."""
    ranks, on_host = settings.mesh.size, settings.on_host
    if ranks % tensor_parallel or tensor_parallel > on_host:
        return
    if tensor_parallel > 1 and (
        not blueprint.tensor_parallel
        or any(count % tensor_parallel for count in blueprint.heads.values())
    ):
        return
    data = ranks // tensor_parallel
    inner = {TENSOR: tensor_parallel} if tensor_parallel > 1 else {}
    hosts = ranks // on_host if ranks % on_host == 0 else 1
    for strategy in (
        Strategy.FULL_SHARD,
        Strategy.SHARD_GRAD_OP,
        Strategy.NO_SHARD,
        Strategy.HYBRID_SHARD,
        Strategy.HYBRID_SHARD_ZERO2,
    ):
        sizes: dict[str, int] = {DATA: data}
        if strategy.is_hybrid:
            if hosts == 1 or data % hosts or data == hosts:
                continue
            sizes = {REPLICATE: hosts, SHARD: data // hosts}
        elif data == 1 and strategy is not Strategy.FULL_SHARD:
            continue
        sizes |= inner
        yield strategy, WantedMesh(tuple(sizes), tuple(sizes.values()))


def nearest(settings: Settings, fits: Callable[[Settings], bool]) -> Settings | None:
    """Return the settings with the smallest change that lets them fit.

    Checkpointing is tried first, then full sharding, then smaller microbatches, and more of them.

    Args:
        settings: what does not fit.
        fits: whether others do.

    Returns:
        ``None`` if none of the changes is enough.
    """
    less = (Checkpointing.SELECTIVE, Checkpointing.FULL, Checkpointing.OFFLOAD)
    now = settings.activation_checkpointing
    for checkpointing in less[less.index(now) + 1 if now in less else 0 :]:
        if checkpointing in _modes(settings):
            settings = replace(settings, activation_checkpointing=checkpointing)
            if fits(settings):
                return settings
    sharded = Strategy.HYBRID_SHARD if settings.strategy.is_hybrid else Strategy.FULL_SHARD
    if settings.strategy not in (sharded, Strategy.DILOCO):
        mesh = settings.mesh
        if sharded is Strategy.FULL_SHARD:
            mesh = WantedMesh((SHARD,), (mesh.size,))
        settings = replace(settings, strategy=sharded, mesh=mesh)
        if fits(settings):
            return settings
    while settings.batch_size > 1 and settings.batch_size % 2 == 0:
        half, twice = settings.batch_size // 2, settings.accumulate * 2
        settings = replace(settings, batch_size=half, accumulate=twice)
        if fits(settings):
            return settings
    return None


def _estimator(blueprint: Blueprint, measure: Measure) -> Estimate:
    """Return what estimates a full model, from rehearsals of it with few layers."""
    few, more = shortened(blueprint, _FEW), shortened(blueprint, _MORE)

    @functools.cache
    def estimate(settings: Settings) -> Measured:
        if few is None or more is None:
            return measure(blueprint, settings)
        one, two = (measure(each, settings) for each in (few, more))
        return _extrapolated(one, two, _FEW, _MORE, len(blueprint.blocks))

    return estimate


def _line(estimate: Estimate, settings: Settings) -> Callable[[int], Measured]:
    """Return estimates by batch size, from those of small ones."""
    one, two = (estimate(replace(settings, batch_size=size)) for size in (1, 2))
    return lambda batch_size: _extrapolated(one, two, 1, 2, batch_size)


def _difference(estimate: Estimate, settings: Settings, first: Settings) -> Measured:
    """Return what settings change, with the smallest batch and without checkpointing."""
    one, other = (
        estimate(replace(_recomputing(each, Checkpointing.NONE), batch_size=1))
        for each in (settings, first)
    )
    return Measured(peak=one.peak - other.peak, seconds=one.seconds - other.seconds)


def _extrapolated(one: Measured, two: Measured, x: int, y: int, to: int) -> Measured:
    """Continue a line through two measurements; nothing shrinks."""

    def value(a: float, b: float) -> float:
        return a + max(b - a, 0.0) / (y - x) * (to - x)

    return Measured(peak=value(one.peak, two.peak), seconds=value(one.seconds, two.seconds))


def shortened(blueprint: Blueprint, layers: int) -> Blueprint | None:
    """Return a model with fewer repeated layers, on the meta device.

    Returns:
        ``None`` if the layers are not in one list, or there are too few of them.
    """
    if len(blueprint.blocks) <= layers:
        return None
    copied = blueprint.copied()
    model, blocks = copied.model, copied.blocks
    parents: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and {*blocks} <= {*module}
    ]
    if not parents:
        return None
    for index in reversed(range(len(parents[0]))):
        if parents[0][index] in blocks[layers:]:
            del parents[0][index]
    names = {name for name, _ in model.named_modules()}
    styles = {name: style for name, style in blueprint.tensor_parallel.items() if name in names}
    return replace(copied, blocks=blocks[:layers], tensor_parallel=styles)
