"""Tables of a ``step_time`` document, and the check that all contenders trained the same."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median, quantiles
from typing import Any

from _contenders import CONTENDERS, Case, Contender
from _report import Table

COLUMNS = [
    "contender",
    "step s",
    "quartiles s",
    "x FSDP2",
    "x DDP",
    "x floor",
    "forward",
    "backward",
    "optimizer",
    "CPU s",
    "last loss",
]


def step_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case of a document."""
    return [_table(case) for case in content["cases"]]


def losses(case: dict[str, Any], name: str) -> list[float]:
    """List a contender's losses, the mean over ranks, of all its steps from its first."""
    turns = case["contenders"][name]
    return mean_losses([step for turn in turns for step in turn["warmup"] + turn["steps"]])


def mean_losses(steps: list[list[dict[str, float]]]) -> list[float]:
    """Return the mean loss over the ranks of each step."""
    return [fmean(rank["loss"] for rank in step) for step in steps]


def disagreement(
    case: dict[str, Any], contenders: Mapping[str, type[Contender]] = CONTENDERS
) -> str | None:
    """Compare the losses of the contenders.

    Those that exchange gradients must agree to four decimals at every step, or as closely as they
    say themselves. The floor exchanges none, so that only its very first loss is comparable.

    Args:
        case: of a document.
        contenders: what its names stand for.

    Returns:
        What differs, for people, or ``None``.
    """
    names = list(case["contenders"])
    reference = min(names, key=lambda name: (not contenders[name].exchanges, name != "fsdp2"))
    expected = losses(case, reference)
    found = []
    for name in names:
        own = losses(case, name)
        comparable = len(own) if contenders[name].exchanges else 1
        for step, (mine, theirs) in enumerate(zip(own[:comparable], expected, strict=False)):
            if not abs(mine - theirs) < contenders[name].tolerance:  # NaN differs
                found.append(
                    f"{name} differs from {reference} first at step {step}: {mine:.6f}, not "
                    f"{theirs:.6f}"
                )
                break
    return "; ".join(found) or None


def step_seconds(case: dict[str, Any], name: str) -> list[float]:
    """Return a contender's step time in each round: the median step, by its slowest rank."""
    return [
        median(max(rank["seconds"] for rank in step) for step in turn["steps"])
        for turn in case["contenders"][name]
    ]


def ratio(case: dict[str, Any], name: str, peer: str) -> str:
    if peer not in case["contenders"]:
        return ""
    pairs = zip(step_seconds(case, name), step_seconds(case, peer), strict=True)
    return f"{median(mine / theirs for mine, theirs in pairs):.2f}"


def _part(case: dict[str, Any], name: str, part: str) -> str:
    steps = [step for turn in case["contenders"][name] for step in turn["steps"]]
    return f"{median(fmean(rank[part] for rank in step) for step in steps):.3f}"


def _row(case: dict[str, Any], name: str) -> list[str]:
    seconds = step_seconds(case, name)
    low, _, high = quantiles(seconds, n=4, method="inclusive") if seconds[1:] else seconds * 3
    return [
        CONTENDERS[name].title,
        f"{median(seconds):.3f}",
        f"{low:.3f} to {high:.3f}",
        *(ratio(case, name, peer) for peer in ("fsdp2", "ddp", "floor")),
        *(_part(case, name, part) for part in ("forward", "backward", "optimizer", "cpu")),
        f"{losses(case, name)[-1]:.4f}" if CONTENDERS[name].exchanges else "",
    ]


def _table(case: dict[str, Any]) -> Table:
    what = Case.stored(case)
    turns = case["contenders"]
    counts = {len(turns[name]) * len(turn["steps"]) for name in turns for turn in turns[name][:1]}
    rounds = len(next(iter(turns.values())))
    measured = sum(
        sum(max(rank["seconds"] for rank in step) for step in turn["steps"])
        for name in turns
        for turn in turns[name]
    )
    foreign = sum(turn["foreign_cpu_seconds"] for name in turns for turn in turns[name])
    wrong = disagreement(case)
    return Table(
        title=f"{what.label()} ({case['numel'] / 1e6:.1f} M)",
        columns=COLUMNS,
        rows=[_row(case, name) for name in turns],
        notes=[
            f"losses: {'DIFFERENT: ' + wrong if wrong else 'OK, equal to four decimals'}",
            f"{rounds} rounds, {max(counts)} measured steps each contender; transport of ours: "
            f"{case['transport']}; {case['worlds']} worlds",
            f"while {measured:.0f} s were measured, sleeping contenders took "
            f"{case['idle_cpu_seconds']:.2f} s of processor time, other programs "
            f"{foreign:.1f} s",
        ],
    )
