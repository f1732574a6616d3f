"""``benchmarks/frontier.py``: what its hosts compute and send, its table and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise import Wire
from tests.benchmarks.scripts import call_script

ELEMENTS = 4 * 1024
PLAIN, INT8 = Wire(), Wire(gather="int8", reduce="int8", error_feedback=True)


@pytest.mark.parametrize("strategy", ["hybrid", "full"])
def test_gradients_are_averaged_and_parameters_rounded_as_the_wire_says(strategy: str) -> None:
    from diloco_sweep import Settings
    from frontier import Hosts

    settings = Settings(replicas=4, seeds=2, steps=1, batch=1, length=8)
    gradients = torch.randn(2, 4, ELEMENTS, generator=torch.Generator().manual_seed(0))
    parameters = gradients[0]
    exact, rounded = (Hosts(strategy, wire, settings, ELEMENTS) for wire in (PLAIN, INT8))

    torch.testing.assert_close(exact.reduce(gradients), gradients.mean(1))
    assert torch.equal(exact.gather(parameters), parameters)

    total = sum(rounded.reduce(gradients) for _ in range(50))
    assert isinstance(total, torch.Tensor)
    torch.testing.assert_close(total / 50, gradients.mean(1), rtol=0, atol=2e-3)  # error feedback
    found = rounded.gather(parameters)
    torch.testing.assert_close(found, parameters, rtol=0, atol=0.02)
    assert torch.equal(found, parameters) == (strategy == "hybrid")

    chunk = ELEMENTS // 4
    assert exact.bytes_sent == 2 * 3 * chunk * 4, "both hops, or a hop and a gather"
    hops = 100 if strategy == "hybrid" else 51
    assert rounded.bytes_sent == hops * 3 * (chunk + 4 * chunk // 256)


def test_a_run_compares_all_with_hybrid_sharding_in_fp32(tmp_path: Path) -> None:
    raw, picture = tmp_path / "raw.json", tmp_path / "frontier.svg"
    small = ["--steps", "4", "--seeds", "2", "--batch", "1", "--length", "8"]
    wires = ["hybrid:fp32", "full:gather=int8,reduce=int8"]
    diloco = ["every=2", "every=2,wire=ternary"]
    done = call_script(
        "frontier.py", *small, "--json", str(raw), "--picture", str(picture), "--wires", *wires,
        "--diloco", *diloco,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    [case] = json.loads(raw.read_text())["cases"]
    assert list(case["contenders"]) == [*wires, *diloco]
    sent = [each["sent"] for each in case["contenders"].values()]
    assert sent[1] == pytest.approx(sent[0] * (1 + 4 / 256) / 4, rel=0.01)
    assert sent[2] == pytest.approx(sent[0] / 2, rel=0.01)
    assert "full, gather=int8, reduce=int8" in done.stdout
    assert "DiLoCo, H = 2, ternary" in done.stdout
    assert "ternary" in picture.read_text()
