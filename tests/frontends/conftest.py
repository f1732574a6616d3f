"""What the launcher sets for ranks, for those that are threads."""

from __future__ import annotations

import pytest


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on each host."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
