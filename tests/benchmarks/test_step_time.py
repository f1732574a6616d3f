"""``benchmarks/step_time.py`` times contenders that train the same, and tells when they do not."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import psutil
import pytest

from tests.benchmarks.scripts import run_script

ROUNDS, STEPS, WARMUP = 2, 2, 3


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


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of ours, FSDP2, DDP and the floor on a miniature model; it must succeed."""
    path = tmp_path_factory.mktemp("step_time") / "raw.json"
    marker = str(path)  # inherited by every process that the script starts
    done = run_script(
        "step_time.py",
        *("--params", "tiny", "--tokens", "16", "--dtype", "bf16"),
        *("--rounds", str(ROUNDS), "--steps", str(STEPS), "--warmup", str(WARMUP)),
        *("--contenders", "ours,fsdp2,ddp,floor,copies", "--json", str(path)),
        env={"STEP_TIME_TEST": marker},
    )
    left = _still_there(marker)
    assert not left, f"the script has returned and left processes {left}"
    assert done.returncode == 0, done.stdout + done.stderr
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.mark.long
def test_document_tells_where_and_how_it_was_measured(document: dict[str, Any]) -> None:
    assert document["script"] == "step_time"
    assert document["command"].startswith("python benchmarks/step_time.py --params tiny")
    assert {"cpu", "cores", "torch", "python"} <= document["machine"].keys()


@pytest.mark.long
def test_every_contender_takes_the_steps_that_were_asked_for(document: dict[str, Any]) -> None:
    (case,) = document["cases"]
    assert list(case["contenders"]) == ["ours", "fsdp2", "ddp", "floor", "copies"]
    for name, turns in case["contenders"].items():
        assert len(turns) == ROUNDS, name
        assert [len(turn["steps"]) for turn in turns] == [STEPS] * ROUNDS, name
        assert sum(len(turn["warmup"]) for turn in turns) == WARMUP, f"{name}: once in its life"
        for step in (step for turn in turns for step in turn["steps"]):
            assert len(step) == case["ranks"] == 2, name
            for rank in step:
                parts = rank["forward"] + rank["backward"] + rank["optimizer"]
                assert 0 < parts <= rank["seconds"] + 1e-9, (name, rank)


@pytest.mark.long
def test_losses_agree_and_fall(document: dict[str, Any]) -> None:
    from _turns import disagreement, losses

    (case,) = document["cases"]
    assert disagreement(case) is None
    ours = losses(case, "ours")
    assert len(ours) == WARMUP + ROUNDS * STEPS
    assert ours[4] < ours[0], f"the first batch came twice and its loss did not fall: {ours}"


@pytest.mark.long
@pytest.mark.parametrize("wrong", [1e-4, float("nan")])
def test_contender_that_computes_something_else_is_named(
    document: dict[str, Any], wrong: float
) -> None:
    from _turns import disagreement

    case = copy.deepcopy(document["cases"][0])
    case["contenders"]["ddp"][1]["steps"][0][0]["loss"] += 2 * wrong  # on one rank of two
    found = disagreement(case)
    assert found is not None
    assert f"ddp differs from fsdp2 first at step {WARMUP + STEPS}" in found


@pytest.mark.long
def test_floor_need_only_start_alike(document: dict[str, Any]) -> None:
    from _turns import disagreement

    case = copy.deepcopy(document["cases"][0])
    case["contenders"]["floor"][0]["warmup"][1][0]["loss"] += 1
    assert disagreement(case) is None
    case["contenders"]["floor"][0]["warmup"][0][0]["loss"] += 1
    assert "floor differs from fsdp2 first at step 0" in str(disagreement(case))
