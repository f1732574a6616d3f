"""``benchmarks/step_time.py`` tells when contenders train differently, and leaves no process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.benchmarks.scripts import BENCHMARKS, run_script

STORED = BENCHMARKS / "results" / "2026-11-21-gloo-step-time-150m.json"
WARMUP, STEPS = 4, 1  # of the stored document


@pytest.fixture
def case() -> dict[str, Any]:
    """A case of ours, FSDP2, DDP and the floor, as it was measured."""
    found: dict[str, Any] = json.loads(STORED.read_text())["cases"][1]
    return {**found, "errors": {}}


def _still_there(marker: str, seconds: float = 10.0) -> list[int]:
    """Processes of the script, once those had time that end as soon as they hear of its end."""
    deadline = time.monotonic() + seconds
    while True:
        left = [
            process.pid
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get("STEP_TIME_TEST") == marker
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


@pytest.mark.long
def test_the_script_leaves_no_process_behind(tmp_path: Path) -> None:
    marker = str(tmp_path)  # inherited by every process that the script starts
    done = run_script(
        *("step_time.py", "--params", "tiny", "--tokens", "16", "--dtype", "bf16"),
        *("--rounds", "1", "--steps", "1", "--warmup", "1", "--contenders", "ours,floor"),
        env={"STEP_TIME_TEST": marker},
    )
    left = _still_there(marker)
    assert not left, f"the script has returned and left processes {left}"
    assert done.returncode == 0, done.stdout + done.stderr


def test_losses_agree_and_fall(case: dict[str, Any]) -> None:
    from _turns import disagreement, losses
    from step_time import table, wrong

    assert disagreement(case) is None
    assert not wrong(case)
    assert table(case).notes[0] == "losses: OK, equal to four decimals"
    assert wrong({**case, "errors": {"ddp": "out of memory"}}) == {"ddp": "out of memory"}
    ours = losses(case, "ours")
    assert len(ours) == WARMUP + 5 * STEPS
    assert ours[4] < ours[0], f"the first batch came twice and its loss did not fall: {ours}"


@pytest.mark.parametrize("off", [1e-4, float("nan")])
def test_contender_that_computes_something_else_is_named(case: dict[str, Any], off: float) -> None:
    from _turns import disagreement
    from step_time import table, wrong

    case["contenders"]["ddp"][1]["steps"][0][0]["loss"] += 2 * off  # on one rank of two
    found = disagreement(case)
    assert found is not None
    assert f"ddp differs from fsdp2 first at step {WARMUP + STEPS}" in found
    assert wrong(case)
    assert f"losses: DIFFERENT: {found}" in table(case).notes[0]


def test_floor_need_only_start_alike(case: dict[str, Any]) -> None:
    from _turns import disagreement

    case["contenders"]["floor"][0]["warmup"][1][0]["loss"] += 1
    assert disagreement(case) is None
    case["contenders"]["floor"][0]["warmup"][0][0]["loss"] += 1
    assert "floor differs from fsdp2 first at step 0" in str(disagreement(case))
