"""Tables of a ``gpu`` document."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

from _contenders import CONTENDERS, Case
from _overhead_tables import overhead_tables
from _report import Table
from _step_tables import disagreement, losses, ratio, step_seconds

STEP_COLUMNS = [
    "contender",
    "step ms",
    "quartiles ms",
    "x FSDP2",
    "x DDP",
    "host ms",
    "peak MiB",
    "reserved MiB",
    "at rest MiB",
    "last loss",
]

Content = dict[str, Any]

#: Entries of a case that has measured nothing.
_EMPTY = len(("key", "error", "case_seconds"))


def gpu_tables(content: Content) -> list[Table]:
    """Make one table of all parts, and those of each part."""
    tables = [_overview(content)]
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
            table.notes.append(f"{part['part']}: {_last_line(part['error'])}")
        table.notes += [
            f"{part['part']}, {case['key']}: {_last_line(case['error'])}"
            for case in cases
            if case["error"] is not None
        ]
    revisions = sorted({str(p["environment"].get("revision")) for p in content["parts"]})
    if facts.get("device") == "cuda":
        table.notes.append(
            f"{facts['gpus']} x {facts['gpu']}, {facts['gpu_memory_gib']} GiB; CUDA "
            f"{facts['cuda']}, NCCL {facts['nccl']}, driver {facts['driver']}; revision "
            f"{', '.join(revisions)}"
        )
    elif facts.get("device") == "cpu":
        table.notes.append("a dry run on CPUs: no figure below says anything about speed")
    return table


def _environment_tables(cases: list[Content]) -> list[Table]:
    return []  # the notes of the first table have it


def _test_tables(cases: list[Content]) -> list[Table]:
    table = Table("Tests", ["tests", "passed", "failed", "skipped"])
    for case in cases:
        failures = case["failures"]
        counts = (case["passed"], len(failures), case["skipped"])
        table.rows.append([case["key"], *map(str, counts)])
        table.notes += [f"{name}: {_last_line(text)}" for name, text in failures.items()]
    return [table]


def _step_tables(cases: list[Content]) -> list[Table]:
    return [_of_steps(case) for case in cases if "contenders" in case]


def _of_steps(case: Content) -> Table:
    names = list(case["contenders"])
    rounds = len(case["contenders"][names[0]])
    wrong = disagreement(case)
    notes = [
        f"losses: {'DIFFERENT: ' + wrong if wrong else 'OK, equal to four decimals'}",
        f"{rounds} rounds; {case['worlds']} processes; {case['backend']}",
    ]
    notes += [f"{CONTENDERS[n].title}: {_last_line(text)}" for n, text in case["errors"].items()]
    return Table(
        title=f"{Case.stored(case).label()} ({case['numel'] / 1e6:.0f} M)",
        columns=STEP_COLUMNS,
        rows=[_step_row(case, name) for name in names],
        notes=notes,
    )


def _step_row(case: Content, name: str) -> list[str]:
    milliseconds = [1e3 * seconds for seconds in step_seconds(case, name)]
    alone = len(milliseconds) == 1
    low, _, high = milliseconds * 3 if alone else quantiles(milliseconds, n=4, method="inclusive")
    turns = case["contenders"][name]
    host = median(max(rank["host"] for rank in step) for turn in turns for step in turn["steps"])
    return [
        CONTENDERS[name].title,
        f"{median(milliseconds):.1f}",
        f"{low:.1f} to {high:.1f}",
        ratio(case, name, "fsdp2"),
        ratio(case, name, "ddp"),
        f"{1e3 * host:.1f}",
        *(_mebibytes(turns, what) for what in ("peak_allocated", "peak_reserved", "at_rest")),
        f"{losses(case, name)[-1]:.4f}",
    ]


def _mebibytes(turns: list[Content], what: str) -> str:
    """The most of any rank and turn."""
    found = [rank[what] for turn in turns for rank in turn["memory"] if what in rank]
    return f"{max(found) / 2**20:,.0f}" if found else ""


def _overhead_tables(cases: list[Content]) -> list[Table]:
    return overhead_tables({"cases": cases}) if cases else []


def _rank_tables(cases: list[Content]) -> list[Table]:
    tables = _step_tables(cases)
    for case in cases:
        if tables and "refused" in case:
            tables[0].notes.append(f"{case['key']}: refused, so gloo moved the bytes")
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


def _last_line(error: str | None) -> str:
    lines = (error or "").strip().splitlines()
    return lines[-1] if lines else ""


TABLES: dict[str, Callable[[list[Content]], list[Table]]] = {
    "environment": _environment_tables,
    "tests": _test_tables,
    "steps": _step_tables,
    "overhead": _overhead_tables,
    "graph": _graph_tables,
    "sanitizer": _sanitizer_tables,
    "ranks": _rank_tables,
    "offload": _step_tables,
    "largest": _step_tables,
}
