"""The examples run as their first lines say, and show what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def _torchrun(name: str) -> str:
    """Run an example under torchrun on two ranks; return what it prints."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    for _ in range(4):
        result = subprocess.run(
            [*command, "--nproc-per-node", "2", str(EXAMPLES / name)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        # A process that has destroyed its groups and left Python may still abort as libraries
        # unload, one time in ten, after all of its work: once more then.
        if "terminate called without an active exception" not in result.stderr:
            break
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    untested = [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in source]
    assert not untested


def test_the_minimal_example_is_short_and_learns() -> None:
    assert len((EXAMPLES / "fully_shard_minimal.py").read_text().splitlines()) < 40

    losses = [
        float(loss) for loss in re.findall(r"loss ([\d.]+)", _torchrun("fully_shard_minimal.py"))
    ]

    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]


def test_the_stages_of_zero_differ_in_memory_and_agree_in_loss() -> None:
    _, *rows = _torchrun("zero_1_2_3.py").splitlines()

    stages = {row.split()[0]: row.split()[1:] for row in rows}
    assert list(stages) == ["none", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert [stage[0] for stage in stages.values()] == ["100%", "50%", "50%", "50%"]
    assert [stage[1] for stage in stages.values()] == ["100%", "100%", "100%", "0%"]
    assert len({stage[-1] for stage in stages.values()}) == 1, "the losses differ"
