"""Tables of a ``strategies`` document, and the figures that its picture shows."""

from __future__ import annotations

from statistics import median, quantiles
from typing import Any

from _contenders import Case
from _report import Table
from _step_tables import disagreement, step_seconds
from _strategy_contenders import STRATEGIES

#: Whose steps are also measured with accumulation.
ACCUMULATED = ("hybrid", "fsdp2-hybrid")

COLUMNS = [
    *("strategy", "step s", "quartiles s", "tokens/s", "utilization"),
    *("MB/step", "x FSDP2 full", "x FSDP2 hybrid", "memory MB"),
]


def seconds_by_round(case: dict[str, Any], name: str) -> list[float]:
    """Return a contender's step time in each round, with DiLoCo's share of an exchange."""
    meetings = case["beside"][name].get("meetings")
    own = step_seconds(case, name)
    if not meetings:
        return own
    return [
        inner + each["seconds"] / case["local_steps"]
        for inner, each in zip(own, meetings, strict=True)
    ]


def utilization(case: dict[str, Any], name: str) -> float:
    """Return compute-only step time over a contender's: the median of the rounds' ratios."""
    return ratio(case, "floor", name)


def ratio(case: dict[str, Any], name: str, peer: str) -> float:
    """Return the median over rounds of one step time over another's of the same round."""
    pairs = zip(seconds_by_round(case, name), seconds_by_round(case, peer), strict=True)
    return median(mine / theirs for mine, theirs in pairs)


def wire_bytes(case: dict[str, Any], name: str) -> float:
    """Return the bytes that a host sends in a step, DiLoCo's share of an exchange included."""
    own = median(max(turn["sent"]) for turn in case["contenders"][name])
    meetings = case["beside"][name].get("meetings", [])
    if meetings:
        own += median(max(each["sent"]) for each in meetings) / case["local_steps"]
    return float(own)


def strategies_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each link of a document."""
    return [_table(case) for case in content["cases"]]


def _row(case: dict[str, Any], name: str) -> list[str]:
    seconds = seconds_by_round(case, name)
    low, _, high = quantiles(seconds, n=4, method="inclusive") if seconds[1:] else seconds * 3
    present = case["contenders"]
    return [
        STRATEGIES[name].title,
        f"{median(seconds):.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{case['ranks'] * case['tokens'] / median(seconds):.0f}",
        f"{100 * utilization(case, name):.0f} %" if "floor" in present else "",
        f"{wire_bytes(case, name) / 1e6:.2f}",
        *(
            f"{ratio(case, name, peer):.2f}" if peer in present else ""
            for peer in ("fsdp2-full", "fsdp2-hybrid")
        ),
        f"{max(case['beside'][name]['memory']) / 1e6:.0f}",
    ]


def _table(case: dict[str, Any]) -> Table:
    what = Case.stored(case)
    turns = case["contenders"]
    wrong = disagreement(case, STRATEGIES)
    rounds = len(next(iter(turns.values())))
    table = Table(
        title=f"{case['gbit']:g} Gbit/s, {case['hosts']} hosts of {what.ranks // case['hosts']} "
        f"ranks, {case['numel'] / 1e6:.1f} M parameters, {what.dtype}, {what.tokens} tokens a rank",
        columns=COLUMNS,
        rows=[_row(case, name) for name in turns],
        notes=[
            f"losses: {'DIFFERENT: ' + wrong if wrong else 'OK, equal to four decimals'} (DiLoCo "
            "and compute only: the first; with int8 and bf16 to 0.05)",
            f"{rounds} rounds; utilization: step of compute only over this step; MB: sent by the "
            "busier host, as its interface counts; memory: highest PSS of a rank",
        ],
    )
    table.notes += [_meeting(case, name) for name in turns if case["beside"][name].get("meetings")]
    table.notes += [_accumulation(case, name) for name in turns if name in ACCUMULATED]
    return table


def _meeting(case: dict[str, Any], name: str) -> str:
    found = case["beside"][name]["meetings"]
    inner = median(step_seconds(case, name))
    seconds = median(each["seconds"] for each in found)
    sent = median(max(each["sent"]) for each in found)
    return (
        f"{STRATEGIES[name].title}: an inner step {inner:.3f} s, an exchange {seconds:.3f} s and "
        f"{sent / 1e6:.2f} MB, shared by H = {case['local_steps']} steps"
    )


def _accumulation(case: dict[str, Any], name: str) -> str:
    parts = [
        f"{max(each['sent']) / 1e6:.2f} MB with {each['microbatches']}"
        for each in case["beside"][name]["accumulated"]
    ]
    return f"{STRATEGIES[name].title}, a step of several microbatches: {', '.join(parts)}"
