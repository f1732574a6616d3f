"""The report as text: what it says, and that it fits a terminal."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

from shardwise.insight.inspect.report import Report
from shardwise.insight.inspect.text import View, as_text, blocks_of, totals_of
from tests.inspect.plans import planned_report


@pytest.mark.parametrize(
    "view",
    [
        View(width=80),
        View(width=80, rank=5),
        View(width=80, layers=True),
        View(width=80, full=True),
        View(width=80, pattern="*up*"),
    ],
    ids=["all", "rank", "layers", "full", "pattern"],
)
def test_text_fits_80_columns(report: Report, large: Report, view: View) -> None:
    for each in (report, large):
        lines = as_text(each, view).splitlines()
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines), "nothing is cut off"


def test_the_text_says_who_holds_what(report: Report) -> None:
    text = as_text(report, View(width=80))
    assert "on 8 ranks: dp=2 x tp=4" in text
    assert re.search(r"blocks\.0\.\.2  \(3 alike\)\n  up\.weight +7x6 +S\(0\) +S\(0\)", text)
    assert re.search(r"  down\.weight +6x7 +S\(0\) +S\(1\) +<= 3x2 +24 B", text)
    assert re.search(r"head\.weight +5x6 +S\(0\) +R +<= 3x6 +72 B", text)
    assert re.search(r"rank 7 +96 B", text)


def test_the_text_of_one_rank(report: Report) -> None:
    text = as_text(report, View(width=80, rank=5))
    assert "[5]" in text
    assert re.search(r"  down\.weight +3\.\.5 +2\.\.3 +3x2 +24 B", text)
    assert re.search(r"head\.weight +3\.\.4 +all +2x6 +48 B +24 B", text), "one row of padding"


def test_the_text_of_one_parameter(report: Report) -> None:
    text = as_text(report, View(width=80, pattern="blocks.0.up.weight"))
    assert "blocks.0.up.weight: 7x6 float32, 168 B, dp StridedShard(0, 4), tp Shard(0)" in text
    assert re.search(r"^ +4 +1 +all +24 B$", text, re.MULTILINE)
    assert re.search(r"^ +7 +none +all +0 B +24 B$", text, re.MULTILINE)
    assert "down" not in text


def test_many_blocks_are_listed_in_runs() -> None:
    report = planned_report("dp=512", lambda: nn.Linear(3, 1024))
    text = as_text(report, View(width=80, pattern="weight"))
    assert re.search(r"0-511 +2 each: 0\.\.1 to 1022\.\.1023 +all +24 B", text)


def test_uneven_blocks_end_a_run() -> None:
    (weight, _) = planned_report("dp=64", lambda: nn.Linear(1, 127)).parameters
    assert blocks_of(weight).rows == [
        ("0-62", "2 each: 0..1 to 124..125", "all", "8 B", ""),
        ("63", "126", "all", "4 B", "4 B"),
    ]


def test_runs_of_blocks_that_several_ranks_hold() -> None:
    (weight, _) = planned_report("dp_replicate=2,dp_shard=40", lambda: nn.Linear(1, 40)).parameters
    assert blocks_of(weight).rows == [("0, 40; to 39, 79", "1 each: 0 to 39", "all", "4 B", "")]


def test_columns_of_a_run_that_tensor_parallelism_cut() -> None:
    class Down(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(64, 64, bias=False)

    (weight,) = planned_report("dp=2,tp=32", Down).parameters
    cells = blocks_of(weight).rows
    assert [row[1] for row in cells] == ["0..31", "32..63"]
    assert cells[0][2] == "2 each: 0..1 to 62..63"


def test_ranks_with_the_same_figures_share_a_row(report: Report) -> None:
    heads = [cells[0] for cells in totals_of(report.totals, "ranks").rows]
    assert heads == ["ranks 0-2", "rank 3", "ranks 4-6", "rank 7"]


def test_a_scalar_has_no_rows(report: Report) -> None:
    assert re.search(r"^gain +scalar +R +R +scalar +4 B$", as_text(report, View(width=80)), re.M)
    assert re.search(r"^gain +scalar +4 B$", as_text(report, View(width=80, rank=3)), re.M)


def test_a_large_mesh_is_shortened(large: Report) -> None:
    lines = as_text(large, View(width=80)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("dp_shard \\ tp"))
    assert lines[start].split()[3:] == [str(i) for i in range(8)]
    assert lines[start + 1] == "dp_replicate 0"
    assert lines[start + 2].split() == ["0", *(str(rank) for rank in range(8))]
    assert lines[start + 7] == "..."
    assert lines[start + 11].split() == ["15", *(str(rank) for rank in range(504, 512))]


def test_names_of_mesh_dimensions_are_short(large: Report) -> None:
    (head,) = (line for line in as_text(large).splitlines() if line.startswith("parameter"))
    assert head.split() == ["parameter", "shape", "repl", "shard", "tp", "per", "rank", "bytes"]


def test_dtypes_have_a_column_if_they_differ() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(4))
            self.b = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    text = as_text(planned_report("dp=2", Mixed), View(width=80))
    assert re.search(r"^b +4 +bfloat16 +S\(0\) +2 +4 B$", text, re.MULTILINE)
    assert ", float32" not in text.splitlines()[0]


def test_remarks_follow_the_totals_of_all_ranks_only(report: Report) -> None:
    assert "\nremarks\n  replicated: " in as_text(report, View(width=80))
    assert "\nremarks\n" not in as_text(report, View(width=80, rank=1))
    assert "bytes per rank" not in as_text(report, View(width=80, pattern="gain"))


def test_tied_names_are_shown_with_the_blocks() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 2)
            self.head = nn.Linear(2, 4, bias=False)
            self.head.weight = self.embed.weight

    text = as_text(planned_report("dp=2", Tied), View(width=80, pattern="head.weight"))
    assert "embed.weight: 4x2 float32, 32 B, dp Shard(0), tied to head.weight" in text


def test_values_are_shown_by_rank(report: Report) -> None:
    values = {"gain": dict.fromkeys(range(8), 1.5), "head.bias": {0: [0.0, 1.0], 4: [2.0]}}
    shown = dataclasses.replace(report, values=values)
    text = as_text(shown, View(width=80))
    assert "  gain, scalar\n    ranks 0-7: 1.5\n" in text
    assert "    rank 4: [2.0]" in text
    assert "rank 0" not in as_text(shown, View(width=80, rank=4, pattern="head.bias"))
    assert as_text(shown, View(width=80, pattern="*down*")).endswith("elements\n  none")


def test_narrow_terminals_get_lines_of_60_columns(large: Report) -> None:
    lines = as_text(large, View(width=20)).splitlines()
    assert max(map(len, lines)) <= 60
