"""``benchmarks/vit_build.py`` judges peaks by formulas, and says where they are exceeded."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.benchmarks.scripts import BENCHMARKS

STORED = BENCHMARKS / "results" / "2026-11-21-shm-vit-build.json"


@pytest.fixture
def case() -> dict[str, Any]:
    """The case that is documented."""
    loaded: dict[str, Any] = json.loads(STORED.read_text())["cases"][0]
    return loaded


def test_the_formula_of_the_documented_case_on_paper(case: dict[str, Any]) -> None:
    from _vit_build_tables import limits

    width, mlp, blocks, ranks = 1280, 4 * 1280, 20, 4
    block = 4 * (width**2 + width) + 2 * width * mlp + mlp + width + 4 * width
    root = 3 * 14 * 14 * width + width + width + 257 * width + 2 * width + 1001 * 1000 + 280 * 1000
    assert case["formula"]["numel"] == blocks * block + root
    step = case["formula"]["step"]
    assert step["shards"] == (blocks * block + root) // ranks * 16, "four tensors of 4 bytes"
    assert step["unsharded"] == step["gradients"] == 4 * (2 * block + root)
    build = case["formula"]["build"]
    assert build == {"shards": step["shards"] // 4, "layer": 4 * (width * mlp + mlp)}
    assert limits(case) == {"build": sum(build.values()), "step": sum(step.values())}


@pytest.mark.parametrize(
    ("what", "ratio", "verdict"),
    [("build", 1.04, None), ("build", 1.06, "build 1.06 x"), ("step", 1.07, "step 1.07 x")],
)
def test_a_peak_may_be_five_percent_higher(
    case: dict[str, Any], what: str, ratio: float, verdict: str | None
) -> None:
    from _vit_build_tables import limits, too_high

    changed = copy.deepcopy(case)
    changed["measured"][what] = ratio * limits(case)[what]
    assert too_high(changed) == verdict
