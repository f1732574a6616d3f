"""What raw numbers of stored documents say: one value for each round, medians, and ratios.

Contenders take turns in rounds, so a ratio is the median of the ratios within rounds, and noise of
the machine hits both sides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any, Literal

from _contenders import CONTENDERS, Contender

Content = dict[str, Any]
ALLOWED = 1.05
"""Ours may take this much of the formula's peak, and of FSDP2's."""


def quartiles(
    values: Sequence[float],
    digits: int,
    method: Literal["inclusive", "exclusive"] = "inclusive",
) -> str:
    """Show what half of the rounds lie between."""
    ends = [*values] * 2 if len(values) == 1 else quantiles(values, n=4, method=method)[::2]
    return " to ".join(f"{round(each, digits) + 0:.{digits}f}" for each in ends)  # no "-0"


def ratio_of(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over rounds of one value over another's of the same round."""
    return median(m / t for m, t in zip(mine, theirs, strict=True))


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """Show :func:`ratio_of`."""
    return f"{ratio_of(mine, theirs):.2f}"


def beside(case: Content, name: str, peer: str, read: Callable[[Content, str], list[float]]) -> str:
    """Show the ratio of a contender to a peer, if there is one."""
    return ratio(read(case, name), read(case, peer)) if peer in case["contenders"] else ""


def slowest(ranks: Sequence[Mapping[str, float]], what: str) -> float:
    """Return the most of any rank."""
    return max(rank[what] for rank in ranks)


def losses(case: Content, name: str) -> list[float]:
    """List a contender's losses, the mean over ranks, of all its steps from its first."""
    turns = case["contenders"][name]
    return mean_losses([step for turn in turns for step in turn["warmup"] + turn["steps"]])


def mean_losses(steps: list[list[dict[str, float]]]) -> list[float]:
    """Return the mean loss over the ranks of each step."""
    return [fmean(rank["loss"] for rank in step) for step in steps]


def disagreement(
    case: Content, contenders: Mapping[str, type[Contender]] = CONTENDERS
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


def step_seconds(case: Content, name: str) -> list[float]:
    """Return a contender's step time in each round: the median step, by its slowest rank."""
    return [
        median(slowest(step, "seconds") for step in turn["steps"])
        for turn in case["contenders"][name]
    ]


def seconds_by_round(case: Content, name: str) -> list[float]:
    """Return a contender's step time in each round, with DiLoCo's share of an exchange."""
    meetings = case["beside"][name].get("meetings")
    own = step_seconds(case, name)
    if not meetings:
        return own
    pairs = zip(own, meetings, strict=True)
    return [inner + each["seconds"] / case["local_steps"] for inner, each in pairs]


def wire_bytes(case: Content, name: str) -> float:
    """Return the bytes that a host sends in a step, DiLoCo's share of an exchange included."""
    own = median(max(turn["sent"]) for turn in case["contenders"][name])
    if meetings := case["beside"][name].get("meetings"):
        own += median(max(each["sent"]) for each in meetings) / case["local_steps"]
    return float(own)


def overheads(case: Content, name: str) -> list[float]:
    """Return the microseconds per group beyond the floor, for each round."""
    return [
        1e6 * (median(turn) - median(floor)) / case["groups"]
        for turn, floor in zip(case["seconds"][name], case["seconds"]["floor"], strict=True)
    ]


def peak(case: Content, name: str) -> int | None:
    """Return the peak of a contender over the phases of a step, in bytes."""
    measured = case["contenders"].get(name)
    return max(measured["peak"].values()) if measured else None


def too_high(case: Content) -> str | None:
    """Tell where ours takes more than the formula or FSDP2 allow, or return ``None``."""
    mine = peak(case, "ours")
    if mine is None:
        return None
    limits = {"the formula": sum(case["formula"].values()), "FSDP2": peak(case, "fsdp2")}
    found = [
        f"{mine / limit:.2f} x {name}"
        for name, limit in limits.items()
        if limit and mine > ALLOWED * limit
    ]
    return ", ".join(found) or None


def loss_ratio(case: Content, name: str) -> float:
    """A contender's loss on text that was held out, beside that of synchronous training."""
    found = case["contenders"]
    return float(found[name]["judged"] / found["synchronous"]["judged"])


def bytes_ratio(case: Content, name: str) -> float:
    """How many times fewer bytes have crossed between replicas, the flush at the end included."""
    mine, theirs = (case["contenders"][each] for each in (name, "synchronous"))
    return float((theirs["sent"] + theirs["sent_at_end"]) / (mine["sent"] + mine["sent_at_end"]))


def optimizer_differences(case: Mapping[str, Any]) -> list[str]:
    """Name the kinds of optimizers of torch whose losses depend on what shards the model.

    Both runtimes reduce gradients of two ranks alike, and run the same optimizer.
    """
    if case["part"] != "loss" or case["ranks"] != 2:
        return []
    losses = case["losses"]
    both = [kind for kind in ("adamw", "sgd") if {f"ours-{kind}", f"fsdp2-{kind}"} <= set(losses)]
    return [kind for kind in both if losses[f"ours-{kind}"] != losses[f"fsdp2-{kind}"]]


def plan_ranks(case: Content) -> list[tuple[float, float]]:
    """Return each rank's PSS before it has a model and at its peak, medians over runs, in bytes."""
    return [
        (
            median(each["base"] for each in runs),
            median(each["peak"] + each["unmapped"] for each in runs),
        )
        for runs in zip(*case["runs"], strict=True)
    ]


def factor(cases: Sequence[Content]) -> float:
    """Return how many times its planned tensors a rank takes, in the median of all ranks."""
    return median(
        (measured - bare) / case["predicted"]["peak"]
        for case in cases
        for bare, measured in plan_ranks(case)
    )
