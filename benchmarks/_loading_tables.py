"""Tables of a ``loading`` document."""

from __future__ import annotations

import statistics
from typing import Any

from _report import Table

TITLES = {
    "ours": "shardwise",
    "full": "transformers on every rank",
    "efficient": "Accelerate, efficient loading",
    "floor": "plain safetensors, one process",
}
CONTENDERS = tuple(TITLES)
MIB = 2**20
FACTOR, EXTRA = 1.10, 32 * MIB  # what we promise: of the shards, and bytes beside them


def loading_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case, a row for each contender."""
    return [_table(case) for case in content["cases"]]


def too_high(case: dict[str, Any]) -> bool:
    """Whether ours takes more memory than promised, in any turn on any rank."""
    ours = case["contenders"]["ours"]
    return any(
        peak > FACTOR * shards + EXTRA
        for turn in ours["turns"]
        for peak, shards in zip(turn["pss"], ours["shards"], strict=True)
    )


def _table(case: dict[str, Any]) -> Table:
    files = "1 file" if case["files"] == 1 else f"about {case['files']} files"
    shards = case.get("shards", case["dtype"])
    dtypes = case["dtype"] if shards == case["dtype"] else f"{case['dtype']}, shards in {shards}"
    table = Table(
        f"{case['params']} parameters in {dtypes}, {files}, "
        f"{case['nbytes'] / 1e9:.2f} GB, {case['ranks']} ranks",
        ["contender", "peak MiB a rank", "x shards", "s", "x plain", "read x files"],
    )
    floor = _seconds(case["contenders"]["floor"])
    for name, title in TITLES.items():
        found = case["contenders"][name]
        peak = max(max(turn["pss"]) for turn in found["turns"])
        seconds = _seconds(found)
        read = statistics.median(sum(turn["read"]) for turn in found["turns"])
        table.rows.append(
            [
                title,
                f"{peak / MIB:.0f}",
                f"{peak / max(found['shards']):.2f}",
                f"{seconds:.2f}",
                f"{seconds / floor:.2f}",
                f"{read / case['nbytes']:.2f}" if read > case["nbytes"] / 100 else "mapped",
            ]
        )
    table.notes.append(
        f"{len(case['contenders']['ours']['turns'])} turns; peak: the highest of all turns and "
        "ranks, above the process before; seconds: median of the slowest rank; files in the page "
        "cache"
    )
    return table


def _seconds(found: dict[str, Any]) -> float:
    return statistics.median(max(turn["seconds"]) for turn in found["turns"])
