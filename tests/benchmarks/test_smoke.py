"""Each benchmark runs in its smallest form: its table has a row for all, its numbers add up."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import BENCHMARKS, call_script
from tests.hosts.network import needs_hosts

ROUNDS = "--rounds 2"
STEPS = f"{ROUNDS} --steps 1 --warmup 1 --tokens 16"
CASES = {
    "step_time": f"--params tiny {STEPS} --contenders ours,fsdp2,ddp,floor,copies",
    "strategies": f"--gbit 0.1 --params tiny {STEPS} --local-steps 5 "
    "--contenders hybrid,full-int8,diloco-int8,fsdp2-hybrid",
    "memory": "--params tiny --contenders ours,fsdp2,ours-in-backward --tokens 16",
    "overhead": f"--ranks 2 --groups 3 --build 4 --steps 2 {ROUNDS}",
    "host_step": f"--groups 2 {ROUNDS}",
    "checkpoint": f"--params tiny --cold {ROUNDS}",
    "checkpoint_stall": f"--params tiny {ROUNDS} --steps 2 --tokens 8 "
    "--contenders sync,async,dcp,floor",
    "save_planning": "--ranks 4 --most 4",
    "diloco": "--start 1 --steps 4 --every 3 --batch 1 --length 16 --contenders int8",
    "optimizers": f"--params tiny {ROUNDS} --steps 2 --contenders ours-adamw,fsdp2-adamw",
    "plan_memory": "--model tiny --size 512 --transport c10d --runs 1",
    "plan_time": "--cases 4 --rounds 1 --seconds 0.1",
    "goodput": "--contenders diloco:2 --rates 0 --ranks 2 --step 0.01 --seconds 1 --length 16",
}
ROWS = {
    "step_time": [["shardwise", "torch FSDP2", "torch DDP", "compute only", "compute and copies"]],
    "strategies": [
        ["HYBRID_SHARD", "FULL_SHARD, int8, kept", "DiLoCo, int8", "torch FSDP2, hybrid"]
    ],
    "memory": [["formula", "shardwise", "torch FSDP2", "shardwise, in backward"]],
    "overhead": [["shardwise", "torch FSDP2"]] * 3,
    "host_step": [[kind for kind in ("torch's default", "foreach", "fused") for _ in range(3)]],
    "checkpoint": [
        [f"{name}, {what}" for what in ("save", "load") for name in ("shardwise", "torch DCP")]
    ],
    "checkpoint_stall": [
        [
            "shardwise, save",
            "shardwise, async_save",
            "torch DCP, async_save",
            "dd beside the training",
        ]
    ],
    "save_planning": [["4"]],
    "diloco": [["synchronous", "DiLoCo, H = 3, int8, momentum 0.9"]],
    "optimizers": [["torch AdamW, fused"] * 2, ["torch AdamW, fused"] * 2],
    "plan_memory": [["tiny, 512 tokens, fp32, full, c10d"]],
    "plan_time": [["5m, 512 tokens, fp32, full, auto"]],
    "goodput": [["DiLoCo, H = 2"]],
}


def _checkpoint(cases: list[Any]) -> None:
    for turn in (turn for turns in cases[0]["turns"].values() for turn in turns):
        assert turn["size"] >= cases[0]["nbytes"], "something was left out"
        assert all(seconds > 0 for seconds in turn["save_s"] + turn["load_s"])


def _checkpoint_stall(cases: list[Any]) -> None:
    turns = [turn for turns in cases[0]["turns"].values() for turn in turns]
    assert all(0 <= rank["stall"] < rank["seconds"] for turn in turns for rank in turn)


def _save_planning(cases: list[Any]) -> None:
    [case] = cases
    assert case["ours"]["parts"] == 4 * 3 * 723 + 723  # and the steps of AdamW once
    assert case["ours"]["bytes"] < case["torch"]["bytes"]


def _diloco(cases: list[Any]) -> None:
    parameters, found = 920_704, cases[0]["contenders"]  # of llama-tiny
    # Two ranks, each of which sends a half of its vector twice, with an element for each of the 39
    # tensors that says whether they have gradients.
    assert found["synchronous"]["sent"] == 2 * 4 * 4 * (parameters + 39)
    assert found["synchronous"]["sent_at_end"] == 0
    for name in ("sent", "sent_at_end"):  # one exchange after three steps, one at the end
        assert found["int8"][name] == pytest.approx(2 * parameters * (1 + 4 / 256), rel=1e-3)
    assert all(4 < each["judged"] < 7 for each in found.values())


def _optimizers(cases: list[Any]) -> None:
    steps, loss = cases
    assert [len(turns) for turns in steps["seconds"].values()] == [2, 2]
    for name, by_rank in steps["state_bytes"].items():
        numel = steps["shard_numel"][name]
        assert sum(numel) == steps["numel"]
        assert by_rank == pytest.approx([8 * each for each in numel], rel=0.01)
        assert all(taken >= 0 for taken in steps["step_bytes"][name])
    assert len(loss["losses"]["ours-adamw"]) == 2
    assert loss["losses"]["ours-adamw"] == loss["losses"]["fsdp2-adamw"]


def _step_time(cases: list[Any]) -> None:
    from _turns import disagreement

    [case] = cases
    assert disagreement(case) is None
    assert list(case["contenders"]) == ["ours", "fsdp2", "ddp", "floor", "copies"]
    for name, turns in case["contenders"].items():
        assert [len(turn["steps"]) for turn in turns] == [1, 1], name
        assert [len(turn["warmup"]) for turn in turns] == [1, 0], f"{name}: once in its life"
        for step in (step for turn in turns for step in turn["steps"]):
            assert len(step) == case["ranks"] == 2, name
            for rank in step:
                parts = rank["forward"] + rank["backward"] + rank["optimizer"]
                assert 0 < parts <= rank["seconds"] + 1e-9, (name, rank)


def _plan_memory(cases: list[Any]) -> None:
    [case] = cases
    assert [len(ranks) for ranks in case["runs"]] == [2]
    for rank in case["runs"][0]:
        grown = rank["peak"] - rank["base"]
        assert 0.5 < grown / case["predicted"]["peak"] < 4


def _strategies(cases: list[Any]) -> None:
    """Interfaces count what crosses, and no more."""
    (case,) = cases
    whole = 4 * case["numel"]
    for name in ("hybrid", "fsdp2-hybrid"):
        for turn in case["contenders"][name]:
            # Each host's two ranks all-reduce a half each: as much as the gradients, and headers.
            assert turn["sent"] == pytest.approx([1.1 * whole] * 2, rel=0.1), name
            slowest = max(rank["seconds"] for rank in turn["steps"][0])
            assert slowest > 0.5 * whole * 8 / 1e8, f"{name}: the link is not shaped"
        one, several = case["beside"][name]["accumulated"]
        assert (one["microbatches"], several["microbatches"]) == (1, 4)
        assert max(several["sent"]) < 1.1 * max(one["sent"]), f"{name}: once per step"
    for turn in case["contenders"]["full-int8"]:
        # Every parameter and every gradient once, in a byte each: half from either host.
        assert turn["sent"] == pytest.approx([0.28 * whole] * 2, rel=0.2)
    for turn in case["contenders"]["diloco-int8"]:
        assert max(turn["sent"]) < 0.05 * whole, "an inner step crosses hosts"
    for meeting in case["beside"]["diloco-int8"]["meetings"]:
        assert meeting["sent"] == pytest.approx([0.28 * whole] * 2, rel=0.1)
    assert all(peak > 1e6 for each in case["beside"].values() for peak in each["memory"])


CHECKS = {
    "checkpoint": _checkpoint,
    "checkpoint_stall": _checkpoint_stall,
    "diloco": _diloco,
    "save_planning": _save_planning,
    "optimizers": _optimizers,
    "plan_memory": _plan_memory,
    "step_time": _step_time,
    "strategies": _strategies,
}
#: Those that write to a disk, and leave nothing there.
FOLDERS = {"checkpoint", "checkpoint_stall"}
#: Trainings of a few steps keep none of what is promised of long ones.
FAILS = {"memory", "diloco"}
PICTURES = {"strategies": "0.1 Gbit/s", "goodput": "DiLoCo, H = 2"}
_MARKS = {"strategies": needs_hosts}
#: The one that ``make test`` runs; the others start many processes.
_QUICK = {"optimizers"}


def _marks(script: str) -> list[Any]:
    own = [_MARKS[script]] if script in _MARKS else []
    return own if script in _QUICK else [*own, pytest.mark.long]


@pytest.mark.parametrize("script", [pytest.param(each, marks=_marks(each)) for each in CASES])
def test_a_benchmark_runs_and_shows_its_table(script: str, tmp_path: Path) -> None:
    from report import tables_of

    path, picture = tmp_path / "raw.json", tmp_path / "picture.svg"
    arguments = [*CASES[script].split(), "--json", str(path)]
    if script in PICTURES:
        arguments += ["--picture", str(picture)]
    if script in FOLDERS:
        arguments += ["--folder", str(tmp_path)]
    done = call_script(f"{script}.py", *arguments)
    assert done.returncode == 0 or script in FAILS, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert content["script"] == script
    assert str(path) in content["command"]
    assert {"cpu", "cores", "torch", "python"} <= content["machine"].keys()
    tables = tables_of(content)
    assert tables
    for table, names in zip(tables, ROWS[script], strict=False):
        assert [row[0] for row in table.rows if row[0] in names] == names, table.markdown()
        assert table.title in " ".join(done.stdout.split()), done.stdout
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert not [note for note in table.notes if "DIFFER" in note]
    if script in CHECKS:
        CHECKS[script](content["cases"])
    if script in FOLDERS:
        assert [entry.name for entry in tmp_path.iterdir()] == ["raw.json"], "it cleans up"
    if script in PICTURES:
        assert PICTURES[script] in picture.read_text()


def test_plans_are_held_against_published_figures() -> None:
    import plan_published

    assert plan_published.ROWS


def test_losses_that_differ_between_runtimes_are_an_error() -> None:
    from optimizers import differences

    losses = {"ours-sgd": [2.0, 1.5], "fsdp2-sgd": [2.0, 1.5], "ours-lion": [2.0]}
    case: dict[str, Any] = {"part": "loss", "ranks": 2, "losses": losses}
    assert not differences(case)
    losses["ours-sgd"] = [2.0, 1.4]
    assert differences(case) == ["sgd"]


@pytest.mark.parametrize(
    ("script", "stored"),
    [
        ("step_time", "2026-11-21-gloo-step-time-150m"),
        ("strategies", "2026-11-22-strategies-1-gbit"),
        ("memory", "2026-11-21-gloo-memory-34m"),
        ("overhead", "2026-11-22-overhead"),
        ("host_step", "2026-11-29-host-step"),
        ("checkpoint", "2026-11-21-checkpoint"),
        ("checkpoint_stall", "2026-11-21-checkpoint-stall"),
        ("diloco", "2026-11-22-diloco-from-random-weights"),
        ("optimizers", "2026-11-23-optimizers"),
        ("optimizers", "2026-11-23-optimizers-loss"),
        ("plan_memory", "2026-11-23-plan-memory"),
        ("goodput", "2026-11-23-goodput"),
    ],
)
def test_figures_of_tables_are_those_that_were_stored(script: str, stored: str) -> None:
    """Columns come and go, and quartiles are of another kind: each that stayed has the same."""
    from report import tables_of

    module = importlib.import_module(script)
    content = json.loads((BENCHMARKS / "results" / f"{stored}.json").read_text())
    cases = [{"errors": {}, **case} for case in content["cases"]]
    made = module.tables(cases) if hasattr(module, "tables") else [*map(module.table, cases)]
    for mine, before in zip(made, tables_of(content), strict=script != "goodput"):
        assert mine.title == before.title
        if script != "strategies":  # of which more is noted now
            assert mine.notes == before.notes
        for row, old in zip(mine.rows, before.rows, strict=True):
            now = dict(zip(mine.columns, row, strict=True))
            then = dict(zip(before.columns, old, strict=True))
            kept = [name for name in now if name in then and "quartiles" not in name]
            assert len(kept) > len(then) / 2
            assert [now[name].replace(",", "") for name in kept] == [
                then[name].replace(",", "") for name in kept
            ]


def test_a_machine_without_hosts_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no ``ip`` in it
    done = call_script("strategies.py", "--params", "tiny")
    assert done.returncode == 2
    assert "hosts need root" in done.stdout


def _documented() -> list[str]:
    """The commands of the documentation that measure something here."""
    paths = [*sorted((BENCHMARKS.parent / "docs").glob("*.md")), BENCHMARKS / "measurements.md"]
    pages = "".join(path.read_text() for path in paths)
    found = re.findall(r"python benchmarks/(\w+\.py [^`\n]*)$", pages, re.MULTILINE)
    whole = [each for each in found if not re.search(r"[$\\]", each)]
    return sorted({each for each in whole if each.partition(".")[0] in CASES})


def test_commands_of_the_documentation_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever renames an option or a contender renames it there, too."""
    asked: list[str] = []

    def measure_nothing(script: str, *_: object) -> int:
        asked.append(script)
        return 0

    for command in _documented():
        script, *arguments = shlex.split(command)
        module = importlib.import_module(Path(script).stem)
        monkeypatch.setattr(module, "run", measure_nothing)
        assert call_script(script, *arguments).returncode == 0, command
    assert set(asked) == set(CASES)
