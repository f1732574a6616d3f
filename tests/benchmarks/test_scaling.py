"""``benchmarks/scaling.py`` tells what a step takes beyond computing, along three axes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import call_script

ROUNDS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run over all axes leaves, with the smallest models."""
    path = tmp_path_factory.mktemp("scaling")
    done = call_script(
        "scaling.py",
        *("--ranks", "1,2", "--params", "tiny", "--groups", "4", "--tokens", "16"),
        *("--rounds", str(ROUNDS), "--steps", "1", "--warmup", "1", "--worlds", "resident"),
        *("--json", str(path / "raw.json"), "--picture", str(path / "picture.svg")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Communication part of a step: groups" in done.stdout
    return path


@pytest.fixture
def document(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "raw.json").read_text())
    return loaded


@pytest.mark.long
def test_document_holds_a_case_for_each_point_of_each_axis(document: dict[str, Any]) -> None:
    from _tables import along, value

    assert document["script"] == "scaling"
    points = {axis: [value(case) for case in along(document, axis)] for axis in ("ranks", "groups")}
    assert points == {"ranks": [1, 2], "groups": [4]}
    assert [case["params"] for case in along(document, "params")] == ["tiny"]
    for case in document["cases"]:
        assert case["optimizer"] == "sgd"
        assert {name: len(turns) for name, turns in case["contenders"].items()} == {
            "ours": ROUNDS,
            "fsdp2": ROUNDS,
            "floor": ROUNDS,
        }


@pytest.mark.long
def test_a_difference_of_losses_is_told_and_fails(folder: Path, document: dict[str, Any]) -> None:
    document["cases"][1]["contenders"]["ours"][1]["steps"][0][0]["loss"] += 1
    wrong = folder / "wrong.json"
    wrong.write_text(json.dumps(document))
    done = call_script("scaling.py", "--stored", str(wrong))
    assert done.returncode == 1
    assert "losses at 2 ranks DIFFER: ours differs from fsdp2" in done.stdout
