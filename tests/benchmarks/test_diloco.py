"""``benchmarks/diloco.py`` trains what it says, and counts every byte between replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.benchmarks.scripts import call_script

PARAMETERS = 920_704  # of llama-tiny


@pytest.mark.long
def test_bytes_are_counted_alike_for_both(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    arguments = ["--start", "1", "--steps", "4", "--every", "3", "--batch", "1", "--length", "16"]
    done = call_script("diloco.py", *arguments, "--contenders", "int8", "--json", str(path))
    assert done.returncode == 1, f"it keeps no promises in four steps: {done.stdout}{done.stderr}"
    [case] = json.loads(path.read_text())["cases"]
    found = case["contenders"]
    assert case["settings"]["steps"] == 4
    # Two ranks, each of which sends a half of its vector twice.
    assert found["synchronous"]["sent"] == 2 * 4 * 4 * PARAMETERS
    assert found["synchronous"]["sent_at_end"] == 0
    for name in ("sent", "sent_at_end"):  # one exchange after three steps, one at the end
        assert found["int8"][name] == pytest.approx(2 * PARAMETERS * (1 + 4 / 256), rel=1e-3)
    assert all(4 < each["judged"] < 7 for each in found.values())
    assert f"{2 * 4 * 4 * PARAMETERS / 1e6:.2f}" in done.stdout


def test_a_sweep_trains_all_seeds_at_once_and_counts_what_replicas_send(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    contenders = ["every=2", "every=2,wire=ternary", "every=2,wire=int4,late=1"]
    small = ["--steps", "4", "--seeds", "2", "--batch", "1", "--length", "8"]
    done = call_script("diloco_sweep.py", *small, "--json", str(path), "--contenders", *contenders)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    [case] = json.loads(path.read_text())["cases"]
    plain, ternary, int4 = case["contenders"].values()
    assert ternary["sent"] <= plain["sent"] / 16
    assert int4["sent"] <= plain["sent"] / 7
    # Two exchanges of four replicas: each sends three quarters of its parameters twice.
    assert plain["sent"] % (2 * 4 * 2 * 3) == 0
    for found in (plain, ternary, int4, case["synchronous"][""]):
        assert len(found["losses"]) == 2
        assert all(4 < loss < 6 for loss in found["losses"])


def test_stacked_models_compute_what_each_of_them_does_alone() -> None:
    from _stacked_lm import Shape, StackedLM

    shape = Shape(vocabulary=11, length=6, width=8, layers=1, heads=2)
    stacked, alone = StackedLM(shape, [3, 4]), StackedLM(shape, [4])
    tokens = torch.randint(0, 11, (2, 5, 7), generator=torch.Generator().manual_seed(0))
    losses = stacked(tokens)
    torch.testing.assert_close(losses[1:], alone(tokens[1:]))
    losses.sum().backward()
    alone(tokens[1:]).sum().backward()
    for many, one in zip(stacked.parameters(), alone.parameters(), strict=True):
        assert many.grad is not None
        assert one.grad is not None
        torch.testing.assert_close(many.grad[1:], one.grad)
    values = stacked.read()
    stacked.write(values.flip(0))
    assert torch.equal(stacked.read(), values.flip(0))
