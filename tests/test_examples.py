"""The examples run as their first lines say, and show what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def _torchrun(name: str, *arguments: str, cwd: Path | None = None) -> str:
    """Run an example under torchrun on two ranks; return what it prints."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    for _ in range(4):
        result = subprocess.run(
            [*command, "--nproc-per-node", "2", str(EXAMPLES / name), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=cwd,
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


def test_every_example_is_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}

    assert all(length < 100 for length in lengths.values()), lengths


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


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def test_a_script_for_one_device_made_distributed_trains_alike(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    single = [sys.executable, str(EXAMPLES / "single_gpu.py")]
    output = subprocess.run(
        single, capture_output=True, text=True, timeout=120, cwd=alone, check=True
    ).stdout

    losses = _losses(output)
    assert losses[-1] < 0.5 * losses[0]
    assert _losses(_torchrun("distributed.py", cwd=together)) == pytest.approx(losses, abs=1e-3)
    one, other = (torch.load(folder / "model.pt") for folder in (alone, together))
    assert {name: value.shape for name, value in one.items()} == {
        name: value.shape for name, value in other.items()
    }


def test_the_changed_lines_of_the_distributed_script_are_marked() -> None:
    before = (EXAMPLES / "single_gpu.py").read_text().split('"""\n', 1)[1].splitlines()
    after = (EXAMPLES / "distributed.py").read_text().split('"""\n', 1)[1].splitlines()

    kept = [line.strip() for line in before if line.strip()]
    new = [line for line in after if line.strip() and line.strip() not in kept]
    save = 'torch.save(state, "model.pt")'
    assert [line for line in new if "# <--" not in line and line.strip() != save] == []
    assert len(new) < 20


def test_a_script_for_fsdp1_runs_with_another_import() -> None:
    output = _torchrun("fsdp1_no_sync.py")

    losses = _losses(output)
    assert losses[-1] < 0.7 * losses[0]
    assert "saved 27 tensors, optimizer state of 27" in output


@pytest.mark.parametrize("nested", [True, False], ids=["by-hand", "by-policy"])
def test_nested_fsdp_as_pytorch_xla_has_it(nested: bool) -> None:
    arguments = ["--use-nested-fsdp", "--use-gradient-checkpointing"] if nested else []
    output = _torchrun("xla_nested_fsdp.py", *arguments)

    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", output)]
    assert accuracies[-1] > 0.95
    assert "5 units, 7106 parameters on this rank" in output
