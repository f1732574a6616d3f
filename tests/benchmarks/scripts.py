"""Run the benchmarks as people do: as scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_script(
    script: str, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``benchmarks/<script>`` and return the finished process, output included.

    Output goes to files: a pipe would stay open, and hide it, if a process outlived the script.
    """
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done = subprocess.run(
            command,
            stdout=out,
            stderr=err,
            timeout=240,
            check=False,
            env={**os.environ, **(env or {})},
        )
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, out.read(), err.read())
