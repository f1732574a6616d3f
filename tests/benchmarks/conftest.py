"""Let tests import the modules that the benchmark scripts share."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.fixture(autouse=True)
def _shared_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
