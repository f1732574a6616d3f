"""``benchmarks/strategies.py`` counts on the wire what strategies send over a shaped link."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.benchmarks.scripts import call_script
from tests.hosts.network import needs_hosts

GBIT = 0.1


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run with the smallest model leaves."""
    folder = tmp_path_factory.mktemp("strategies")
    done = call_script(
        "strategies.py",
        *("--gbit", str(GBIT), "--params", "tiny", "--tokens", "16"),
        *("--rounds", "2", "--steps", "1", "--warmup", "1", "--local-steps", "5"),
        *("--contenders", "hybrid,full-int8,diloco-int8,fsdp2-hybrid,floor"),
        *("--json", str(folder / "raw.json"), "--picture", str(folder / "picture.svg")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses: OK" in done.stdout
    said = "".join(ElementTree.fromstring((folder / "picture.svg").read_text()).itertext())
    assert "HYBRID_SHARD" in said
    assert "0.1 Gbit/s" in said
    loaded: dict[str, Any] = json.loads((folder / "raw.json").read_text())
    return loaded


@needs_hosts
def test_interfaces_count_what_crosses_and_no_more(document: dict[str, Any]) -> None:
    (case,) = document["cases"]
    whole = 4 * case["numel"]
    for name in ("hybrid", "fsdp2-hybrid"):
        for turn in case["contenders"][name]:
            # Each host's two ranks all-reduce a half each: as much as the gradients, and headers.
            assert turn["sent"] == pytest.approx([1.1 * whole] * 2, rel=0.1), name
            slowest = max(rank["seconds"] for rank in turn["steps"][0])
            assert slowest > 0.5 * whole * 8 / (GBIT * 1e9), f"{name}: the link is not shaped"
        one, several = case["beside"][name]["accumulated"]
        assert (one["microbatches"], several["microbatches"]) == (1, 4)
        assert max(several["sent"]) < 1.1 * max(one["sent"]), f"{name}: once per step"
    for turn in case["contenders"]["full-int8"]:
        # Every parameter and every gradient once, in a byte each: half from either host.
        assert turn["sent"] == pytest.approx([0.28 * whole] * 2, rel=0.2)
    for turn in case["contenders"]["diloco-int8"]:
        assert max(turn["sent"]) < 0.05 * whole, "an inner step crosses hosts"
    for meeting in case["beside"]["diloco-int8"]["meetings"]:
        assert meeting["sent"] == pytest.approx([0.28 * whole] * 2, rel=0.1)
    assert all(peak > 1e6 for each in case["beside"].values() for peak in each["memory"])


def test_a_machine_without_hosts_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no ``ip`` in it
    done = call_script("strategies.py", "--params", "tiny")
    assert done.returncode == 2
    assert "hosts need root" in done.stdout
