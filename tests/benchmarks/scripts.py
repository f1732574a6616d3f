"""Run the benchmarks as people do: as scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``benchmarks/<script>`` and return the finished process, output included."""
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
