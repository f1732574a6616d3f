"""Tables of a ``scaling`` document: the communication part of a step, along each axis."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from _contenders import CONTENDERS as ALL
from _models import PRESETS
from _report import Table
from _step_tables import disagreement, step_seconds

FLOOR = "floor"
#: Who is put side by side, the floor included, which is taken off.
CONTENDERS = ("ours", "fsdp2", FLOOR)


@dataclass(frozen=True)
class Axis:
    """What grows while all else stays the same.

    Attributes:
        title: what it is, and what stays.
        unit: of its values.
    """

    title: str
    unit: str


AXES = {
    "ranks": Axis("ranks, 10 M parameters in 8 groups", "ranks"),
    "params": Axis("parameters, 2 ranks", "million parameters"),
    "groups": Axis("groups, 2 ranks, 13 M parameters", "groups"),
}


@dataclass(frozen=True)
class Spread:
    """The median of some rounds, with quartiles."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Summarize; one value has no spread."""
        if not values[1:]:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(low, median(values), high)


def communication(case: dict[str, Any], name: str) -> list[float]:
    """Seconds of a contender's step beyond the floor's, in each round."""
    pairs = zip(step_seconds(case, name), step_seconds(case, FLOOR), strict=True)
    return [whole - floor for whole, floor in pairs]


def value(case: dict[str, Any]) -> float:
    """Where on its axis a case is."""
    if case["axis"] == "ranks":
        return float(case["ranks"])
    if case["axis"] == "params":
        return float(case["numel"]) / 1e6
    return float(PRESETS[case["params"]].layers + 2)  # the embedding, and the norm with the head


def along(content: dict[str, Any], axis: str) -> list[dict[str, Any]]:
    """The cases of an axis, in its order."""
    return sorted((case for case in content["cases"] if case["axis"] == axis), key=value)


def scaling_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each axis of a document."""
    axes = {axis: along(content, axis) for axis in AXES}
    return [_table(axis, cases) for axis, cases in axes.items() if cases]


def _table(axis: str, cases: list[dict[str, Any]]) -> Table:
    columns = [AXES[axis].unit, "compute only ms"]
    for name in CONTENDERS[:-1]:
        columns += [f"{ALL[name].title} ms", "quartiles"]
    table = Table(f"Communication part of a step: {AXES[axis].title}", [*columns, "x FSDP2"])
    for case in cases:
        row = [f"{value(case):.0f}", _ms(median(step_seconds(case, FLOOR)))]
        for name in CONTENDERS[:-1]:
            spread = Spread.of(communication(case, name))
            row += [_ms(spread.middle), f"{_ms(spread.low)} to {_ms(spread.high)}"]
        table.rows.append([*row, _ratio(case)])
        if wrong := disagreement(case):
            table.notes.append(f"losses at {value(case):.0f} {AXES[axis].unit} DIFFER: {wrong}")
    rounds = {len(case["contenders"][FLOOR]) for case in cases}
    tokens = {case["tokens"] for case in cases}
    foreign = sum(t["foreign_cpu_seconds"] for c in cases for n in CONTENDERS for t in _turns(c, n))
    table.notes += [
        "losses: OK, equal to four decimals" if not table.notes else "the others are equal",
        f"{min(rounds)} rounds; {', '.join(map(str, tokens))} tokens a rank; transport of ours: "
        f"{cases[0]['transport']}; other programs took {foreign:.1f} s of processor time",
    ]
    return table


def _ms(seconds: float) -> str:
    return str(round(1e3 * seconds))  # no "-0"


def _turns(case: dict[str, Any], name: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = case["contenders"][name]
    return turns


def _ratio(case: dict[str, Any]) -> str:
    pairs = zip(communication(case, "ours"), communication(case, "fsdp2"), strict=True)
    return f"{median(ours / theirs for ours, theirs in pairs):.2f}"
