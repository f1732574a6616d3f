"""Tables of a ``gpu`` document."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from _contenders import TITLES, Case
from _report import Table, compared, mib
from _turns import losses, slowest, step_seconds, verdict
from overhead import overheads
from overhead import tables as overhead_tables

Content = dict[str, Any]

_PEAK = "peak_allocated"
#: Entries of a case that has measured nothing.
_EMPTY = len(("key", "error", "case_seconds"))


def gpu_tables(content: Content) -> list[Table]:
    """Make one table of all parts, one of what a skeptic asks first, and those of each part."""
    tables = [_overview(content), _first_answers(content)]
    for part in content["parts"]:
        measured = [case for case in part["cases"] if len(case) > _EMPTY]
        tables += TABLES[part["part"]](measured)
    return tables


def _overview(content: Content) -> Table:
    facts = content["machine"]
    table = Table("Parts", ["part", "status", "seconds", "cases"])
    for part in content["parts"]:
        cases = part["cases"]
        good = sum(case["error"] is None for case in cases)
        count = f"{good} of {len(cases)}"
        table.rows.append([part["part"], part["status"], f"{part['seconds']:.0f}", count])
        if part["error"]:
            table.notes.append(f"{part['part']}: {last_line(part['error'])}")
        table.notes += [
            f"{part['part']}, {case['key']}: {last_line(case['error'])}"
            for case in cases
            if case["error"] is not None
        ]
    if facts.get("device") == "cuda":
        table.notes.append(
            f"{facts['gpus']} x {facts['gpu']}, {facts['gpu_memory_gib']} GiB; CUDA "
            f"{facts['cuda']}, NCCL {facts['nccl']}, driver {facts['driver']}; revision "
            f"{facts['revision']}"
        )
        table.notes.append(f"ranks that share a GPU: by {facts['sharing']}")
    elif facts.get("device") == "cpu":
        table.notes.append("a dry run on CPUs: no figure below says anything about speed")
    return table


def _first_answers(content: Content) -> Table:
    """Put what decides whether to trust the runtime into one table, beside FSDP2's figures."""
    columns = ["question", TITLES["ours"], TITLES["fsdp2"]]
    table = Table("What a skeptic asks first", columns)
    for part in content["parts"]:
        answers = _ANSWERS.get(part["part"])
        good = [case for case in part["cases"] if case["error"] is None]
        table.rows += answers(good) if answers is not None else []
    return table


def _loss_answers(cases: list[Content]) -> list[list[str]]:
    rows = []
    for case in cases:
        if "losses" in case:
            ours, theirs = (case["losses"][name] for name in ("ours", "fsdp2"))
            apart = max(abs(mine - other) for mine, other in zip(ours, theirs, strict=True))
            what = f"last loss of {len(ours):,} steps, {case['key']}"
            rows.append([what, f"{ours[-1]:.6f}, {apart:.1e} apart at most", f"{theirs[-1]:.6f}"])
    return rows


def _overhead_answers(cases: list[Content]) -> list[list[str]]:
    return [
        [
            f"host µs of a group, {case['key']}",
            *(f"{median(overheads(case, name)):.0f}" for name in ("ours", "fsdp2")),
        ]
        for case in cases
    ]


def _race_answers(cases: list[Content]) -> list[list[str]]:
    counts = {"ours": "not looked", "fsdp2": "not looked"}
    for name in counts:
        ranks = [rank for case in cases if case["contender"] == name for rank in case["ranks"]]
        if ranks and all(rank["looked"] for rank in ranks):
            counts[name] = str(sum(len(rank["races"]) for rank in ranks))
    return [["races that CUDA's sanitizer reports", *counts.values()]]


def _peak_answers(cases: list[Content]) -> list[list[str]]:
    rows = []
    for case in cases:
        ours, theirs = (_mebibytes(case["contenders"].get(n, []), _PEAK) for n in ("ours", "fsdp2"))
        planned = case.get("planned_peak")
        if planned is not None and ours:
            what = f"peak MiB, {Case.stored(case).label()}"
            rows.append([what, f"{ours}, planned {mib(planned, 0)}", theirs])
    return rows


def _test_tables(cases: list[Content]) -> list[Table]:
    table = Table("Tests", ["tests", "passed", "failed", "skipped"])
    for case in cases:
        failures = case["failures"]
        counts = (case["passed"], len(failures), case["skipped"])
        table.rows.append([case["key"], *map(str, counts)])
        table.notes += [f"{name}: {last_line(text)}" for name, text in failures.items()]
    return [table]


def _step_tables(cases: list[Content]) -> list[Table]:
    return [_of_steps(case) for case in cases if "contenders" in case]


def _of_steps(case: Content) -> Table:
    turns = case["contenders"]

    def host(name: str) -> str:
        steps = [step for turn in turns[name] for step in turn["steps"]]
        return f"{1e3 * median(slowest(step, 'host') for step in steps):.1f}"

    def most(what: str) -> Callable[[str], str]:
        return lambda name: _mebibytes(turns[name], what)

    return compared(
        f"{Case.stored(case).label()} ({case['numel'] / 1e6:.0f} M)",
        ("contender", "step ms", 1),
        {name: [1e3 * seconds for seconds in step_seconds(case, name)] for name in turns},
        TITLES,
        peers={"x FSDP2": "fsdp2", "x DDP": "ddp"},
        beside={
            "host ms": host,
            "peak MiB": most(_PEAK),
            "reserved MiB": most("peak_reserved"),
            "at rest MiB": most("at_rest"),
            "last loss": lambda name: f"{losses(case, name)[-1]:.4f}",
        },
        notes=[
            verdict(case),
            f"{len(next(iter(turns.values())))} rounds; {case['worlds']} processes; "
            f"{case['backend']}",
            *(f"{TITLES[name]}: {last_line(text)}" for name, text in case["errors"].items()),
        ],
    )


def _mebibytes(turns: list[Content], what: str) -> str:
    """The most of any rank and turn."""
    found = [rank[what] for turn in turns for rank in turn["memory"] if what in rank]
    return mib(max(found, default=None), 0)


def _rank_tables(cases: list[Content]) -> list[Table]:
    tables = _step_tables(cases)
    refused = [case["key"] for case in cases if "refused" in case]
    for table in tables[:1]:
        table.notes += [f"{key}: refused, so gloo moved the bytes" for key in refused]
    return tables


def _sanitizer_tables(cases: list[Content]) -> list[Table]:
    table = Table("CUDA's sanitizer", ["training", "steps", "races"])
    for case in cases:
        races = [race for rank in case["ranks"] for race in rank["races"]]
        looked = all(rank["looked"] for rank in case["ranks"])
        steps = min(len(rank["losses"]) for rank in case["ranks"])
        table.rows.append([case["key"], str(steps), str(len(races)) if looked else "not looked"])
        table.notes += [f"{case['key']}: {race.splitlines()[0]}" for race in races[:3]]
    return [table]


def _graph_tables(cases: list[Content]) -> list[Table]:
    columns = ["training", "captured", "largest difference", "replayed ms", "as usual ms"]
    table = Table("A step as one CUDA graph", columns)
    for case in cases:
        ranks = case["ranks"]
        difference = max(
            abs(found - expected)
            for rank in ranks
            for found, expected in zip(rank["losses"], rank["expected"], strict=True)
        )
        seconds = [[rank["seconds"][what] for rank in ranks] for what in ("replayed", "as usual")]
        captured = "yes" if all(rank["captured"] for rank in ranks) else "no"
        times = [f"{1e3 * max(each):.2f}" for each in seconds]
        table.rows.append([case["key"], captured, f"{difference:.1e}", *times])
    table.notes.append("largest difference: between the losses of replays and of usual steps")
    return [table]


def last_line(error: str | None) -> str:
    """Return what an error says at its end; nothing where there is none."""
    lines = (error or "").strip().splitlines()
    return lines[-1] if lines else ""


TABLES: dict[str, Callable[[list[Content]], list[Table]]] = {
    "environment": lambda cases: [],  # the first two tables have it
    "tests": _test_tables,
    "losses": lambda cases: [],
    "steps": _step_tables,
    "overhead": overhead_tables,
    "graph": _graph_tables,
    "sanitizer": _sanitizer_tables,
    "ranks": _rank_tables,
    "offload": _step_tables,
    "largest": _step_tables,
}

_ANSWERS: dict[str, Callable[[list[Content]], list[list[str]]]] = {
    "losses": _loss_answers,
    "overhead": _overhead_answers,
    "sanitizer": _race_answers,
    "steps": _peak_answers,
    "largest": _peak_answers,
}
