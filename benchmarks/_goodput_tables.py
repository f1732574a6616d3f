"""Tables of a ``goodput`` document."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from _goodput_run import speed
from _report import Table

SYNCHRONOUS, DILOCO = "sync", "diloco"
#: DiLoCo keeps so much of its speed at the rates that leave a synchronous training less than that.
KEPT, LOST = 0.88, 0.40


def title(contender: str) -> str:
    """Name a contender, such as ``sync:20``."""
    kind, _, number = contender.partition(":")
    return f"DiLoCo, H = {number}" if kind == DILOCO else f"synchronous, saves every {number}"


def is_diloco(contender: str) -> bool:
    """Whether a contender trains with DiLoCo."""
    return contender.partition(":")[0] == DILOCO


def runs_of(case: dict[str, Any], contender: str) -> dict[float, list[dict[str, Any]]]:
    """Return a contender's runs that came to their end, by the rate of faults."""
    found: dict[float, list[dict[str, Any]]] = {}
    for run in case["runs"]:
        if run["contender"] == contender and "ended" not in run:
            found.setdefault(run["per_minute"], []).append(run)
    return dict(sorted(found.items()))


def contenders_of(case: dict[str, Any]) -> list[str]:
    """Return the contenders of a case, in the order in which they were asked for."""
    return list(case["settings"]["contenders"])


def goodputs(case: dict[str, Any], contender: str) -> dict[float, float]:
    """Return a contender's speed at each rate, divided by its speed without faults."""
    runs = runs_of(case, contender)
    if 0 not in runs:
        return {}
    undisturbed = statistics.mean(map(speed, runs[0]))
    return {rate: statistics.mean(map(speed, of)) / undisturbed for rate, of in runs.items()}


def keeps_promise(case: dict[str, Any]) -> bool:
    """Whether DiLoCo loses little wherever a synchronous training loses most."""
    if any("ended" in run for run in case["runs"]):
        return False
    names = contenders_of(case)
    ours = [goodputs(case, name) for name in names if is_diloco(name)]
    theirs = [goodputs(case, name) for name in names if not is_diloco(name)]
    lost = {rate for found in theirs for rate, kept in found.items() if kept < LOST}
    return all(found.get(rate, 1.0) >= KEPT for found in ours for rate in lost)


def goodput_tables(content: dict[str, Any]) -> list[Table]:
    """Make a table of goodput at each rate for each case."""
    return [_goodput_table(case) for case in content["cases"]]


def _goodput_table(case: dict[str, Any]) -> Table:
    settings = case["settings"]
    table = Table(
        f"Useful tokens per second; kills at random; {settings['model']}, "
        f"{settings['ranks']} processes, steps of {settings['step']:g} s",
        ["contender", "a minute", "seen", "tokens/s", "goodput", "tokens", "loss", "as many, calm"],
    )
    for name in contenders_of(case):
        for rate, runs in runs_of(case, name).items():
            for run in runs:
                end, loss = run["losses"][-1] if run["losses"] else (None, None)
                table.rows.append(
                    [
                        title(name),
                        f"{rate:g}",
                        str(len(run["faults"])),
                        f"{speed(run):,.0f}",
                        _share(case, name, run),
                        "-" if end is None else f"{end:,}",
                        "-" if loss is None else f"{loss:.4f}",
                        _calm(case, name, end) if rate else "",
                    ]
                )
    busy = [run["busy"] for run in case["runs"] if "ended" not in run]
    table.notes += [
        "goodput: tokens per second, divided by those of the same contender without faults",
        "loss: nats per token on 1,024 sequences that were held out, of the last checkpoint, and "
        "the tokens that it has learned from; as many, calm: the loss of the same contender "
        "without faults after as many tokens, interpolated",
    ]
    if busy:
        table.notes.append(
            f"{settings['seconds']:g} s and more each, {settings['at_once']} trainings at once; "
            f"processors were busy for {100 * statistics.median(busy):.0f} % of the time (median), "
            f"{100 * max(busy):.0f} % at most"
        )
    for run in case["runs"]:
        if "ended" in run:
            first = run["ended"].splitlines()[0]
            table.notes.append(
                f"{title(run['contender'])}, {run['per_minute']:g} a minute: {first}"
            )
    return table


def _share(case: dict[str, Any], contender: str, run: dict[str, Any]) -> str:
    calm = runs_of(case, contender).get(0)
    return f"{100 * speed(run) / statistics.mean(map(speed, calm)):.1f} %" if calm else "-"


def _calm(case: dict[str, Any], contender: str, tokens: int | None) -> str:
    """The loss without faults after as many tokens, interpolated between checkpoints."""
    points = [
        (at, loss) for run in runs_of(case, contender).get(0, [])[:1] for at, loss in run["losses"]
    ]
    if tokens is None:
        return "-"
    for (before, high), (after, low) in itertools.pairwise(points):
        if before <= tokens <= after:
            share = (tokens - before) / (after - before)
            return f"{high + share * (low - high):.4f}"
    return "-"
