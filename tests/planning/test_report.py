"""A plan as a value: what it sends, whether it fits, and its JSON form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.base.observe import Activity, Memory
from shardwise.base.spans import StepTime
from shardwise.frontends.strategies import Strategy, WantedMesh
from shardwise.insight.planning.events import Log, Start, Wait
from shardwise.insight.planning.memory import RankBytes
from shardwise.insight.planning.report import Available, Plan, Traffic
from shardwise.insight.planning.settings import Settings
from shardwise.insight.planning.text import head

MiB = 2**20
RANK = RankBytes(
    parameters=100 * MiB,
    gradients=50 * MiB,
    optimizer=200 * MiB,
    full_parameters=30 * MiB,
    transport=10 * MiB,
    activations=80 * MiB,
    other=30 * MiB,
    peak=500 * MiB,
    peak_moment="backward of layers.3, 2 groups full",
    ranks=8,
    most={Memory.ACTIVATIONS: 90 * MiB},
    by_module={"layers.0": 40 * MiB, "layers.1": 40 * MiB},
)
STEP = StepTime(
    seconds=0.5,
    compute=0.3,
    exposed=0.1,
    optimizer=0.06,
    host=0.04,
    tokens_per_second=2000.0,
    mfu=0.41,
    bound_by="compute",
)


def make_plan(**values: Any) -> Plan:
    given: dict[str, Any] = {
        "model": "small",
        "numel": 1000,
        "settings": Settings(mesh=WantedMesh.parse("dp=8")),
        "ranks": (RANK,),
        **values,
    }
    return Plan(**given)


def _start(number: int, activity: Activity, nbytes: int, dimension: str = "dp") -> Start:
    return Start(
        number=number,
        activity=activity,
        dimension=dimension,
        ranks=4,
        group="layers.0",
        nbytes=nbytes,
        launches=2,
        transport="shm",
    )


LOG = Log(
    rank=0,
    before={},
    events=(
        _start(1, Activity.ALL_GATHER, 4000),
        Wait(1),
        _start(2, Activity.ALL_GATHER, 400),
        _start(3, Activity.REDUCE_SCATTER, 4000),
        _start(4, Activity.ALL_REDUCE, 1000, "dp_replicate"),
    ),
    tokens=1,
    flops=1,
)


def test_traffic_is_summed_by_dimension_and_collective() -> None:
    gathers, scatters, reductions = Traffic.of(LOG)
    assert (gathers.dimension, gathers.collective) == ("dp", "all-gather")
    assert (gathers.calls, gathers.launches, gathers.nbytes) == (2, 4, 4400)
    assert gathers.sent == 3300  # three quarters: one quarter is its own
    assert scatters.sent == 3000
    assert reductions.sent == 2 * 750  # there and back
    assert make_plan(traffic=Traffic.of(LOG)).bytes_sent == {"dp": 6300, "dp_replicate": 1500}


@pytest.mark.parametrize(
    ("available", "fits"),
    [(None, None), (500 * MiB, True), (500 * MiB - 1, False)],
)
def test_a_plan_fits_if_every_rank_does(available: int | None, fits: bool | None) -> None:
    memory = None if available is None else Available(nbytes=available, source="h100")
    assert make_plan(available=memory).fits is fits


def test_json_has_the_documented_fields() -> None:
    plan = make_plan(traffic=Traffic.of(LOG), step=STEP)
    found = json.loads(json.dumps(plan.to_json()))
    (rank,) = found["ranks"]
    assert rank["bytes"] == {
        "parameters": 100 * MiB,
        "gradients": 50 * MiB,
        "optimizer": 200 * MiB,
        "full_parameters": 30 * MiB,
        "transport": 10 * MiB,
        "activations": 80 * MiB,
        "other": 30 * MiB,
    }
    assert sum(rank["bytes"].values()) == rank["peak"]
    assert rank["peak_moment"] == "backward of layers.3, 2 groups full"
    step = found["step"]
    assert step["seconds"] == 0.5
    assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
    assert step["bytes_sent"] == {"dp": 6300, "dp_replicate": 1500}
    assert (step["tokens_per_second"], step["mfu"], step["bound_by"]) == (2000.0, 0.41, "compute")
    assert found["fits"] is None
    assert found["settings"]["mesh"] == {"dp": 8}


def test_without_a_machine_traffic_remains() -> None:
    step = make_plan(traffic=Traffic.of(LOG)).to_json()["step"]
    assert step["seconds"] is None
    assert step["bytes_sent"]["dp"] == 6300


@pytest.mark.parametrize(
    ("mesh", "strategy", "host", "sent"),
    [
        ("dp=8", "full", 8 * 600, 0),  # one host: two versions of its eight shards
        ("dp=16", "full", 16 * 600, 300),  # and two of those of the host before
        ("dp_replicate=2,dp_shard=8", "hybrid", 8 * 600, 0),  # which the other host holds anyway
        ("dp_replicate=2,dp_shard=16", "hybrid", 8 * 600, 0),
    ],
)
def test_a_version_in_memory_is_sent_where_no_other_host_holds_it(
    mesh: str, strategy: str, host: int, sent: int
) -> None:
    settings = Settings(
        mesh=WantedMesh.parse(mesh), strategy=Strategy(strategy), ranks_per_host=8,
        replicate_every=10,
    )  # fmt: skip
    plan = make_plan(settings=settings)
    assert plan.kept_in_memory == (host * MiB, sent * MiB)
    assert plan.to_json()["in_memory"] == {
        "every": 10,
        "bytes_on_host": host * MiB,
        "bytes_sent": sent * MiB,
    }
    assert str(sent) in dict(head(plan))["in memory"]
