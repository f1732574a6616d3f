"""The page of a timeline."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.observe import Activity, Memory
from shardwise.timeline import Timeline, write
from shardwise.timeline.page import MOST_RANKS, page
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
        if not (self.open and self.open[-1] == "style"):
            self.words += data


def test_the_page_says_what_happened_without_scripts() -> None:
    found = _Reader(page(_timeline()))
    assert not found.open
    assert not found.fetched
    for words in (
        *("A step takes 12.0 s", "9.00 s were predicted", "step 5", "step 6", "slowest"),
        *("rank 1, which came late", "predicted", "gradients", "1.91 MiB"),
    ):
        assert words in found.words, words


def test_the_page_hands_its_details_to_a_viewer_of_traces() -> None:
    text = page(_timeline())
    assert '<a href="trace.json" download target="_blank">' in text
    assert '<a href="https://ui.perfetto.dev" target="_blank">' in text
    assert "chrome://tracing" in text
    assert "<script" not in text


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
    assert name in _Reader(text).words


def test_a_page_of_a_large_job_stays_small_and_has_the_slowest_rank() -> None:
    steps = [Step(1, 0.0, 10.0)]
    slow = [span(Activity.FORWARD, 0, 9)]
    waits = [span(Activity.FORWARD, 0, 5), wait(5, 9)]
    ranks = [rank(n, slow if n == 70 else waits, steps, size=100) for n in range(100)]
    shown = re.findall(r'<tr><th scope="row">(\d+)</th>', page(Timeline(tuple(ranks))))
    assert len(shown) <= MOST_RANKS
    assert {"0", "70"} <= {*shown}


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
def test_a_browser_fetches_nothing(tmp_path: Path) -> None:
    write(_timeline(), tmp_path)
    looks: list[tuple[int, Any]] = [(1280, "light"), (390, "dark")]
    with chromium.browser(str(chromium.find())) as tab:
        for width, scheme in looks:
            tab.open((tmp_path / "timeline.html").as_uri(), width=width, scheme=scheme)
            assert not tab.errors()
            assert len(tab.requests()) == 1
            assert tab.run("document.documentElement.scrollWidth") <= width
