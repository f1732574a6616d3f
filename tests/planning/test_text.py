"""A plan as text: what stands in which line, and that lines fit a terminal."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.frontends.strategies import Checkpointing, Strategy, WantedMesh
from shardwise.insight.planning.report import Available, Traffic
from shardwise.insight.planning.settings import Products, Settings
from shardwise.insight.planning.text import as_text
from tests.planning.test_report import LOG, RANK, STEP, MiB, make_plan


def _lines(text: str) -> dict[str, str]:
    """The rest of each line by its first words."""
    split = (line.split("  ", 1) for line in text.splitlines() if "  " in line)
    return {first.strip(): " ".join(rest.split()) for first, rest in split}


def test_memory_has_a_line_for_each_kind() -> None:
    lines = _lines(as_text(make_plan(), 80))
    assert lines["parameters"] == "100.0 MiB 100.0 MiB"
    assert lines["full parameters"] == "30.0 MiB 30.0 MiB"
    assert lines["activations"] == "80.0 MiB 90.0 MiB"  # at another moment there are more
    assert lines["all together"] == "500.0 MiB"
    assert "peak: backward of layers.3, 2 groups full" in as_text(make_plan(), 80)


def test_activations_of_repeated_layers_share_a_line() -> None:
    assert _lines(as_text(make_plan(), 80))["layers.0..1"] == "40.0 MiB 80.0 MiB"
    few = dataclasses.replace(RANK, by_module={"layers.0": 30 * MiB})
    assert _lines(as_text(make_plan(ranks=(few,)), 80))["others"] == "50.0 MiB"


@pytest.mark.parametrize(
    ("available", "verdict"),
    [
        (None, "500.0 MiB at the peak of a rank"),
        (600 * MiB, "500.0 MiB at the peak of a rank, of 600.0 MiB (h100): fits"),
        (
            400 * MiB,
            "500.0 MiB at the peak of a rank, of 400.0 MiB (h100): does not fit, 100.0 MiB too "
            "much",
        ),
    ],
)
def test_the_verdict_has_figures(available: int | None, verdict: str) -> None:
    memory = None if available is None else Available(nbytes=available, source="h100")
    assert f"memory     {verdict}" in as_text(make_plan(available=memory), 120)


def test_what_the_allocator_reserves_has_to_fit() -> None:
    memory = Available(nbytes=510 * MiB, source="h100")
    plan = make_plan(available=memory, reserved=520 * MiB)
    assert plan.fits is False
    assert (
        "500.0 MiB at the peak of a rank, 520.0 MiB with the slack of the allocator, of 510.0 MiB "
        "(h100): does not fit, 10.0 MiB too much"
    ) in as_text(plan, 200)
    assert plan.to_json()["reserved"] == 520 * MiB


def test_time_and_traffic_are_shown_where_they_are_known() -> None:
    text = as_text(make_plan(step=STEP, traffic=Traffic.of(LOG)), 100)
    lines = _lines(text)
    assert lines["compute"] == "300 ms 60.0%"
    assert lines["exposed communication"] == "100 ms 20.0%"
    assert lines["dp_replicate"] == "all-reduce 1 2 1000 B 1.46 KiB"
    assert "500 ms a step, 2,000 samples/s, 250 per rank, MFU 41.0%; bound by compute" in text
    assert "shardwise calibrate" in as_text(make_plan(), 80)


def test_the_first_lines_say_what_was_planned_for() -> None:
    settings = Settings(
        mesh=WantedMesh.parse("dp=4,tp=2"),
        strategy=Strategy.SHARD_GRAD_OP,
        batch_size=3,
        accumulate=2,
        seq_length=512,
        param_dtype="bf16",
        shard_dtype="fp32",
        activation_checkpointing=Checkpointing.SELECTIVE,
        recompute_every=2,
        compile=True,
        products=Products.FLOAT8,
    )
    text = as_text(make_plan(settings=settings), 100)
    for line in (
        "sharding   grad-op over dp=4,tp=2, 8 ranks",
        "step       3 x 512 tokens per 2 ranks of tp, 2 microbatches; 12,288 tokens on all ranks",
        "precision  bf16 compute, fp32 reduction, fp32 shards, float8 matrix products",
        "optimizer  adamw, selective activation checkpointing of one block in 2, blocks compiled",
    ):
        assert line in text


def test_kinds_of_ranks_have_columns_of_their_own() -> None:
    last = dataclasses.replace(RANK, parameters=0, peak=400 * MiB, ranks=1)
    first = dataclasses.replace(RANK, ranks=7)
    text = as_text(make_plan(ranks=(first, last)), 80)
    assert _lines(text)["memory of a rank"] == "7 ranks 1 rank at most"
    assert _lines(text)["parameters"] == "100.0 MiB 0 B 100.0 MiB"


def test_formulas_are_marked() -> None:
    text = as_text(make_plan(formulas={"experts": "calls .item()"}), 100)
    assert "* experts could not be traced (calls .item()): its figures come from formulas" in text


def test_lines_fit_into_80_columns() -> None:
    text = as_text(make_plan(step=STEP, traffic=Traffic.of(LOG)), 80)
    assert max(map(len, text.splitlines())) <= 80
