"""Fixtures of the tests that call the command line in this process."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def no_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder to be in, in an environment without a world."""
    for name in ("RANK", "WORLD_SIZE", "SHARDWISE_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path
