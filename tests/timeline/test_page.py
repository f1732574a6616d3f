"""The page of a timeline."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.observe import Activity, Memory
from shardwise.timeline import Timeline, write
from shardwise.timeline.page import MOST_RANKS, MOST_SPANS, page
from shardwise.timeline.rank import MemoryChange, Step
from tests import chromium
from tests.timeline.ranks import collective, rank, span, wait
from tests.timeline.test_trace import PREDICTION

_STEPS = (Step(5, 0.0, 10.0), Step(6, 10.0, 22.0))


def _timeline() -> Timeline:
    early = [span(Activity.FORWARD, 10, 15), collective(11, 16), wait(12, 15.9)]
    late = [span(Activity.FORWARD, 13, 15), collective(14, 16), wait(14.5, 15.9)]
    change = MemoryChange(1.0, Memory.GRADIENTS, "layers.0", 2_000_000)
    first = dataclasses.replace(rank(0, early, _STEPS), changes=(change,))
    return Timeline((first, rank(1, late, _STEPS)), PREDICTION)


class _Reader(HTMLParser):
    """Reads a page: what elements it has, what it fetches, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.script = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(value) for name, value in attrs if name in ("src", "srcset")]
        if tag == "link":
            self.fetched.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.script = self.script or data
        elif not (self.open and self.open[-1] == "style"):
            self.words += data


def _data(text: str) -> Any:
    return json.loads(_Reader(text).script)


def test_the_page_says_what_happened_without_scripts() -> None:
    found = _Reader(page(_timeline()))
    assert not found.open
    assert not found.fetched
    for words in (
        *("A step takes 12.0 s", "9.00 s were predicted", "step 5", "step 6", "slowest"),
        *("rank 1, which came late", "predicted", "gradients", "1.91 MiB"),
    ):
        assert words in found.words, words


def test_the_script_has_every_span_and_the_prediction() -> None:
    data = _data(page(_timeline()))
    assert [step["number"] for step in data["steps"]] == [5, 6]
    assert data["typical"] == 6
    predicted, early, late = data["steps"][1]["groups"]
    assert [group["title"] for group in (predicted, early, late)] == [
        *("predicted", "rank 0", "rank 1 (slowest)"),
    ]
    assert [row for row, _ in early["rows"]] == ["groups", "host", "dp"]
    [[kind, name, begin, length, about]] = early["rows"][2][1]
    assert (kind, data["names"][name], begin, length) == ("all_gather", "layers.0", 1e6, 5e6)
    assert about == "all-gather, 1000 B, 200 B/s, by gloo"


def test_names_cannot_break_out_of_the_page() -> None:
    name = "</script><img src=x onerror=alert(1)>"
    hostile = dataclasses.replace(
        rank(0, [span(Activity.FORWARD, 0, 1, name), wait(1, 2, name)]),
        host=name,
        device=name,
        error=name,
    )
    text = page(Timeline((hostile,)))
    assert not _Reader(text).fetched
    assert "<img" not in text
    assert name in _data(text)["names"]


def test_a_page_of_a_large_job_stays_small() -> None:
    spans = [span(Activity.COPY, i / 1000, (i + 1) / 1000) for i in range(5000)]
    steps = [Step(1, 0.0, 10.0)]
    slow = [span(Activity.FORWARD, 0, 9)]
    ranks = [rank(n, spans if n != 70 else slow, steps, size=100) for n in range(100)]
    data = _data(page(Timeline(tuple(ranks))))
    [step] = data["steps"]
    shown = [group["title"] for group in step["groups"]]
    assert len(shown) <= MOST_RANKS
    assert shown[0].startswith("rank 0")
    assert sum(len(row) for group in step["groups"] for _, row in group["rows"]) <= MOST_SPANS


def test_little_or_nothing_can_be_shown() -> None:
    assert "No step was recorded" in page(Timeline((rank(0, [], []),)))
    assert "No step was recorded" in page(Timeline(()))
    assert "No rank waited" in page(Timeline((rank(0, []),)))


def test_ranks_that_are_missing_or_failed_are_named() -> None:
    failed = dataclasses.replace(rank(1, [], size=3), error="PeerLostError: rank 2", dropped=7)
    text = _Reader(page(Timeline((failed,)))).words
    assert "Nothing is known of the ranks 0, 2." in text
    assert "Rank 1 ended with PeerLostError: rank 2" in text
    assert "7 of the oldest" in text


@pytest.mark.skipif(chromium.find() is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_browser_draws_the_page(tmp_path: Path, width: int, scheme: Any) -> None:
    write(_timeline(), tmp_path)
    with chromium.browser(str(chromium.find())) as tab:
        tab.open((tmp_path / "timeline.html").as_uri(), width=width, scheme=scheme)
        assert not tab.errors()
        assert len(tab.requests()) == 1
        assert tab.run("document.documentElement.scrollWidth") <= width
        colors = """(() => {
            const c = document.getElementById("chart"), p = c.getContext("2d");
            const d = new Uint32Array(p.getImageData(0, 0, c.width, c.height).data.buffer);
            return new Set(d).size;
        })()"""
        assert tab.run(colors) > 5
        before = tab.run("document.getElementById('chart').toDataURL()")
        tab.run("document.querySelector('[data-zoom=in]').click()")
        assert tab.run("document.getElementById('chart').toDataURL()") != before
        point = """(() => {
            const c = document.getElementById("chart"), b = c.getBoundingClientRect();
            for (let y = 0; y < b.height; y += 4) for (let x = 110; x < b.width; x += 20)
                c.dispatchEvent(new PointerEvent("pointermove",
                    {clientX: b.left + x, clientY: b.top + y}));
            return document.getElementById("about").textContent;
        })()"""
        assert re.search(r"rank \d.*: .* into the step", tab.run(point))
        tab.run("""(() => {
            window.written = [];
            CanvasRenderingContext2D.prototype.fillText = text => window.written.push(text);
            dispatchEvent(new Event("resize"));
        })()""")
        written = set(tab.run("window.written"))
        assert {"layers.0", "groups", "host", "dp", "rank 0"} <= written
        assert not any("…" in text for text in written), "no label is cut off"
        tab.run("document.querySelector('[data-step=\"5\"]').click()")
        assert tab.run("document.getElementById('step').value") == "5"
        assert not tab.errors()
