"""Names of published weights are those of one test."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "names").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "names"))
    monkeypatch.setattr(tempfile, "tempdir", None)
