"""``benchmarks/strategies.py`` counts on the wire what strategies send over a shaped link."""

from __future__ import annotations

import copy
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


@needs_hosts
def test_table_shares_an_exchange_out_over_a_round(document: dict[str, Any]) -> None:
    from _strategies_tables import strategies_tables

    changed = copy.deepcopy(document)
    (case,) = changed["cases"]
    seconds = {"hybrid": [0.5, 0.6], "diloco-int8": [0.2, 0.2], "floor": [0.1, 0.1]}
    for name, rounds in {**seconds, "fsdp2-hybrid": [1.0, 1.0]}.items():
        for turn, slowest in zip(case["contenders"][name], rounds, strict=True):
            turn["sent"] = [1e6, 2e6]
            for rank in turn["steps"][0]:
                rank["seconds"] = slowest
    for meeting in case["beside"]["diloco-int8"]["meetings"]:
        meeting |= {"seconds": 1.0, "sent": [5e6, 4e6]}
    (table,) = strategies_tables(changed)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    apart, hybrid = rows["DiLoCo, int8"], rows["HYBRID_SHARD"]
    assert (apart["step s"], apart["utilization"], apart["MB/step"]) == ("0.400", "25 %", "3.00")
    assert (hybrid["x FSDP2 hybrid"], hybrid["tokens/s"]) == ("0.55", "116")
    assert "an exchange 1.000 s and 5.00 MB, shared by H = 5 steps" in "".join(table.notes)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gbit", "0"], "'0' is not a speed"),
        (["--ranks", "3"], "3 is not even"),
        (["--stored", "nowhere.json"], "there is no file 'nowhere.json'"),
    ],
)
def test_bad_options_are_refused_at_once(arguments: list[str], complaint: str) -> None:
    done = call_script("strategies.py", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_a_machine_without_hosts_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no ``ip`` in it
    done = call_script("strategies.py", "--params", "tiny")
    assert done.returncode == 2
    assert "hosts need root" in done.stdout
