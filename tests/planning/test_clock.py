"""Logs of a few events, replayed on machines whose figures are easy to multiply."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.base.observe import Activity
from shardwise.base.spans import StepTime
from shardwise.frontends.strategies import WantedMesh
from shardwise.insight.planning.clock import (
    CALLS,
    KERNEL,
    WORK,
    step_time,
)
from shardwise.insight.planning.events import Event, Log, Mark, Op, Start, StepPhase, Wait
from shardwise.insight.planning.machine import (
    Device,
    Execution,
    Link,
    Machine,
    Progress,
    SharedBy,
)
from shardwise.insight.planning.settings import Settings

SECOND = 10**12  # operations; bytes on the device are as many
WIRE = 10**9  # bytes that the wire inside a host moves in a second
DEVICE = Device(
    name="test",
    memory=2**30,
    memory_bandwidth=1e12,
    flops={"float32": 1e12},
    matmul_efficiency=1.0,
    attention_efficiency=0.5,
    memory_efficiency=1.0,
    op_overhead=0.0,
)
LINK = Link(name="test", bandwidth=WIRE, latency=0.0, launch=0.0)
BETWEEN = Link(name="slow", bandwidth=WIRE / 10, latency=0.0, launch=0.0)
MACHINE = Machine(device=DEVICE, inside=LINK, between=BETWEEN, ranks_per_host=2)


def product(seconds: float, phase: StepPhase = StepPhase.FORWARD) -> Op:
    return Op("aten.mm.default", "m", phase, int(seconds * SECOND), 8, (), "float32", False)


def copy(seconds: float, phase: StepPhase = StepPhase.FORWARD) -> Op:
    return Op("aten.mul.Tensor", "m", phase, 0, int(seconds * SECOND), (), "float32", False)


def gather(
    number: int,
    seconds: float,
    ranks: int = 2,
    dimension: str = "dp",
    activity: Activity = Activity.ALL_GATHER,
) -> Start:
    """A collective that a rank alone with its links sends for so many seconds."""
    nbytes = int(seconds * WIRE * ranks / (ranks - 1))
    return Start(number, activity, dimension, ranks, "g", nbytes, 1, "nccl")


def replayed(
    *events: Event, machine: Machine = MACHINE, flops: int = 0, mesh: str = "dp=4"
) -> StepTime:
    log = Log(rank=0, before={}, events=events, tokens=100, flops=flops)
    return step_time(log, machine, Settings(mesh=WantedMesh.parse(mesh)))


def close(seconds: float) -> object:
    return pytest.approx(seconds, abs=20 * KERNEL)


def test_operations_run_one_after_the_other() -> None:
    found = replayed(product(2), copy(1), product(0.5, StepPhase.OPTIMIZER), flops=2 * SECOND)
    assert found.seconds == close(3.5)
    assert (found.compute, found.optimizer) == (close(3), close(0.5))
    assert found.exposed == found.host == 0
    assert found.tokens_per_second == pytest.approx(4 * 100 / 3.5, rel=1e-4)
    assert found.mfu == pytest.approx(2 / 3.5, rel=1e-4)
    assert found.bound_by == "matrix products"


def test_attention_has_an_efficiency_of_its_own() -> None:
    op = replace(product(1), name="aten._scaled_dot_product_flash_attention.default")
    assert replayed(op).seconds == close(2)


def test_operations_without_bytes_take_no_time_of_the_device() -> None:
    view = replace(copy(0), name="aten.view.default")
    assert replayed(view).seconds == 0


def test_a_collective_is_hidden_by_what_computes_meanwhile() -> None:
    found = replayed(gather(1, 2), product(3), Wait(1))
    assert found.seconds == close(3)
    assert found.exposed == 0


def test_the_rest_of_a_collective_is_exposed() -> None:
    found = replayed(gather(1, 3), product(1), Wait(1), product(1))
    assert found.seconds == close(4)
    assert found.exposed == close(2)
    assert found.bound_by == "matrix products" if found.compute > 2 else "communication over dp"


def test_collectives_of_a_dimension_queue_and_those_of_two_do_not() -> None:
    one = replayed(gather(1, 1), gather(2, 1), Wait(1), Wait(2))
    events = gather(1, 1), gather(2, 1, dimension="tp"), Wait(1), Wait(2)
    two = replayed(*events, mesh="dp=2,tp=2")
    assert one.seconds == close(2)
    # Tensor parallelism is innermost: over it, dp crosses hosts, and a rank has half of their link
    # (which is as wide as those of both ranks).
    assert two.seconds == close(10)
    assert two.bound_by == "communication over dp"


def test_gradients_leave_once_they_are_computed_and_shards_at_once() -> None:
    reduce = gather(1, 1, activity=Activity.REDUCE_SCATTER)
    assert replayed(product(2), reduce, product(1), Wait(1)).seconds == close(3)
    assert replayed(product(2), gather(1, 1), Wait(1)).seconds == close(2)
    assert replayed(product(2), reduce, Wait(1)).seconds == close(3)


def test_what_nobody_waits_for_is_waited_for_at_the_end() -> None:
    found = replayed(product(1), gather(1, 3))
    assert found.seconds == close(3)
    assert found.exposed == close(2)


def test_shared_memory_moves_nothing_until_somebody_waits() -> None:
    link = replace(LINK, progress=Progress.WAITING)
    device = replace(DEVICE, execution=Execution.DIRECT)
    machine = replace(MACHINE, inside=link, device=device)
    found = replayed(gather(1, 1), product(3), Wait(1), machine=machine)
    assert found.seconds == close(4)
    assert found.exposed == close(1)


def test_a_host_that_computes_cannot_run_ahead() -> None:
    queued = replace(DEVICE, op_overhead=0.5)
    direct = replace(queued, execution=Execution.DIRECT)
    events = product(2), product(2), product(2)
    ahead = replayed(*events, machine=replace(MACHINE, device=queued))
    assert ahead.seconds == close(6.5)
    assert ahead.host == close(0.5)
    alone = replayed(*events, machine=replace(MACHINE, device=direct))
    assert alone.seconds == close(7.5)
    assert alone.host == close(1.5)


def test_what_was_measured_counts_by_unit_of_work() -> None:
    costs = dict.fromkeys((*CALLS, *WORK), 0.0)
    costs |= {"product.float32": 1e-12, "call.forward": 0.25, "call.runtime": 0.5}
    device = replace(DEVICE, execution=Execution.DIRECT, costs=costs)
    machine = replace(MACHINE, device=device)
    found = replayed(product(1.0), copy(1), replace(copy(1), runtime=True), machine=machine)
    assert found.seconds == pytest.approx(1.0 + 2 * 0.25 + 0.5)
    assert found.host == pytest.approx(1.0)
    queued = replace(device, execution=Execution.QUEUED, op_overhead=0.1)
    ahead = replayed(product(1.0), copy(1), machine=replace(MACHINE, device=queued))
    assert ahead.seconds == pytest.approx(0.1 + 1.0 + 2 * 0.25)
    assert ahead.host == pytest.approx(0.1), (
        "calls take time of the device, which the host is ahead of"
    )


def test_a_device_that_waits_for_the_host_is_bound_by_it() -> None:
    device = replace(DEVICE, op_overhead=1.0)
    found = replayed(copy(0.1), copy(0.1), machine=replace(MACHINE, device=device))
    assert found.seconds == close(2.1)
    assert found.bound_by == "host"


@pytest.mark.parametrize(
    ("ranks", "shared_by", "seconds"),
    [
        (2, SharedBy.RANK, 1.0),  # inside a host
        (4, SharedBy.RANK, 5.0),  # over two hosts, with the links of two ranks each
        (4, SharedBy.HOST, 10.0),  # with one link each
    ],
)
def test_between_hosts_a_collective_has_the_links_of_all_ranks_of_a_host(
    ranks: int, shared_by: SharedBy, seconds: float
) -> None:
    machine = replace(MACHINE, between=replace(BETWEEN, shared_by=shared_by))
    found = replayed(gather(1, 1, ranks), Wait(1), machine=machine)
    assert found.seconds == close(seconds)


def test_spans_say_what_is_predicted_when() -> None:
    found = replayed(
        gather(1, 1),
        Wait(1),
        Mark(Activity.FORWARD, "block"),
        product(2),
        Mark(Activity.BACKWARD, "block"),
        product(3),
    )
    seen = [
        (s.activity, s.name, s.dimension, round(s.begin, 3), round(s.end, 3)) for s in found.spans
    ]
    assert seen == [
        (Activity.ALL_GATHER, "g", "dp", 0, 1),
        (Activity.WAIT, "g", "dp", 0, 1),
        (Activity.FORWARD, "block", "", 1, 3),
        (Activity.BACKWARD, "block", "", 3, 6),
    ]


def test_the_parts_add_up() -> None:
    device = replace(DEVICE, op_overhead=0.3)
    found = replayed(
        gather(1, 2),
        product(1),
        Wait(1),
        copy(0.1),
        gather(2, 1, activity=Activity.REDUCE_SCATTER),
        copy(0.2, StepPhase.OPTIMIZER),
        machine=replace(MACHINE, device=device),
    )
    parts = found.compute + found.exposed + found.optimizer + found.host
    assert found.seconds == pytest.approx(parts)
    assert found.seconds > 0


def test_an_empty_log_takes_no_time() -> None:
    found = replayed()
    assert found.seconds == found.mfu == found.tokens_per_second == 0


def test_tensor_parallel_ranks_share_their_tokens() -> None:
    assert replayed(product(1), mesh="dp=2,tp=2").tokens_per_second == pytest.approx(200, rel=1e-4)
