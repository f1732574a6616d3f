"""Reports that several files of tests show."""

from __future__ import annotations

import pytest

from shardwise.insight.inspect.report import Report
from tests.inspect.plans import Wide, planned_report


@pytest.fixture(scope="session")
def report() -> Report:
    """A small net on eight ranks, with uneven, empty and replicated parts."""
    return planned_report("dp=2,tp=4")


@pytest.fixture(scope="session")
def large() -> Report:
    """Twelve layers on 512 ranks."""
    return planned_report("dp_replicate=4,dp_shard=16,tp=8", Wide)
