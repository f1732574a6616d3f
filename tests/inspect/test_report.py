"""What a report says of a layout: totals, remarks, names and JSON."""

from __future__ import annotations

import json

import pytest
from torch import nn

from shardwise.insight.inspect.grid import Grid, Tiling
from shardwise.insight.inspect.report import (
    MEANINGS,
    ParameterReport,
    ParamKind,
    Report,
    folded,
    unfolded,
)
from shardwise.sharding.part import Part, full_part
from tests.inspect.plans import planned_report


def parameter(
    name: str,
    held: dict[int, tuple[Part, int]],
    shape: tuple[int, ...] = (4, 2),
    kind: ParamKind = ParamKind.SHARDED,
    **others: object,
) -> ParameterReport:
    """A parameter of which each rank holds a part, with padding."""
    fields: dict[str, object] = {
        "aliases": (),
        "dtype": "float32",
        "itemsize": 4,
        "trainable": True,
        "group": "",
        "cut_dim": 0 if kind is ParamKind.SHARDED else None,
        "placements": (),
        "cut_along": ((0,) if kind is ParamKind.SHARDED else (),),
    }
    return ParameterReport(
        name=name,
        kind=kind,
        tiling=Tiling.of(shape, held),
        **{**fields, **others},  # type: ignore[arg-type]
    )


def rows(first: int, count: int, padding: int = 0) -> tuple[Part, int]:
    """Some rows of a tensor of two columns, and elements of padding."""
    return (((first, count),) if count else (), ((0, 2),)), padding


def on_two_ranks(*parameters: ParameterReport) -> Report:
    return Report(model="m", grid=Grid(("dp",), (2,), (0, 1)), parameters=parameters)


EVEN = {0: rows(0, 2), 1: rows(2, 2)}
FULL = {0: (full_part((4, 2)), 0), 1: (full_part((4, 2)), 0)}


def remarks(*parameters: ParameterReport) -> dict[str, str]:
    return {each.kind: each.text for each in on_two_ranks(*parameters).remarks}


def test_layers_that_are_sharded_alike_share_a_row(large: Report) -> None:
    names = [row.full_name for row in folded(large.parameters)]
    assert names == [
        "blocks.0..10.up.weight",
        "blocks.0..10.up.bias",
        "blocks.0..11.down.weight",
        "blocks.11.up.weight",
        "blocks.11.up.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert len(unfolded(large.parameters)) == len(large.parameters)


def test_remarks_have_figures(report: Report) -> None:
    found = {each.kind: each for each in report.remarks}
    assert "rank 0 holds 244 B and rank 7 96 B, 2.54 times as much" in found["unbalanced"].text
    assert found["unbalanced"].nbytes == 148
    assert found["padding"].nbytes == sum(total.padding for total in report.totals)
    assert "rank 7 holds nothing of blocks.0.up.weight (7x6)" in found["empty"].text
    along_tp = next(each for each in report.remarks if "along tp" in each.text)
    assert along_tp.parameters == ("gain", "head.weight", "head.bias")
    assert along_tp.nbytes == 4 + 3 * 6 * 4 + 3 * 4


def test_an_even_layout_has_no_remarks() -> None:
    report = planned_report("dp=2", lambda: nn.Linear(4, 4))
    assert report.remarks == ()


def test_a_nearly_even_layout_is_not_unbalanced() -> None:
    """Of 101 rows two ranks hold 51 and 50."""
    nearly = planned_report("dp=2", lambda: nn.Linear(4, 101, bias=False))
    assert "unbalanced" not in {each.kind for each in nearly.remarks}
    uneven = planned_report("dp=2", lambda: nn.Linear(4, 11, bias=False))
    assert "unbalanced" in {each.kind for each in uneven.remarks}


def test_json_has_these_fields(report: Report) -> None:
    found = json.loads(json.dumps(report.to_json()))
    assert set(found) == {
        "version",
        "model",
        "mesh",
        "numel",
        "nbytes",
        "ranks",
        "parameters",
        "tilings",
        "remarks",
        "values",
    }
    assert found["version"] == 1
    assert found["mesh"] == {"names": ["dp", "tp"], "shape": [2, 4], "ranks": list(range(8))}
    assert found["ranks"][7] == {
        "rank": 7,
        "parameters": 96,
        "trainable": 96,
        "replicated": 60,
        "padding": 112,
        "estimated_gradients": 96,
        "estimated_adam": 192,
    }
    down = next(each for each in found["parameters"] if each["name"] == "blocks.1.down.weight")
    number = down.pop("tiling")
    assert down == {
        "name": "blocks.1.down.weight",
        "aliases": [],
        "shape": [6, 7],
        "dtype": "float32",
        "itemsize": 4,
        "nbytes": 168,
        "trainable": True,
        "kind": "sharded",
        "group": "blocks.1",
        "cut_dim": 0,
        "placements": [["dp", "Shard(0)"], ["tp", "Shard(1)"]],
        "cut_along": [[0], [1]],
    }
    assert found["tilings"][number]["blocks"][7] == {
        "ranks": [7],
        "spans": [[[3, 3]], [[6, 1]]],
        "numel": 3,
        "padding": 0,
    }
    assert {key for each in found["remarks"] for key in each} == {
        "kind",
        "text",
        "nbytes",
        "parameters",
    }


def test_totals_add_up_the_blocks_of_a_rank() -> None:
    frozen = parameter("b", FULL, kind=ParamKind.PLAIN, trainable=False)
    half = parameter("h", {0: rows(0, 3), 1: rows(3, 1, 4)}, itemsize=2, dtype="bfloat16")
    report = on_two_ranks(parameter("a", EVEN), frozen, half)
    first, second = report.totals
    assert (first.parameters, first.trainable, first.replicated, first.padding) == (60, 28, 32, 0)
    assert (second.parameters, second.trainable, second.padding) == (52, 20, 8)
    assert (first.gradients, first.optimizer) == (28, 56), "Adam keeps two states"
    assert report.numel == 24
    assert report.nbytes == 8 * 4 + 8 * 4 + 8 * 2


def test_a_parameter_that_is_not_on_a_rank() -> None:
    alone = parameter("a", {0: (full_part((4, 2)), 0)})
    assert alone.block(1) is None
    assert alone.nbytes_on(1) == 0
    assert on_two_ranks(alone).totals[1].parameters == 0


def test_a_parameter_that_no_call_reached() -> None:
    found = remarks(parameter("a", EVEN), parameter("b", FULL, kind=ParamKind.PLAIN))
    assert set(found) == {"not sharded"}
    assert found["not sharded"].startswith("1 parameter (32 B) is full on every rank")
    assert found["not sharded"].endswith(": b")


def test_one_rank_has_nothing_to_shard() -> None:
    alone = parameter("b", {0: (full_part((4, 2)), 0)}, kind=ParamKind.PLAIN)
    report = Report(model="m", grid=Grid(("rank",), (1,), (0,)), parameters=(alone,))
    assert report.remarks == ()


def test_names_of_many_parameters_are_examples() -> None:
    plain = [parameter(name, FULL, kind=ParamKind.PLAIN) for name in "abc"]
    assert remarks(*plain)["not sharded"].endswith(": a, b, ...")


def test_replication_of_all_and_of_some() -> None:
    same = parameter("a", FULL, kind=ParamKind.REPLICATED)
    assert remarks(same)["replicated"] == (
        "all parameters are the same on all 2 ranks along dp, 32 B per rank"
    )
    assert remarks(same, parameter("b", EVEN))["replicated"] == (
        "1 parameter is the same on all 2 ranks along dp, 32 B per rank: a"
    )


def test_a_rank_that_holds_nothing_at_all() -> None:
    found = remarks(parameter("a", {0: rows(0, 4), 1: rows(4, 0, 8)}))
    assert found["unbalanced"] == (
        "rank 0 holds 32 B and rank 1 0 B; 1 parameter is sharded unevenly"
    )
    assert "rank 1 holds nothing of a (4x2)" in found["empty"]
    assert found["padding"].endswith("while 1 parameter is gathered; 32 B of it for a")


def test_shards_of_columns_cost_a_copy() -> None:
    found = remarks(parameter("a", EVEN, cut_dim=1), parameter("b", EVEN))
    assert found["interleaved"] == (
        "1 parameter is sharded along a dimension other than the first; every unshard copies "
        "32 B once more"
    )


def test_groups_have_their_parameters_and_the_models_own_is_last() -> None:
    uneven = {0: rows(0, 3), 1: rows(3, 1, 4)}
    report = on_two_ranks(
        parameter("top", EVEN),
        parameter("0.w", uneven, group="0"),
        parameter("1.w", EVEN, group="1"),
        parameter("0.b", EVEN, group="0"),
        parameter("plain", FULL, kind=ParamKind.PLAIN, group=None),
    )
    assert [(each.name, len(each.parameters)) for each in report.groups] == [
        ("0", 2),
        ("1", 1),
        ("", 1),
    ]
    first = report.groups[0]
    assert (first.numel, first.padding) == (16, 4)
    assert [first.numel_on(rank) for rank in (0, 1, 2)] == [10, 6, 0]


def test_a_parameter_is_found_by_each_of_its_names() -> None:
    tied = parameter("embed.weight", EVEN, aliases=("head.weight",))
    report = on_two_ranks(tied, parameter("norm.weight", EVEN))
    assert report.find("embed.weight") is report.find("head.weight") is tied
    assert report.matching("head.*") == (tied,)
    assert len(report.matching("*weight")) == len(report.matching(None)) == 2
    assert report.matching("nothing") == ()
    with pytest.raises(KeyError, match="nobody"):
        report.find("nobody")


def test_json_of_some_parameters_has_their_tilings_only() -> None:
    a, b = parameter("a", EVEN), parameter("b", FULL, kind=ParamKind.PLAIN)
    both = Report(
        model="m",
        grid=Grid(("dp",), (2,), (0, 1)),
        parameters=(a, b),
        values={"a": {0: [1]}, "b": {0: [2]}},
    )
    found = both.to_json("b")
    assert [each["name"] for each in found["parameters"]] == ["b"]
    assert [each["tiling"] for each in found["parameters"]] == [0]
    assert len(found["tilings"]) == 1
    assert found["values"] == {"b": {"0": [2]}}
    assert found["numel"] == both.numel, "totals are those of the model"
    assert both.to_json()["values"] == {"a": {"0": [1]}, "b": {"0": [2]}}


def test_every_kind_is_explained() -> None:
    assert len({MEANINGS[kind] for kind in ParamKind}) == len(ParamKind)
