"""Each benchmark runs in its smallest form, and its table has a row for all that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import call_script
from tests.hosts.network import needs_hosts

ROUNDS = "--rounds 2"
STEPS = f"{ROUNDS} --steps 1 --warmup 1 --tokens 16"
CASES = {
    "step_time": f"--params tiny {STEPS} --contenders ours,fsdp2,ddp,floor,copies",
    "scaling": f"--ranks 1,2 --params tiny --groups 4 {STEPS} --worlds resident",
    "strategies": f"--gbit 0.1 --params tiny {STEPS} --local-steps 5 "
    "--contenders hybrid,full-int8,diloco-int8,fsdp2-hybrid,floor",
    "memory": "--params tiny --contenders ours,fsdp2,ours-in-backward --tokens 16",
    "overhead": f"--ranks 2 --groups 3 --build 4 --steps 2 {ROUNDS}",
    "checkpoint": f"--params tiny --cold {ROUNDS}",
    "checkpoint_stall": f"--params tiny {ROUNDS} --steps 2 --tokens 8",
    "diloco": "--start 1 --steps 4 --every 3 --batch 1 --length 16 --contenders int8",
    "optimizers": f"--params tiny {ROUNDS} --steps 2 --contenders ours-adamw,fsdp2-adamw",
    "plan_memory": "--model tiny --size 512 --transport c10d --runs 1",
    "plan_time": "--cases 4 --rounds 1 --seconds 0.1",
    "goodput": "--contenders diloco:2 --rates 0 --ranks 2 --step 0.01 --seconds 1 --length 16",
}
ROWS = {
    "step_time": [["shardwise", "torch FSDP2", "torch DDP", "compute only", "compute and copies"]],
    "scaling": [["1", "2"], ["0"], ["4"]],
    "strategies": [
        [
            *("HYBRID_SHARD", "FULL_SHARD, int8, kept", "DiLoCo, int8", "torch FSDP2, hybrid"),
            "compute only",
        ]
    ],
    "memory": [["formula", "shardwise", "torch FSDP2", "shardwise, in backward"]],
    "overhead": [["shardwise", "torch FSDP2"], ["shardwise", "torch FSDP2"]],
    "checkpoint": [
        [f"{name}, {what}" for what in ("save", "load") for name in ("shardwise", "torch DCP")]
    ],
    "checkpoint_stall": [["shardwise, save", "shardwise, async_save", "torch DCP, async_save"]],
    "diloco": [["synchronous", "DiLoCo, H = 3, int8, momentum 0.9"]],
    "optimizers": [["torch AdamW, fused"] * 2, ["torch AdamW, fused"] * 2],
    "plan_memory": [["tiny, 512 tokens, fp32, full, c10d"]],
    "plan_time": [["5m, 512 tokens, fp32, full, auto"]],
    "goodput": [["DiLoCo, H = 2"]],
}
#: Trainings of a few steps keep none of what is promised of long ones.
FAILS = {"memory", "diloco"}
PICTURES = {"scaling": "shardwise", "strategies": "0.1 Gbit/s", "goodput": "DiLoCo, H = 2"}
_MARKS = {"strategies": needs_hosts}
#: Those that ``make test`` runs; the others start many processes.
_QUICK = {"optimizers", "strategies", "diloco"}


def _marks(script: str) -> list[Any]:
    own = [_MARKS[script]] if script in _MARKS else []
    return own if script in _QUICK else [*own, pytest.mark.long]


@pytest.mark.parametrize("script", [pytest.param(each, marks=_marks(each)) for each in CASES])
def test_a_benchmark_runs_and_shows_its_table(script: str, tmp_path: Path) -> None:
    from report import SHOWN

    path, picture = tmp_path / "raw.json", tmp_path / "picture.svg"
    arguments = [*CASES[script].split(), "--json", str(path)]
    if script in PICTURES:
        arguments += ["--picture", str(picture)]
    done = call_script(f"{script}.py", *arguments)
    assert done.returncode == 0 or script in FAILS, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert content["script"] == script
    assert str(path) in content["command"]
    tables = SHOWN[script](content)
    for table, names in zip(tables, ROWS[script], strict=False):
        assert [row[0] for row in table.rows if row[0] in names] == names, table.markdown()
        assert table.title in " ".join(done.stdout.split()), done.stdout
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert not [note for note in table.notes if "DIFFER" in note]
    if script in PICTURES:
        assert PICTURES[script] in picture.read_text()


def test_plans_are_held_against_published_figures() -> None:
    import plan_published

    assert plan_published.ROWS


@needs_hosts
def test_bad_options_are_refused_at_once() -> None:
    done = call_script("step_time.py", "--contenders", "ours,horovod")
    assert done.returncode == 2
    assert "'horovod' is not one of ours, ours-ahead" in done.stderr
