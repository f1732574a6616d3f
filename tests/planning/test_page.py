"""The page of a plan: the same figures as the text, and hostile names as text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardwise.insight.planning.report import Available, Traffic
from shardwise.insight.planning.text import page
from tests import chromium
from tests.inspect.plans import planned_report
from tests.planning.test_report import LOG, STEP, MiB, make_plan

PLAN = make_plan(
    step=STEP, traffic=Traffic.of(LOG), available=Available(nbytes=600 * MiB, source="h100")
)
_VOID = {"meta", "wbr", "br"}


class _Balance(HTMLParser):
    """The elements that are open, and all tags that were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _parsed(html: str) -> _Balance:
    parser = _Balance()
    parser.feed(html)
    assert not parser.open
    return parser


def test_the_plan_stands_above_the_parameters() -> None:
    html = page(PLAN, planned_report("dp=8"))
    _parsed(html)
    assert html.index("<h2>Plan</h2>") < html.index("<h2>Parameters</h2>")
    for text in ("full parameters", "30.0 MiB", "exposed communication", "backward of layers.3"):
        assert text in html


def test_without_a_layout_the_plan_is_a_page_of_its_own() -> None:
    html = page(PLAN, None)
    assert _parsed(html).seen.count("h1") == 1
    assert "<h2>Parameters</h2>" not in html


def test_bars_fill_the_share_that_is_used() -> None:
    html = page(PLAN, None)
    memory, time = (
        sum(map(float, re.findall(r"width:([\d.]+)%", bar)))
        for bar in re.findall(r'<div class="bar".*?</div>', html, re.DOTALL)
    )
    assert round(memory, 1) == 83.3  # 500 of 600 MiB
    assert round(time, 1) == 100.0


def test_hostile_names_are_text() -> None:
    hostile = '<img src=x onerror="alert(1)">'
    plan = make_plan(model=hostile, machine=hostile, formulas={hostile: hostile})
    assert "img" not in _parsed(page(plan, None)).seen


def test_the_page_loads_nothing() -> None:
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page(PLAN, planned_report("dp=2")))


@pytest.mark.skipif(chromium.find() is None, reason="no Chromium is installed")
def test_a_plan_with_its_layout_fits_any_screen(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(page(PLAN, planned_report("dp=128")))
    smallest = """(() => {
        const svg = document.querySelector(".shown .mesh svg");
        const scale = svg.clientWidth / svg.viewBox.baseVal.width;
        return Math.min(...[...svg.querySelectorAll("text")]
            .map(text => scale * parseFloat(getComputedStyle(text).fontSize)));
    })()"""
    cut = """[...document.querySelectorAll(".scroll")]
        .filter(box => box.scrollWidth > box.clientWidth).length"""
    with chromium.browser(str(chromium.find())) as tab:
        for width in (360, 768, 1600):
            tab.open(file.as_uri(), width=width)
            assert tab.run("document.documentElement.scrollWidth") <= width
            assert tab.run(cut) == 0, "no table goes beyond its box"
            assert tab.run(smallest) >= 9, "pixels of the smallest label"
            assert not tab.errors()
