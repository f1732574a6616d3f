"""The page of runs, as text: whatever a run says stays text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shardwise.runs.page import Updates, page
from shardwise.runs.snapshot import RunReader
from tests.runs import folders


def data_of(text: str) -> Any:
    """The data of a page, as its script reads them."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(found)


def test_a_page_says_what_the_folder_says_and_loads_nothing(tmp_path: Path) -> None:
    run = RunReader(folders.make(tmp_path / "lm")).read()
    text = page("lm", [run], Updates.NEVER)
    assert data_of(text)["runs"] == [run]
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text)
    assert "default-src 'none'" in text


def test_what_a_run_says_cannot_leave_its_place(tmp_path: Path) -> None:
    hostile = '</script><script>alert(1)</script><!--"\u2028'
    root = folders.make(tmp_path / "lm", model={"name": hostile}, config={hostile: hostile})
    (root / "sample.txt").write_text(hostile)
    text = page(hostile, [RunReader(root).read()], Updates.NEVER)
    assert "<script>alert" not in text
    assert "<!--" not in text
    assert data_of(text)["runs"][0]["model"] == hostile
    assert text.count("<script") == text.count("</script>") == 3


def test_numbers_that_json_does_not_have_become_none() -> None:
    run = {"a": [float("inf"), float("nan"), 1.5]}
    assert data_of(page("lm", [run], Updates.NEVER))["runs"] == [{"a": [None, None, 1.5]}]


def test_a_page_that_a_training_writes_says_when_it_did(tmp_path: Path) -> None:
    run = RunReader(folders.make(tmp_path / "lm")).read()
    for updates in Updates:
        assert ("written" in data_of(page("lm", [run], updates))) == (updates is Updates.RELOAD)
