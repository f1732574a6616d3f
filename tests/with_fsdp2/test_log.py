"""Metrics of any program reach the pages of ``shardwise watch`` and ``compare``."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import shardwise
from shardwise.runs.snapshot import RunReader
from tests.harness import run_ranks


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_a_step(tmp_path: Path) -> None:
    for step in range(3):
        shardwise.log(tmp_path, step=step, loss=torch.tensor(0.5 + step), tokens=10, lr=1e-3)
    assert _lines(tmp_path)[2] == {"step": 2, "loss": 2.5, "tokens": 10, "lr": 1e-3}
    found = RunReader(tmp_path).read()
    assert found["latest"]["loss"] == 2.5
    assert found["curves"]["values"]["loss"]["mean"] == [0.5, 1.5, 2.5]


def test_what_is_not_finite_is_no_number_of_json(tmp_path: Path) -> None:
    shardwise.log(tmp_path, step=1, loss=float("nan"))
    assert _lines(tmp_path) == [{"step": 1, "loss": None}]


PROGRAM = """
import sys, shardwise
for step in range(int(sys.argv[1]), int(sys.argv[2])):
    shardwise.log(step=step, loss=step / 2)
"""


def _program(rank: int, world_size: int, folder: Path, *steps: int) -> None:
    os.chdir(folder)
    sys.argv = ["mine.py", *map(str, steps)]
    runpy.run_path("mine.py", run_name="__main__")


def test_a_program_that_resumes_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    for steps in [(1, 6), (4, 8)]:
        run_ranks(_program, 1, tmp_path, *steps, backend=None)
    assert [line["step"] for line in _lines(tmp_path / "runs" / "mine")] == list(range(1, 8))


@pytest.mark.parametrize("value", ["high", torch.ones(2), None])
def test_what_is_no_number_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"loss: found .*, expected a number"):
        shardwise.log(tmp_path, step=1, loss=value)


@pytest.mark.parametrize("step", [-1, True, 1.5])
def test_what_is_no_step_is_refused(step: Any, tmp_path: Path) -> None:
    expected = "step: found .*, expected (the number of a step|a whole number)"
    with pytest.raises((TypeError, ValueError), match=expected):
        shardwise.log(tmp_path, step=step, loss=1.0)


def _logged(rank: int, world_size: int, folder: Path) -> None:
    shardwise.log(folder, step=1, loss=float(rank))


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    run_ranks(_logged, 2, tmp_path)
    assert _lines(tmp_path) == [{"step": 1, "loss": 0.0}]


def test_a_part_of_a_number_is_refused(tmp_path: Path, threads: Any) -> None:
    def be(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        part = DTensor.from_local(torch.tensor(1.0), mesh, [Partial()])
        with pytest.raises(ValueError, match=r"norm: .*pass norm\.full_tensor\(\)"):
            shardwise.log(tmp_path, step=1, norm=part)
        shardwise.log(tmp_path, step=1, norm=part.full_tensor())

    threads(be, 2)
    assert '"norm": 2.0' in (tmp_path / "metrics.jsonl").read_text()
