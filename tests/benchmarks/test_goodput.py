"""``benchmarks/goodput.py`` counts what a training has kept, and nothing twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.elastic.starting import STACKS
from tests.benchmarks.scripts import BENCHMARKS

RATES = {0: 1000.0, 1: 900.0, 4: 300.0}


def test_a_rate_is_the_number_of_faults_and_a_seed_draws_the_same_ones() -> None:
    from _goodput_run import schedule

    faults = schedule(4.0, 180.0, 3, "a seed")
    assert len(faults) == 12
    assert faults == schedule(4.0, 180.0, 3, "a seed") != schedule(4.0, 180.0, 3, "another")
    assert faults == sorted(faults), "in the order of time"
    assert all(0 <= at <= 180 and victim in range(3) for at, victim in faults)
    assert {victim for _, victim in schedule(60.0, 180.0, 3, "a seed")} == {0, 1, 2}
    assert schedule(0.0, 180.0, 3, "a seed") == []


def test_trainings_that_start_many_processes_do_not_run_beside_each_other() -> None:
    from goodput import order

    assert order(["sync:20", "diloco:10"], [0.0, 1.0, 2.0]) == [
        *(("sync:20", 0.0), ("diloco:10", 2.0)),
        *(("sync:20", 1.0), ("diloco:10", 1.0)),
        *(("sync:20", 2.0), ("diloco:10", 0.0)),
    ]


def test_repeated_steps_count_once_and_a_restart_at_the_end_is_waited_for() -> None:
    from _goodput_run import useful

    # After the third, it started again from a checkpoint.
    seen = [(0.0, 100), (1.0, 200), (2.0, 300), (9.0, 200), (10.0, 300)]
    assert useful(seen, 5.0) == (seen[0], seen[4]), "what was lost is no progress, nor its end"
    assert useful(seen, 10.5) is None
    assert useful(seen[:1], 0.0) is None


def test_steps_are_read_from_metrics_even_while_they_are_cut(tmp_path: Path) -> None:
    from _goodput_run import StepsWatched

    watched, file = StepsWatched(tmp_path, 512), tmp_path / "metrics.jsonl"
    assert watched.tokens() is None
    file.write_text("")
    assert watched.tokens() is None
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert watched.tokens() == 1024, "the last line is not whole yet"
    file.write_text('{"step": 1}\n')
    assert watched.tokens() == 512


def test_rounds_count_the_tokens_of_the_replicas_in_them(tmp_path: Path) -> None:
    from _goodput_run import RoundsWatched

    watched, file = RoundsWatched(tmp_path), tmp_path / "quorum.jsonl"
    assert watched.tokens() is None
    me = psutil.Process()
    with file.open("w") as lines:

        def write(**event: Any) -> None:
            lines.write(json.dumps(event) + "\n")
            lines.flush()

        write(event="started", replica=1, incarnation=0, pids=[1 << 30])
        assert watched.tokens() is None
        assert watched.process_of(1, [me]) is None, "another process"
        write(event="started", replica=1, incarnation=1, pids=[me.pid])
        assert watched.process_of(1, [me]) == me
        assert watched.process_of(0, [me]) is None
        write(event="round", round=1, replicas=[0, 1], tokens=[100, 60])
        lines.write('{"event": "round", "round"')
        lines.flush()
        assert watched.tokens() == 160, "the last line is not whole yet"
        lines.write(': 2, "replicas": [1], "tokens": [100]}\n')
        lines.flush()
        assert watched.tokens() == 260
        write(event="round", round=3, replicas=[1], tokens=[1])
        write(event="round", round=2, replicas=[0, 1], tokens=[100, 50])
        assert watched.tokens() == 310, "two rounds were lost, and one of them is repeated"


def test_processes_are_those_of_the_rank_that_is_to_be_hit(tmp_path: Path) -> None:
    from _goodput_run import StepsWatched

    sleep = "import sys, time; file = open(sys.argv[1], 'w'); print(flush=True); time.sleep(60)"
    folders = [tmp_path / f"0-{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", sleep, str(folder / STACKS)], stdout=subprocess.PIPE
        )
        for folder in folders
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.readline()  # it has opened its file
        processes = [psutil.Process(rank.pid) for rank in ranks]
        watched = StepsWatched(tmp_path, 1)
        found = watched.process_of(1, processes)
        assert found is not None
        assert found.pid == ranks[1].pid
        ranks[1].kill()
        os.waitid(os.P_PID, ranks[1].pid, os.WEXITED | os.WNOWAIT)  # and leave it a zombie
        assert watched.process_of(1, processes) is None, "it is dead"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def case(contender: str, speeds: dict[int, float]) -> list[dict[str, Any]]:
    """Make the runs of a contender, which learned for 100 s."""
    runs: list[dict[str, Any]] = []
    for rate, speed in speeds.items():
        end = round(100 * speed)
        losses = [[0, 5.0], [end, 3.0]] if rate == 0 else [[end, 3.3]]
        run = {"contender": contender, "per_minute": rate, "tokens": end, "seconds": 100.0}
        runs.append({**run, "busy": 0.5, "faults": [[1.0, 0]] * rate, "losses": losses})
    return runs


def document(*runs: dict[str, Any]) -> dict[str, Any]:
    """Make a document of one case."""
    settings = {"contenders": ["sync:20", "diloco:10"], "model": "m", "ranks": 4, "step": 0.5}
    settings |= {"seconds": 100.0, "at_once": 2, "pause": 15.0}
    return {"cases": [{"fault": "kill", "settings": settings, "runs": list(runs)}]}


@pytest.mark.parametrize(
    ("ours", "kept"),
    [
        ({0: 1000.0, 1: 500.0, 4: 890.0}, True),  # at 1 a minute, synchronous training does well
        ({0: 1000.0, 1: 950.0, 4: 870.0}, False),
    ],
)
def test_diloco_keeps_most_where_synchronous_training_loses_most(
    ours: dict[int, float], kept: bool
) -> None:
    from goodput import keeps_promise

    runs = [*case("sync:20", RATES), *case("diloco:10", ours)]
    [found] = document(*runs)["cases"]
    assert keeps_promise(found) is kept
    found["runs"].append({"contender": "sync:20", "per_minute": 9, "ended": "the training ended"})
    assert not keeps_promise(found), "a training that ended early"


def test_steps_are_stretched(tmp_path: Path) -> None:
    """In a process of its own, with a stand-in for the training loop."""
    recipes = tmp_path / "shardwise" / "app" / "recipes"
    core = recipes / "core"
    core.mkdir(parents=True)
    for folder in (core, *list(core.parents)[:3]):
        (folder / "__init__.py").touch()
    (core / "loop.py").write_text(
        "class Loop:\n"
        "    def run(self): return [self._accumulate(i) for i in range(2)]\n"
        "    def _accumulate(self, position): return position\n"
    )
    (recipes / "rank.py").write_text(
        "import sitecustomize, time\n"
        "from shardwise.app.recipes.core.loop import Loop\n"
        "began = time.monotonic()\n"
        "assert Loop().run() == [0, 1]\n"
        "print(time.monotonic() - began)\n"
    )
    paths = os.pathsep.join([str(BENCHMARKS / "stretched"), str(tmp_path)])
    seconds = []
    env = {"PYTHONPATH": paths, "GOODPUT_STEP": "0.5"}
    rank = ["-m", "shardwise.app.recipes.rank"]
    for of in (rank, ["-c", "import shardwise.app.recipes.rank"]):  # a rank, and its launcher
        command = [sys.executable, "-P", "-S", *of]
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        seconds.append(float(done.stdout))
    assert seconds[0] >= 1 > seconds[1]
