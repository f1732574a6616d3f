"""Run the benchmarks as people do: as scripts."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

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


def call_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the ``main()`` of ``benchmarks/<script>`` in this process.

    It returns what :func:`run_script` does, without the seconds that importing torch takes. The
    ranks that it starts are forked from the server of the other tests, which has done so already.
    """
    module = importlib.import_module(Path(script).stem)
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = module.main()
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())
