"""Run the benchmarks as people do: as scripts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_script() -> Run:
    """``run_script("step_time.py", "--ranks", "2")`` returns the finished process."""

    def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(BENCHMARKS / script), *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test import the modules that the scripts share."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
