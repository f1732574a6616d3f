"""When faults come, and what of a training was useful."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: What a process of a training has behind it, in order; see ``stretched/sitecustomize.py``.
PHASES = ("started", "imported", "connected", "loaded", "stepped")


@dataclass(frozen=True)
class Fault:
    """Something that happens to a process.

    Attributes:
        at: seconds since the measurement began.
        victim: the number of the rank, or of the replica.
    """

    at: float
    victim: int


@dataclass(frozen=True)
class Progress:
    """How far a training is.

    Attributes:
        at: seconds.
        tokens: that its parameters have learned from by then, none of them twice.
    """

    at: float
    tokens: int


def schedule(per_minute: float, seconds: float, victims: int, seed: str) -> list[Fault]:
    """Draw as many faults as a rate means, at any time and victim with the same probability.

    These are the faults of a Poisson process, given how many there are.

    Args:
        per_minute: faults of all victims together.
        seconds: that they are spread over.
        victims: ranks, or replicas.
        seed: the same one draws the same faults.
    """
    draw = random.Random(seed)
    count = round(per_minute * seconds / 60)
    faults = [Fault(draw.uniform(0, seconds), draw.randrange(victims)) for _ in range(count)]
    return sorted(faults, key=lambda fault: fault.at)


def useful(progress: Sequence[Progress], seconds: float) -> tuple[Progress, Progress] | None:
    """Return the first and the last progress of a measurement.

    It begins with the first progress, and ends with the first one that comes after so many seconds
    and is an advance. A training that repeats steps then, or starts again, is waited for.

    Args:
        progress: in the order in which it was seen. It falls back where steps were lost.
        seconds: that the measurement lasts at least.

    Returns:
        Both; None: it has not ended.
    """
    for before, now in itertools.pairwise(progress):
        if now.at - progress[0].at >= seconds and now.tokens > before.tokens:
            return progress[0], now
    return None


def speed(case: Mapping[str, Any]) -> float:
    """Return the useful tokens per second of a run."""
    return float(case["tokens"] / case["seconds"])


def restarts(
    faults: Sequence[float],
    affected: Sequence[Collection[int]],
    phases: Iterable[Mapping[str, Any]],
) -> list[dict[str, float]]:
    """Return what each restart took apart.

    Args:
        faults: when processes were killed, in order.
        affected: the ranks that each of them starts anew.
        phases: what processes have told: ``rank``, ``phase``, ``at``.

    Returns:
        For each fault the seconds until all affected ranks were in a phase, counted from the phase
        before; the first one from the fault. Those are left out whose restart another one cut off.
    """
    told = list(phases)
    found = []
    for number, (begin, ranks) in enumerate(zip(faults, affected, strict=True)):
        later = zip(faults[number + 1 :], affected[number + 1 :], strict=True)
        end = next((at for at, others in later if set(others) & set(ranks)), float("inf"))
        reached = [begin]
        for phase in PHASES:
            by_rank = {
                line["rank"]: line["at"]
                for line in told
                if line["phase"] == phase and line["rank"] in ranks and begin < line["at"] < end
            }
            if len(by_rank) < len(ranks):
                break
            reached.append(max(by_rank.values()))
        else:
            lasted = [after - before for before, after in itertools.pairwise(reached)]
            found.append(dict(zip(PHASES, lasted, strict=True)))
    return found
