"""What the folder of a run says: complete, under way, old, damaged."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.runs import snapshot
from shardwise.runs.snapshot import RunReader
from tests.runs import folders


def read(root: Path) -> dict[str, Any]:
    return RunReader(root).read()


def test_a_finished_run_says_all_that_a_page_shows(tmp_path: Path) -> None:
    run = read(folders.make(tmp_path / "lm"))
    assert (run["name"], run["state"], run["model"]) == ("lm", "finished", "llama-tiny")
    assert run["problems"] == []
    assert run["latest"]["step"] == 200
    assert set(run["curves"]["values"]) == {
        *("loss", "grad_norm", "lr", "memory_mib", "tokens_per_s", "validation_loss")
    }
    assert run["config"]["train.optimizer.lr"] == 0.002
    assert run["samples"] == [{"name": "sample.txt", "text": "Once upon a time\n"}]


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm", sessions=[folders.session(status="running")])
    old = time.time() - 3600
    for name in ("run.json", "metrics.jsonl"):
        os.utime(root / name, (old, old))
    assert read(root)["state"] == "lost", "nobody trains, and nobody said how it ended"
    with (root / "run.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read(root)["state"] == "running"


@pytest.mark.parametrize(
    ("host", "state"), [(socket.gethostname(), "lost"), ("another-host", "running")]
)
def test_a_run_whose_lock_is_free_on_this_host_was_killed(
    tmp_path: Path, host: str, state: str
) -> None:
    root = folders.make(tmp_path / "lm", sessions=[folders.session(status="running")])
    (root / "run.lock").write_text(f"process 1 on {host}\n")
    assert read(root)["state"] == state, "its last step was just now"


def test_a_run_whose_lock_cannot_be_seen_is_running_while_it_writes(tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm", sessions=[folders.session(status="running")])
    assert read(root)["state"] == "running"


def test_new_steps_are_added_to_those_before(tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm", steps=3)
    reader = RunReader(root)
    reader.read()
    with (root / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(folders.line(4)) + "\n")
    assert reader.read()["curves"]["steps"] == [1, 2, 3, 4]


def test_damage_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm", steps=3)
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": "a"}\nnoise\n' + json.dumps(folders.line(5)) + "\n{")
    (root / "run.json").write_text('{"recipe": "lm", "sess')
    run = read(root)
    assert run["curves"]["steps"] == [1, 2, 3, 5]
    metrics, record = run["problems"]
    assert metrics == "metrics.jsonl: left out 2 damaged lines, of which the first is line 4"
    assert "run.json: is not valid JSON" in record
    assert run["state"] == "unknown"


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"sessions": "none", "config": [], "model": 3, "data": None, "best": [1]},
        {"sessions": [1, None, {}, {"mesh": 3, "host": "x", "status": 7}], "config": {"a": [{}]}},
    ],
)
def test_a_record_of_the_wrong_form_is_read_as_far_as_it_goes(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(record))
    run = read(tmp_path)
    assert run["problems"] == []
    assert run["curves"]["steps"] == []


def test_links_pipes_and_large_files_are_left_alone(tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for name in ("sample.txt", "config.yaml"):
        (root / name).unlink()
    (root / "sample.txt").symlink_to(secret)
    os.mkfifo(root / "config.yaml")
    with (root / "confusion.png").open("wb") as file:
        file.truncate(1 << 30)
    run = read(root)
    assert "secret" not in json.dumps(run["samples"])
    assert len(run["problems"]) == 3
    assert (run["samples"], run["options"], run["images"]) == ([], "", [])


def test_a_folder_that_goes_away_while_it_is_watched_is_named(tmp_path: Path) -> None:
    reader = RunReader(root := tmp_path / "lm")
    assert "no such folder" in reader.read()["problems"][0]
    root.symlink_to("lm")
    assert "no such folder" in reader.read()["problems"][0]
    root.unlink()
    folders.make(root)
    assert reader.read()["problems"] == []


def test_a_checkpoint_that_is_deleted_while_it_is_looked_at_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folders.make(tmp_path / "lm")
    checkpoint = root / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)

    def delete(path: Path) -> bool:
        path.rmdir()
        return True

    monkeypatch.setattr(snapshot, "is_complete", delete)
    assert read(root)["checkpoints"] == []


def test_any_number_of_names_takes_bounded_room(tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm", steps=1)
    with (root / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step":{i},"name{i}":1,"loss":{i}}}\n' for i in range(2, 500))
    latest = read(root)["latest"]
    assert (latest["step"], latest["loss"]) == (499, 499)
    assert len(latest) < 100
