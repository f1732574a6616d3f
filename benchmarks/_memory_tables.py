"""Tables of a ``memory`` document, and the check of what ours may take."""

from __future__ import annotations

from typing import Any

from _contenders import CONTENDERS, Case
from _memory import Formula
from _report import Table

ALLOWED = 1.05
"""Ours may take this much of the formula's peak, and of FSDP2's."""

COLUMNS = [
    "MiB a rank",
    "peak",
    "x formula",
    "x FSDP2",
    "forward",
    "backward",
    "optimizer",
    "at rest",
    "peak PSS",
    "x FSDP2",
]


def memory_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case of a document."""
    return [_table(case) for case in content["cases"]]


def peak(case: dict[str, Any], name: str) -> int | None:
    """Return the peak of a contender over the phases of a step, in bytes."""
    measured = case["contenders"].get(name)
    return max(measured["peak"].values()) if measured else None


def too_high(case: dict[str, Any]) -> str | None:
    """Tell where ours takes more than the formula or FSDP2 allow, or return ``None``."""
    mine = peak(case, "ours")
    if mine is None:
        return None
    limits = {"the formula": Formula(**case["formula"]).total, "FSDP2": peak(case, "fsdp2")}
    found = [
        f"{mine / limit:.2f} x {name}"
        for name, limit in limits.items()
        if limit and mine > ALLOWED * limit
    ]
    return ", ".join(found) or None


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f}"


def _ratio(mine: int | None, theirs: int | None) -> str:
    return f"{mine / theirs:.2f}" if mine and theirs else ""


def _row(case: dict[str, Any], name: str) -> list[str]:
    measured = case["contenders"][name]
    highest, shared = peak(case, name), measured.get("pss")
    return [
        CONTENDERS[name].title,
        _mib(highest),
        _ratio(highest, Formula(**case["formula"]).total),
        _ratio(highest, peak(case, "fsdp2")),
        *(_mib(measured["peak"][phase]) for phase in ("forward", "backward", "optimizer", "rest")),
        _mib(shared),
        _ratio(shared, case["contenders"].get("fsdp2", {}).get("pss")),
    ]


def _table(case: dict[str, Any]) -> Table:
    what = Case.stored(case)
    expected = Formula(**case["formula"])
    total = ["formula", _mib(expected.total), "1.00", _ratio(expected.total, peak(case, "fsdp2"))]
    total += [""] * (len(COLUMNS) - len(total))
    wrong = too_high(case)
    verdict = f"TOO HIGH: {wrong}" if wrong else "OK, no higher than the formula and FSDP2 + 5 %"
    return Table(
        title=what.label(),
        columns=COLUMNS,
        rows=[total, *(_row(case, name) for name in case["contenders"])],
        notes=[
            *([f"ours: {verdict}"] if "ours" in case["contenders"] else []),
            f"formula: shards {_mib(expected.shards)} + unsharded {_mib(expected.unsharded)} + "
            f"full gradients {_mib(expected.gradients)} + activations "
            f"{_mib(expected.activations)}",
            f"transport of ours: {case['transport']}; malloc: {case['malloc']}",
        ],
    )
