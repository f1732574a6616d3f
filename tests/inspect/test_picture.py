"""The mesh and a parameter as SVG: every rank, every block, to scale."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardwise.insight.inspect.page import WIDTH, Picture, draw_mesh, draw_parameter, drawing
from shardwise.insight.inspect.report import ParameterReport, Report
from tests.inspect.plans import planned_report

SPACE = "{http://www.w3.org/2000/svg}"


def shapes(picture: Picture, kind: str) -> Iterator[tuple[float, float, float, float]]:
    """Boxes of the paths that have a class: x, y, width and height."""
    root = ET.fromstring(f"<svg>{picture.body}</svg>")
    for path in root.iter("path"):
        if kind in path.get("class", "").split():
            for box in re.findall(r"M(\S+) (\S+)h(\S+)v(\S+)h\S+z", path.get("d", "")):
                x, y, width, height = map(float, box)
                yield x, y, width, height


def labels(picture: Picture) -> list[str]:
    return [each.text or "" for each in ET.fromstring(f"<svg>{picture.body}</svg>").iter("text")]


def weight(mesh: str, rows: int, columns: int) -> ParameterReport:
    report = planned_report(mesh, lambda: nn.Linear(columns, rows, bias=False))
    return report.parameters[0]


def test_a_picture_is_a_file_of_its_own(report: Report) -> None:
    root = ET.fromstring(drawing(report, report.find("blocks.0.up.weight"), rank=4))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    titles = [each.text for each in root.iter(f"{space}title")]
    assert "rank 4: rows 1, all columns, 24 B" in titles
    assert "rank 7: nothing, 0 B" in titles
    cells = [each for each in root.iter(f"{space}path") if each.get("data-r")]
    assert [each.get("data-r") for each in cells] == [str(rank) for rank in range(8)]
    rings = [each for each in root.iter(f"{space}path") if each.get("class") == "ring"]
    assert len(rings) == 2, "a rank and its block are marked"


def test_without_a_rank_nothing_is_marked(report: Report) -> None:
    assert 'class="ring"' not in drawing(report, report.find("gain"))


def test_a_rank_without_elements_is_marked_in_the_mesh_only(report: Report) -> None:
    assert drawing(report, report.find("blocks.0.up.weight"), rank=7).count('class="ring"') == 1


def test_a_picture_says_how_many_copies_there_are() -> None:
    report = planned_report("dp_replicate=2,dp_shard=3", lambda: nn.Linear(4, 6))
    assert "each block on 2 ranks" in drawing(report, report.parameters[0])


@pytest.mark.parametrize("mesh", ["dp=3", "dp_replicate=2,dp_shard=4", "dp=128", "dp=512"])
def test_blocks_cover_the_parameter_once(mesh: str) -> None:
    picture = draw_parameter(weight(mesh, 512, 8))
    boxes = list(shapes(picture, "b"))
    area = sum(w * h for _, _, w, h in boxes)
    left, top = min(x for x, *_ in boxes), min(y for _, y, *_ in boxes)
    right, bottom = max(x + w for x, _, w, _ in boxes), max(y + h for _, y, _, h in boxes)
    whole = (right - left) * (bottom - top)
    assert math.isclose(area, whole, rel_tol=0.02)
    assert right <= WIDTH
    assert bottom <= picture.height


def test_labels_of_many_rows_are_condensed_to_their_room() -> None:
    long = draw_parameter(weight("dp=8", 128256, 8)).body
    assert 'textLength="66" lengthAdjust="spacingAndGlyphs">112224..128255</text>' in long
    assert "textLength" not in draw_parameter(weight("dp=8", 1024, 8)).body


def test_ranks_with_the_same_block_have_its_color() -> None:
    report = planned_report("dp_replicate=2,dp_shard=2", lambda: nn.Linear(4, 6, bias=False))
    (each,) = report.parameters
    body = draw_mesh(report.grid, each).body
    styles = re.findall(r'style="--h:(\d+)" data-r="(\d)"', body)
    colors = {rank: hue for hue, rank in styles}
    assert colors["0"] == colors["2"] != colors["1"] == colors["3"]
    drawn = set(re.findall(r"--h:(\d+)", draw_parameter(each).body))
    assert drawn == set(colors.values())


def test_padding_is_drawn_below_the_parameter() -> None:
    assert "+ 24 B padding on all ranks" in labels(draw_parameter(weight("dp=4", 7, 6)))
    assert not any("padding" in text for text in labels(draw_parameter(weight("dp=4", 8, 6))))


def test_labels_of_many_rows_are_joined() -> None:
    few = labels(draw_parameter(weight("dp=4", 64, 4)))
    assert {"0..15", "16..31", "32..47", "48..63"} <= set(few)
    assert {"0", "1", "2", "3"} <= set(few), "ranks"
    many = labels(draw_parameter(weight("dp=256", 256, 4)))
    assert len(many) < 80
    assert "0..15" in many, "sixteen rows share a label"


def test_a_scalar_and_a_vector_have_a_picture() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.0))
            self.bias = nn.Parameter(torch.zeros(6))

    gain, bias = planned_report("dp=2", Small).parameters
    assert "a scalar" in labels(draw_parameter(gain))
    assert "6 rows ↓" in labels(draw_parameter(bias))


def test_a_parameter_without_elements_has_a_picture() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 4))

    (none,) = planned_report("dp=2", Empty).parameters
    assert "0 rows ↓, 4 columns →" in labels(draw_parameter(none))


def test_columns_are_drawn_across_where_they_are_cut(report: Report) -> None:
    down = draw_parameter(report.find("blocks.0.down.weight"))
    assert "6 rows ↓, 7 columns →" in labels(down)
    assert len({x for x, *_ in shapes(down, "b")}) == 4, "tp cuts columns"
