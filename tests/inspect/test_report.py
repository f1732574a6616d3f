"""How a report is shown: text, JSON, a page and a picture."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise.inspect.page import page
from shardwise.inspect.report import Report, folded, unfolded
from shardwise.inspect.text import View, as_text
from tests.inspect.plans import planned_report
from tests.sharding.nets import Block


class Wide(nn.Module):
    """Twelve blocks of which the last is another, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.blocks[11].up = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(scope="module")
def report() -> Report:
    return planned_report("dp=2,tp=4")


@pytest.fixture(scope="module")
def large() -> Report:
    return planned_report("dp_replicate=4,dp_shard=16,tp=8", Wide)


def test_layers_that_are_cut_alike_are_one_line(large: Report) -> None:
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


def test_the_text_tells_who_holds_what(report: Report) -> None:
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


def test_many_blocks_are_told_in_runs() -> None:
    report = planned_report("dp=512", lambda: nn.Linear(3, 1024))
    text = as_text(report, View(width=80, pattern="weight"))
    assert re.search(r"0-511 +2 each: 0\.\.1 to 1022\.\.1023 +all +24 B", text)


def test_remarks_have_figures(report: Report) -> None:
    found = {each.kind: each for each in report.remarks}
    assert "rank 0 holds 244 B and rank 7 96 B, 2.54 times as much" in found["unbalanced"].text
    assert found["unbalanced"].nbytes == 148
    assert found["padding"].nbytes == sum(total.padding for total in report.totals)
    assert "of blocks.0.up.weight, 7x6, rank 7 holds no element" in found["empty"].text
    along_tp = next(each for each in report.remarks if "along tp" in each.text)
    assert along_tp.parameters == ("gain", "head.weight", "head.bias")
    assert along_tp.nbytes == 4 + 3 * 6 * 4 + 3 * 4


def test_nothing_to_mind_where_all_is_even() -> None:
    report = planned_report("dp=2", lambda: nn.Linear(4, 4))
    assert report.remarks == ()


def test_what_is_nearly_even_is_nothing_to_mind() -> None:
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


class _Page(html.parser.HTMLParser):
    """Addresses, ids and tags that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [v or "" for k, v in attrs if k in ("href", "src", "action", "srcset")]
        self.ids += [v or "" for k, v in attrs if k == "id"]
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(large: Report, tmp_path: Path) -> None:
    path = large.to_html(tmp_path / "plan.html")
    text = path.read_text()
    found = _Page()
    found.feed(text)
    assert not found.open
    assert found.addresses
    assert all(address.startswith("#") for address in found.addresses)
    assert {address[1:] for address in found.addresses} == set(found.ids), "links lead somewhere"
    assert not re.search(r"(?:https?:)?//(?!\s)\w|@import|url\(", _without_comments(text))
    assert path.stat().st_size < 1_000_000, "512 ranks"


def _without_comments(text: str) -> str:
    return re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)


def test_a_page_for_eight_ranks_is_small(report: Report) -> None:
    assert len(page(report)) < 60_000


def test_names_are_escaped() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("<b>&\"'", nn.Parameter(torch.zeros(4)))

        def forward(self) -> None: ...

    text = page(planned_report("dp=2", Odd))
    assert "<b>&\"'" not in text
    assert 'id="&lt;b&gt;&amp;&quot;&#x27;"' in text


def test_a_picture_is_a_file_of_its_own(report: Report, tmp_path: Path) -> None:
    path = report.to_svg("blocks.0.up.weight", tmp_path / "up.svg", rank=4)
    root = ET.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    titles = [each.text for each in root.iter(f"{space}title")]
    assert "rank 4: rows 1, all columns, 24 B" in titles
    assert "rank 7: nothing, 0 B" in titles
    cells = [each for each in root.iter(f"{space}path") if each.get("data-r")]
    assert [each.get("data-r") for each in cells] == [str(rank) for rank in range(8)]
    rings = [each for each in root.iter(f"{space}path") if each.get("class") == "ring"]
    assert len(rings) == 2, "a rank and its block are marked"


def test_an_unknown_parameter(report: Report, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="nobody"):
        report.to_svg("nobody", tmp_path / "x.svg")


# What the page's script asks a browser for, where one parameter is on the page.
_BROWSER = """
const title = { id: "w", dataset: { names: "w" }, classList: { add() { shown = true; } } };
const told = {};
title.closest = () => ({ querySelector: what => what === ".told" ? told : null, ...title });
let shown = false;
globalThis.document = {
  querySelectorAll: what => what === ".title" ? [title] : [],
  addEventListener() {},
};
globalThis.addEventListener = () => {};
globalThis.location = { hash: "#%" };
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the page's script")
def test_an_address_that_encodes_nothing_leads_to_the_first_parameter() -> None:
    script = (Path(shardwise.__file__).parent / "inspect" / "page.js").read_text()
    ended = subprocess.run(
        ["node", "-e", f"{_BROWSER}{script}if (!shown) throw new Error('nothing is shown');"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
