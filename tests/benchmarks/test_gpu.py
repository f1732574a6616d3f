"""``benchmarks/gpu.py`` starts every part, and survives those that fail.

On a machine without a GPU this holds what can be held: the programs are sound, and their results
are read and shown. The figures in these tests are made up.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.benchmarks.scripts import BENCHMARKS, call_script

RESULTS = BENCHMARKS / "results"
NAMES = (
    *("environment", "tests", "losses", "steps", "overhead", "graph"),
    *("sanitizer", "ranks", "offload", "largest"),
)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


# Those that start worlds take long on CPUs, too: `make test` runs two, below, and `make gpu DRY=1`
# all of them.
@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_part_starts_on_cpus_and_writes_its_results(name: str, tmp_path: Path) -> None:
    from _gpu_tables import gpu_tables

    done = call_script("gpu.py", "--dry", "--part", name, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]
    assert cases, "it has measured something"
    assert [case["error"] for case in cases] == [None] * len(cases)
    part = {"part": name, "status": "done", "seconds": 1.0, "error": None, "cases": cases}
    tables = gpu_tables({"machine": {"device": "cpu"}, "parts": [part]})
    assert f"| {name} | done |" in tables[0].markdown()


def test_a_run_ends_in_a_report_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parts are measured in this process, which saves the import of torch."""
    import gpu

    def watch(command: list[str], part: str, seconds: float, out: Path) -> dict[str, Any]:
        interpreter, script, *arguments = command
        assert (interpreter, Path(script).name) == (sys.executable, "gpu.py")
        assert call_script("gpu.py", *arguments).returncode == 0
        lines = (out / f"{part}.jsonl").read_text().splitlines()
        found = {"part": part, "status": "done", "seconds": seconds, "error": None}
        return {**found, "cases": [json.loads(line) for line in lines]}

    monkeypatch.setattr(gpu, "watch", watch)
    done = call_script("gpu.py", "--dry", "--only", "environment,losses", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "report.json").read_text())
    assert [part["part"] for part in content["parts"]] == ["environment", "losses"]
    for part in content["parts"]:
        assert part["cases"], "it has measured something"
        assert [case["error"] for case in part["cases"]] == [None] * len(part["cases"])
    assert content["machine"]["device"] == "cpu"
    assert "a dry run on CPUs: no figure below says anything about speed" in done.stdout
    rows = content["tables"][0]["rows"]
    assert [row[:2] for row in rows] == [["environment", "done"], ["losses", "done"]]


def test_all_parts_are_tried() -> None:
    from _gpu_parts import PARTS
    from _gpu_tables import TABLES

    assert tuple(PARTS) == NAMES
    assert set(TABLES) == set(PARTS), "each has a table"


def test_without_a_gpu_it_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = call_script("gpu.py")
    assert done.returncode == 2
    assert "make gpu DRY=1" in done.stderr


# -- the runner: parts that end in any way ---------------------------------------------------------


def _watched(program: str, out: Path, seconds: float = 60) -> dict[str, Any]:
    from gpu import watch

    return watch([sys.executable, "-c", program], "steps", seconds, out)


def _writes(out: Path, text: str) -> str:
    return f"import pathlib; pathlib.Path({str(out / 'steps.jsonl')!r}).write_text({text!r})\n"


_GOOD = '{"key": "first", "error": null}\n'
_BAD = '{"key": "second", "error": "trace\\ntwo tests fail"}\n'


def test_a_part_that_fails_or_dies_leaves_what_it_has_measured(tmp_path: Path) -> None:
    found = _watched(_writes(tmp_path, _GOOD), tmp_path)
    assert (found["status"], found["error"], len(found["cases"])) == ("done", None, 1)

    found = _watched(_writes(tmp_path, _GOOD + _BAD), tmp_path)
    assert (found["status"], found["error"]) == ("failed", "cases failed: second")
    assert [case["key"] for case in found["cases"]] == ["first", "second"]

    dies = "import sys; print('the last words'); sys.exit(3)"
    found = _watched(_writes(tmp_path, _GOOD) + dies, tmp_path)
    assert (found["status"], len(found["cases"])) == ("died", 1)
    assert "exit code 3" in found["error"]
    assert "the last words" in found["error"]

    found = _watched(dies, tmp_path)
    assert found["cases"] == [], "those of the run before are gone"


def test_parts_end_in_any_way_and_the_next_one_begins() -> None:
    from _gpu_parts import Part
    from gpu import run_all

    def watched(part: Part, seconds: float) -> dict[str, Any]:
        error = f"{part.name} is made up" if part.name == "steps" else None
        status = "failed" if error else "done"
        return {"part": part.name, "status": status, "seconds": 1.0, "error": error, "cases": []}

    parts = [Part(name, "?", 60, lambda *_: None) for name in ("steps", "graph")]
    said: list[str] = []
    found = list(run_all(parts, 600, watched, said.append))
    assert [part["status"] for part in found] == ["failed", "done"]
    assert said == ["steps        failed, 1 s: steps is made up", "graph        done, 1 s"]
    found = list(run_all(parts, 1, watched, said.append))
    assert [part["status"] for part in found] == ["not begun"] * 2
    assert found[0]["error"] == "the time of all parts was over"


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    hangs = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    found = _watched(_writes(tmp_path, _GOOD + '{"key":') + hangs, tmp_path, seconds=5)
    assert (found["status"], found["error"]) == ("timed out", "not over after 5 s")
    assert [case["key"] for case in found["cases"]] == ["first"]
    pid = int((tmp_path / "pid").read_text())
    for _ in range(500):  # until the kernel has ended it, and somebody has taken note
        if not _runs(pid):
            break
        time.sleep(0.01)
    assert not _runs(pid), "no process is left"


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


# -- results as they come --------------------------------------------------------------------------


def test_cases_are_on_disk_when_they_end_and_are_measured_once(tmp_path: Path) -> None:
    from _gpu_parts import Cases

    path = tmp_path / "steps.jsonl"
    cases = Cases(path, deadline=time.monotonic() + 600)

    def fails() -> dict[str, Any]:
        assert json.loads(path.read_text())["value"] == 1
        raise RuntimeError("second is out of memory")

    cases.case("first", lambda: {"value": 1})
    cases.case("second", fails)
    assert cases.case("first", lambda: pytest.fail("it is known"))["value"] == 1
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [case["key"] for case in found] == ["first", "second"]
    assert "second is out of memory" in found[1]["error"]


def test_no_case_begins_after_the_deadline(tmp_path: Path) -> None:
    from _gpu_parts import Cases

    cases = Cases(tmp_path / "steps.jsonl", deadline=time.monotonic() - 1)
    found = cases.case("late", lambda: pytest.fail("it must not begin"))
    assert found["error"] == "not begun: the time of this part was over"


class _FakeWorld:
    """A world whose rank has no memory left if its contender is DDP."""

    started: ClassVar[list[str]] = []

    def __init__(self, name: str, *_: object, **__: object) -> None:
        from _worlds import WorldError

        self.started.append(name)
        if name == "ddp":
            raise WorldError("ddp: rank 0 failed in 'start':\nOutOfMemoryError: made up")

    def call(self, method: str, count: int = 0) -> list[Any]:
        if method == "memory":
            return [{"peak_allocated": 3 * 2**20, "peak_reserved": 4 * 2**20, "at_rest": 2**20}]
        step = {"seconds": 0.5, "forward": 0.1, "backward": 0.2, "optimizer": 0.1, "cpu": 0.4}
        return [[{**step, "host": 0.3, "loss": 2.0}] * count]

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        pass

    __enter__ = lambda self: self  # noqa: E731
    __exit__ = lambda self, *_: None  # noqa: E731


def _played(
    folder: Path, memory: int, rounds: int, deadline: float, names: list[str]
) -> dict[str, Any]:
    """Let made-up contenders take turns as the part ``steps`` does."""
    import _gpu_parts
    from _contenders import Case

    pace = _gpu_parts.Pace(rounds, steps=2, warmup=1)
    setup = dataclasses.replace(_gpu_parts.Setup.dry(), memory=memory, pace=pace, device="cuda")
    cases = _gpu_parts.Cases(folder / "steps.jsonl", deadline)
    found: dict[str, Any] = {}
    cases.case = lambda key, measure: found.update(measure()) or found  # type: ignore[method-assign, func-returns-value]
    _gpu_parts._turns(setup, cases, Case(1, "tiny", "bf16"), names)
    return found


@pytest.mark.parametrize(("memory", "starts"), [(0, 3), (2**30, 7)], ids=["together", "alone"])
def test_a_contender_without_memory_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch, memory: int, starts: int, tmp_path: Path
) -> None:
    from _gpu_tables import TABLES

    monkeypatch.setattr("_turns.World", _FakeWorld)
    _FakeWorld.started = []
    later = time.monotonic() + 600
    found = _played(tmp_path, memory, 3, later, ["ours", "fsdp2", "ddp"])
    assert len(_FakeWorld.started) == starts, "together: each once; alone: in every turn"
    assert {n: len(t) for n, t in found["contenders"].items()} == {"ours": 3, "fsdp2": 3}
    assert found["error"] is None
    [table] = TABLES["steps"]([{"key": "a", **found}])
    assert table.rows[0][:4] == ["shardwise", "500.0", "500.0 to 500.0", "1.00"]
    assert table.rows[0][5:9] == ["300.0", "3", "4", "1"]
    assert table.notes[-1] == "torch DDP: OutOfMemoryError: made up"


def test_a_case_with_too_few_rounds_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("_turns.World", _FakeWorld)
    found = _played(tmp_path, 0, 7, time.monotonic() - 1, ["ours", "fsdp2"])
    assert [len(turns) for turns in found["contenders"].values()] == [1, 1], "shown, all the same"
    assert found["error"] == "only 1 rounds: the time of this part was over"


def test_the_largest_model_that_fits_is_chosen_by_its_size() -> None:
    from _contenders import Case
    from _gpu_parts import Setup

    largest = {gib: Setup(1, gib * 2**30).largest() for gib in (1, 8, 24, 80, 139)}
    assert largest == {1: "150m", 8: "150m", 24: "1b", 80: "3b", 139: "6b"}
    both = Case(2, "1b", "bf16"), ["ours", "ddp"]
    assert Setup(2, 80 * 2**30).holds(*both)
    assert not Setup(1, 80 * 2**30).holds(*both), "on one GPU there is DDP's whole model twice"


# -- what is shown ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["2026-11-26-gpu-h100", "2026-11-26-gpu-h200"])
def test_tables_of_a_run_are_those_that_were_stored(stored: str) -> None:
    from _gpu_tables import gpu_tables
    from report import tables_of

    content = _read(RESULTS / f"{stored}.json")
    assert gpu_tables(content) == tables_of(content)


def test_what_went_wrong_in_a_part_is_shown() -> None:
    from _gpu_tables import TABLES, gpu_tables

    case = {"key": "34m", "error": "Traceback:\n  ...\nValueError: made up"}
    part = {"part": "steps", "status": "failed", "seconds": 12.3, "error": "cases failed"}
    overview, *_ = gpu_tables({"machine": {}, "parts": [{**part, "cases": [case]}]})
    assert overview.rows == [["steps", "failed", "12", "0 of 1"]]
    assert overview.notes == ["steps: cases failed", "steps, 34m: ValueError: made up"]
    race = {"losses": [1.0], "races": ["a made-up race\nbetween two streams"], "looked": True}
    [table] = TABLES["sanitizer"]([{"key": "34m", "ranks": [{**race, "races": []}, race]}])
    assert table.rows == [["34m", "1", "1"]]
    assert table.notes == ["34m: a made-up race"]


def test_tests_that_fail_are_shown(tmp_path: Path) -> None:
    from _gpu_parts import read_report
    from _gpu_tables import TABLES

    path = tmp_path / "report.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu" name="test_a"/>'
        '<testcase classname="tests.gpu" name="test_b"><skipped message="m"/></testcase>'
        '<testcase classname="tests.gpu" name="test_c"><failure message="m">trace\n'
        "AssertionError: made up</failure></testcase></testsuite></testsuites>"
    )
    [table] = TABLES["tests"]([{"key": "a case", **read_report(path)}])
    assert table.rows == [["a case", "1", "1", "1"]]
    assert table.notes == ["tests.gpu.test_c: AssertionError: made up"]


def test_a_plan_says_what_a_rank_needs_at_its_peak() -> None:
    from _contenders import Case
    from _gpu_parts import planned_peak

    one, two = (planned_peak(Case(ranks, "tiny", "bf16", 3, 64, "cuda")) for ranks in (1, 2))
    assert one is not None
    assert two is not None
    assert two < one, "two ranks share the states"
    assert planned_peak(Case(1, "tiny", compiler="inductor")) is None


def test_the_documentation_has_no_made_up_results() -> None:
    page = BENCHMARKS / "gpu.md"
    assert "made-up" not in page.read_text()
    for path in RESULTS.glob("*gpu*.json"):
        content = _read(path)
        assert content["machine"]["device"] == "cuda", f"{path.name} is from a dry run"
        assert os.path.basename(path) in page.read_text()
