"""``benchmarks/scaling.py`` tells what a step takes beyond computing, along three axes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
    from _scaling_tables import along, value

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
def test_communication_is_the_difference_within_a_round(document: dict[str, Any]) -> None:
    from _scaling_tables import scaling_tables

    changed = copy.deepcopy(document)
    changed["cases"] = [case for case in changed["cases"] if case["axis"] == "groups"]
    seconds = {"ours": [0.3, 0.5], "fsdp2": [0.6, 0.9], "floor": [0.2, 0.3]}
    for name, rounds in seconds.items():
        for turn, slowest in zip(changed["cases"][0]["contenders"][name], rounds, strict=True):
            turn["steps"][0][0]["seconds"] = slowest
            turn["steps"][0][1]["seconds"] = slowest / 2
    (table,) = scaling_tables(changed)
    assert table.columns[1:] == [
        *("compute only ms", "shardwise ms", "quartiles", "torch FSDP2 ms", "quartiles", "x FSDP2")
    ]
    # In the rounds 0.1 and 0.2 against 0.4 and 0.6.
    assert table.rows == [["4", "250", "150", "125 to 175", "500", "450 to 550", "0.29"]]


@pytest.mark.long
def test_a_difference_of_losses_is_told_and_fails(folder: Path, document: dict[str, Any]) -> None:
    document["cases"][1]["contenders"]["ours"][1]["steps"][0][0]["loss"] += 1
    wrong = folder / "wrong.json"
    wrong.write_text(json.dumps(document))
    done = call_script("scaling.py", "--stored", str(wrong))
    assert done.returncode == 1
    assert "losses at 2 ranks DIFFER: ours differs from fsdp2" in done.stdout


@pytest.mark.long
def test_stored_documents_give_the_same_picture(folder: Path, document: dict[str, Any]) -> None:
    """From several documents, in any order: nothing in it is of the day on which it is drawn."""
    names = []
    for axis in ("groups", "params", "ranks"):
        part = {**document, "cases": [c for c in document["cases"] if c["axis"] == axis]}
        (folder / f"{axis}.json").write_text(json.dumps(part))
        names.append(str(folder / f"{axis}.json"))
    again = folder / "again.svg"
    done = call_script("scaling.py", "--stored", ",".join(names), "--picture", str(again))
    assert done.returncode == 0, done.stdout + done.stderr
    assert again.read_text() == (folder / "picture.svg").read_text()


@pytest.mark.long
def test_picture_says_what_it_shows_and_suits_dark_screens(folder: Path) -> None:
    text = (folder / "picture.svg").read_text()
    said = "".join(ElementTree.fromstring(text).itertext())
    for words in ("shardwise", "torch FSDP2", "ranks", "million parameters", "groups, 2 ranks"):
        assert words in said
    assert "prefers-color-scheme: dark" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--axes", "ranks,hosts"], "'hosts' is not one of ranks, params, groups"),
        (["--groups", "5"], "'5' is not one of 4, 16, 64, 256"),
        (["--stored", "nowhere.json"], "there is no file 'nowhere.json'"),
    ],
)
def test_bad_options_are_refused_at_once(arguments: list[str], complaint: str) -> None:
    done = call_script("scaling.py", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
