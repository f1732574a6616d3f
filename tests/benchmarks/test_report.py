"""``benchmarks/report.py`` keeps the documentation's tables equal to the stored numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.scripts import call_script

DOCS = Path(__file__).parents[2] / "docs"

TEXT = """# Benchmarks
before
<!-- results: run.json -->
old
<!-- end of results -->
after
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A document and one stored result."""
    table = {"title": "A made-up table", "columns": ["contender", "step s"]}
    table |= {"rows": [["shardwise", "2.000"]], "notes": ["made up"]}
    machine = {"cpu": "a processor", "cores": 2, "memory_gib": 4, "gpu": None}
    machine |= {"system": "Linux 6", "python": "3.11", "torch": "2.13"}
    content = {"schema": 1, "script": "step_time", "command": "python benchmarks/step_time.py"}
    content |= {"date": "2026-01-02", "machine": machine, "tables": [table]}
    (tmp_path / "run.json").write_text(json.dumps(content))
    (tmp_path / "doc.md").write_text(TEXT)
    return tmp_path


def report(folder: Path, *arguments: str) -> int:
    where = ["--document", str(folder / "doc.md"), "--results", str(folder)]
    return call_script("report.py", *where, *arguments).returncode


def test_tables_replace_what_is_between_the_markers(folder: Path) -> None:
    assert report(folder, "--check") == 1
    assert (folder / "doc.md").read_text() == TEXT, "--check changes nothing"
    assert report(folder) == 0
    text = (folder / "doc.md").read_text()
    assert text.startswith("# Benchmarks\nbefore\n<!-- results: run.json -->")
    assert text.endswith("<!-- end of results -->\nafter\n")
    assert "old" not in text
    assert "| shardwise | 2.000 |\n\n- made up\n" in text
    assert "a processor, 2 cores" in text
    assert report(folder, "--check") == 0


def test_missing_result_is_one_clear_line(folder: Path) -> None:
    (folder / "run.json").unlink()
    assert report(folder) == 2


def test_the_summary_shows_what_is_stored_beside_torch(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text("before\n<!-- summary -->\nto replace\n<!-- end of summary -->\nafter\n")

    assert call_script("report.py", "--document", str(document)).returncode == 0

    text = document.read_text()
    assert text.startswith("before\n<!-- summary -->\n\n| | Shardwise | torch | ratio |\n")
    assert text.endswith("|\n\n<!-- end of summary -->\nafter\n")
    assert "to replace" not in text
    assert "| 0.71 s | 1.07 s | 0.66 |" in text


def test_the_picture_of_the_summary_shows_the_ratios_of_its_table() -> None:
    table = (DOCS / "benchmarks.md").read_text().split("<!-- end of summary -->")[0]
    ratios = re.findall(r"\| (\d\.\d\d) \|$", table, re.MULTILINE)

    labels = re.findall(r">(\d\.\d\d)</text>", (DOCS / "images" / "benchmarks.svg").read_text())
    assert labels == ratios


def test_documentation_shows_the_stored_results() -> None:
    done = call_script("report.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
