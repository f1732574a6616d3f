"""``benchmarks/step_time.py`` measures contenders that train the same."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import Run

SMALL = ["--params", "tiny", "--tokens", "16", "--rounds", "2", "--steps", "1", "--warmup", "4"]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the script once, for ours, FSDP2 and the floor."""
    import subprocess
    import sys

    from tests.benchmarks.conftest import BENCHMARKS

    path = tmp_path_factory.mktemp("step_time") / "raw.json"
    arguments = [*SMALL, "--contenders", "ours,fsdp2,floor", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "step_time.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses: OK" in done.stdout, done.stdout
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded
