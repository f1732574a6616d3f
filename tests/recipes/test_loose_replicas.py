"""``train lm`` with replicas that are worlds of their own: one is killed, one is paused."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.programs import Program, shell_environment, start_program
from tests.recipes.small import write_model, write_text

_WAIT = 150.0  # seconds that anything may take on a busy machine


def events(folder: Path, kind: str, **values: Any) -> list[dict[str, Any]]:
    """Return what happened of a kind."""
    file = folder / "quorum.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [each for each in found if {**each, "event": kind, **values} == each]


def wait_until(happened: Callable[[], object], program: Program) -> None:
    deadline = time.monotonic() + _WAIT
    while not happened():
        assert program.poll() is None, "it has ended before"
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_a_killed_replica_comes_back_while_the_others_train(tmp_path: Path) -> None:
    write_model(tmp_path)
    data = write_text(tmp_path)
    words = (
        f"-m shardwise train lm --model config.json --data {data} --seq-length 16 --batch-size 2 "
        "--steps 4000 --local-steps 4 --nproc 4 --replicas 2 --strategy diloco --device cpu "
        "--diloco-deadline 3 --max-restarts 1 --eval-every 0 --checkpoint-every 0 "
        "--sample-tokens 0 --out run"
    ).split()
    out = tmp_path / "run"
    with (tmp_path / "said").open("w") as said:
        program = start_program(words, folder=tmp_path, env=shell_environment(), out=said, err=said)
        wait_until(lambda: events(out, "round", replicas=[0, 1]), program)
        [first] = events(out, "started", replica=1)
        os.kill(first["pids"][1], signal.SIGKILL)
        wait_until(lambda: events(out, "joined", replica=1, incarnation=1), program)
        [again] = events(out, "joined", replica=1, incarnation=1)
        wait_until(
            lambda: [e for e in events(out, "round", replicas=[0, 1]) if e["time"] > again["time"]],
            program,
        )
        program.send_signal(signal.SIGTERM)
        assert program.wait(_WAIT) == 128 + signal.SIGTERM
    [lost] = events(out, "lost")
    assert (lost["replica"], lost["why"]) == (1, "was killed by SIGKILL")
    alone = [e for e in events(out, "round", replicas=[0]) if e["time"] > lost["time"]]
    assert alone, "the other one did not go on meanwhile"
    assert again["source"] == 0
    for folder in (out, out / "replicas" / "1"):
        assert len(list((folder / "checkpoints").iterdir())) == 1
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == sorted(steps)
    text = (tmp_path / "said").read_text()
    assert "replica 1 was killed by SIGKILL" in text
    assert "replica 1 is back in round" in text
    assert text.count("Stopped by SIGTERM") == 1
    assert text.count("was lost in round") == 1, "those that stop in order are not lost"
