"""The report as a page: complete, small, and readable without scripts."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise.insight.inspect.page import page
from shardwise.insight.inspect.report import Report
from tests.inspect.plans import planned_report


class _Page(html.parser.HTMLParser):
    """Collects addresses and ids, and checks that tags are closed."""

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


def test_the_page_loads_nothing_else(large: Report) -> None:
    text = page(large)
    found = _Page()
    found.feed(text)
    assert not found.open
    assert found.addresses
    assert all(address.startswith("#") for address in found.addresses)
    assert {address[1:] for address in found.addresses} == set(found.ids), "every link has a target"
    assert not re.search(r"(?:https?:)?//(?!\s)\w|@import|url\(", _without_comments(text))
    assert len(text) < 1_000_000, "512 ranks"


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


# What the page's script asks a browser for, where one parameter is on the page.
_BROWSER = """
const title = { id: "w", dataset: { names: "w" }, classList: { add() { shown = true; } } };
const chosen = {};
title.closest = () => ({ querySelector: what => what === ".chosen" ? chosen : null, ...title });
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
    script = (Path(shardwise.__file__).parent / "insight" / "inspect" / "page.js").read_text()
    ended = subprocess.run(
        ["node", "-e", f"{_BROWSER}{script}if (!shown) throw new Error('nothing is shown');"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_parameters_that_are_sharded_alike_share_a_picture(report: Report) -> None:
    text = page(report)
    shapes = {(each.tiling, each.itemsize) for each in report.parameters}
    assert text.count("<section>") == len(shapes)
    assert text.count("<svg ") == 2 * len(shapes)


def test_every_parameter_can_be_addressed(large: Report) -> None:
    """The script finds any layer by the names that its section has."""
    names = {n for m in re.findall(r'data-names="([^"]*)"', page(large)) for n in m.split(" ")}
    assert names == {each.name for each in large.parameters}


def test_the_page_has_totals_remarks_and_blocks(report: Report) -> None:
    text = re.sub(r' data-head="[^"]*"', "", page(report))
    assert "<td>rank 7</td><td>96 B</td>" in text
    assert f"Remarks ({len(report.remarks)})" in text
    assert all(f"<b>{each.kind}</b>" in text for each in report.remarks)
    assert "<td>4</td><td>1</td><td>all</td><td>24 B</td>" in text


def test_the_page_describes_each_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 2)
            self.head = nn.Linear(2, 4, bias=False)
            self.head.weight = self.embed.weight
            self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)

    text = page(planned_report("dp=2", Tied))
    assert "4x2 float32 · 32 B · dp Shard(0) · tied to head.weight · in the group of the model" in (
        text
    )
    assert "· frozen ·" in text


def test_a_layout_without_remarks_has_no_such_section() -> None:
    assert "Remarks" not in page(planned_report("dp=2", lambda: nn.Linear(4, 4)))
