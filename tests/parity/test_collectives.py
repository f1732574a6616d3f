"""How many collectives a step costs, as a formula of groups and microbatches.

Counted under the transport ``collectives``, which makes one plain collective where a group makes
one, in the way that monitors count: by standing in for the functions of ``torch.distributed``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.corpus.instruments import run
from tests.corpus.models import MODELS, make_batch, make_model
from tests.corpus.oracle import Case, make_sharded

MODEL = "llama"
GROUPS = len(MODELS[MODEL].blocks(make_model(MODEL))) + 1  # the root has parameters of its own
MICROBATCHES = 3

FUNCTIONS = {
    "all-gather": ("all_gather_single", "all_gather_into_tensor"),  # from torch 2.13, and before
    "reduce-scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all-reduce": ("all_reduce",),
}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count every call, under the names of :data:`FUNCTIONS`."""
    count: Counter[str] = Counter()

    def stand_in(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[kind] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, names in FUNCTIONS.items():
            name = next(name for name in names if hasattr(dist, name))
            patch.setattr(dist, name, stand_in(kind, getattr(dist, name)))
        yield count


def _count_steps(rank: int, world_size: int, case: Case) -> list[Counter[str]]:
    """Count the collectives of two steps."""
    model, counts = make_sharded(case, world_size), []
    with counting() as count:
        for step in range(2):
            count.clear()
            for microbatch in range(case.microbatches):
                is_last = microbatch == case.microbatches - 1
                model.set_requires_gradient_sync(case.sync_every or is_last)
                batch = make_batch(case.model, rank, step, microbatch)
                MODELS[case.model].loss(model, *batch).backward()
            counts.append(count.copy())
    return counts


#: Strategy, ranks, whether gradients are reduced in every microbatch; then, per group: all-gathers,
#: reduce-scatters, all-reduces.
STEPS = [
    # Parameters are gathered for forward and again for backward.
    ("full-shard", 2, True, 2 * MICROBATCHES, MICROBATCHES, 0),
    ("full-shard", 2, False, 2 * MICROBATCHES, 1, 0),
    # They stay from forward to backward.
    ("shard-grad-op", 2, True, MICROBATCHES, MICROBATCHES, 0),
    # ZeRO-1: and gradients stay whole until the last microbatch.
    ("shard-grad-op", 2, False, MICROBATCHES, 1, 0),
    # Parameters are never cut.
    ("no-shard", 2, True, 0, 0, MICROBATCHES),
    ("no-shard", 2, False, 0, 0, 1),
    # As above inside a host; across hosts gradients are all-reduced.
    ("hybrid", 4, True, 2 * MICROBATCHES, MICROBATCHES, MICROBATCHES),
    ("hybrid-zero2", 4, False, MICROBATCHES, 1, 1),
    # One rank has nobody to talk to.
    ("full-shard", 1, True, 0, 0, 0),
]


def _case(strategy: str, sync_every: bool) -> Case:
    door = "fully_shard, collectives"
    return Case(MODEL, strategy, door=door, microbatches=MICROBATCHES, sync_every=sync_every)


@pytest.mark.parametrize(
    ("strategy", "world_size", "sync_every", "all_gathers", "reduce_scatters", "all_reduces"), STEPS
)
def test_collectives_of_a_step(
    strategy: str,
    world_size: int,
    sync_every: bool,
    all_gathers: int,
    reduce_scatters: int,
    all_reduces: int,
) -> None:
    """The numbers are per group."""
    per_group = {
        "all-gather": all_gathers,
        "reduce-scatter": reduce_scatters,
        "all-reduce": all_reduces,
    }
    expected = Counter({kind: count * GROUPS for kind, count in per_group.items() if count})

    for counts in run("pretended", _count_steps, world_size, _case(strategy, sync_every)):
        assert counts == [expected, expected]


#: What is off until the last microbatch, ranks, whether parameters are freed between forward and
#: backward; then the all-gathers of a step, per group.
KEPT = [
    # The last backward frees what the first forward has gathered.
    ("set_requires_gradient_sync", 2, False, 1),
    ("set_requires_gradient_sync", 4, False, 1),
    ("set_requires_all_reduce", 4, False, 1),
    # Only what a backward has left is used again: by the next forward.
    ("set_requires_gradient_sync", 2, True, MICROBATCHES + 1),
    # Without replicas, gradients are complete after each microbatch, and shards may step.
    ("set_requires_all_reduce", 2, False, MICROBATCHES),
]


def _count_gathers(rank: int, world_size: int, switch: str, frees: bool) -> list[int]:
    """Count the all-gathers of two steps that do not reshard until the last microbatch."""
    case = _case("hybrid" if world_size == 4 else "full-shard", sync_every=True)
    with counting() as count:
        model = make_sharded(case, world_size)
        model.set_reshard_after_forward(frees)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        for step in range(2):
            count.clear()
            for microbatch in range(MICROBATCHES):
                is_last = microbatch == MICROBATCHES - 1
                getattr(model, switch)(is_last)
                model.set_reshard_after_backward(is_last)
                MODELS[MODEL].loss(model, *make_batch(MODEL, rank, step, microbatch)).backward()
            counts.append(count["all-gather"])
            optimizer.step()
            optimizer.zero_grad()
    return counts


@pytest.mark.parametrize(("switch", "world_size", "frees", "all_gathers"), KEPT)
def test_what_accumulation_keeps_is_not_gathered_again(
    switch: str, world_size: int, frees: bool, all_gathers: int
) -> None:
    for counts in run("pretended", _count_gathers, world_size, switch, frees):
        assert counts == [all_gathers * GROUPS] * 2
