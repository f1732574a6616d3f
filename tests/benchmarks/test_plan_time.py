"""``benchmarks/plan_time.py`` compares predicted steps with real ones."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest


def found(steps: list[list[float]], predicted: list[float]) -> dict[str, Any]:
    """Return a case with the seconds of the steps of each round, and what was predicted there."""
    from plan_time import CASES

    rounds = [
        {"steps": took, "predicted": {"seconds": seconds, "bound_by": "host"}}
        for took, seconds in zip(steps, predicted, strict=True)
    ]
    return {"case": asdict(CASES[0]), "rounds": rounds}


def test_the_error_of_a_case_is_the_median_over_rounds() -> None:
    from plan_time import tables

    # Other programs disturb the slower steps, and the third round altogether.
    quick, slow = [1.0] * 8 + [9.0, 9.0], [2.0] * 10
    cases = [found([quick, quick, slow], [1.1, 1.2, 1.0]), found([quick], [0.5])]
    [shown] = tables(cases)
    assert [row[2:6] for row in shown.rows] == [
        ["1,000 ms", "1,100 ms", "+10.0 %", "-50.0 to +20.0 %"],
        ["1,000 ms", "500 ms", "-50.0 %", "-50.0 to -50.0 %"],
    ]
    assert shown.notes == ["Error: 30.0 % in the median, 50.0 % at most."]


def test_hosts_share_the_processors_of_this_machine() -> None:
    from plan_time import CASES

    for case in CASES:
        hosts = 2 if case.gbit else 1
        assert case.settings.ranks_per_host * hosts == case.settings.mesh.size
        assert (case.link is not None) == (hosts == 2)


@pytest.mark.parametrize("field", ["model", "strategy", "dtype", "transport", "gbit", "mesh"])
def test_cases_differ_in_all_that_changes_a_step(field: str) -> None:
    from plan_time import CASES

    assert len(CASES) >= 12
    assert len({getattr(case, field) for case in CASES}) > 1
