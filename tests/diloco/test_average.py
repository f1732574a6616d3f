"""Averages over ranks: the same bits everywhere, and what encoding loses comes later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.diloco import WireFormat
from shardwise.diloco.average import Average
from shardwise.transport.all_to_all import AllToAll
from tests.threads import run_threads

RANKS, NUMEL, ROUNDS = 3, 12000, 20
SECTIONS = (1, 1023, NUMEL - 1024)
FORMATS = (WireFormat.INT8, WireFormat.INT4, WireFormat.TERNARY)


def _vector(rank: int, round_: int) -> torch.Tensor:
    """Return what all ranks have in common, and as much that is their own."""
    common = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * round_))
    own = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * round_ + rank + 1))
    return common + own


def _play(rank: int, world_size: int) -> dict[str, Any]:
    """Average with every format, for many rounds."""
    swap = AllToAll(dist.group.WORLD, torch.device("cpu"))
    found: dict[str, Any] = {}
    for wire in FORMATS:
        error, total = torch.zeros(NUMEL), torch.zeros(NUMEL, dtype=torch.float64)
        begun, kept = swap.bytes_sent, []
        for round_ in range(ROUNDS):
            average = Average(_vector(rank, round_), swap, wire, "a vector", error, SECTIONS)
            if round_ % 2:
                average.advance()
            total += average.wait()
            kept.append(error.norm().item())
        alone = Average(torch.zeros(NUMEL), None, wire, "a vector", error, SECTIONS)
        found[wire.value] = {
            "total": total,
            "error": error.clone(),
            "kept": kept,
            "bytes": (swap.bytes_sent - begun) / ROUNDS,
            "alone": alone.wait(),
            "left": error.norm().item(),
        }
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_threads(_play, RANKS)


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.value)
def test_all_ranks_have_the_same_bits(found: Any, wire: WireFormat) -> None:
    first, *others = (results[wire.value]["total"] for results in found)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.value)
def test_averages_lack_the_mean_of_what_ranks_keep_and_no_more(
    found: Any, wire: WireFormat
) -> None:
    """Whatever a rank lost, of its contributions or of the average, it keeps in the same units."""
    exact = torch.zeros(NUMEL, dtype=torch.float64)
    for round_ in range(ROUNDS):
        exact += sum(_vector(rank, round_).double() for rank in range(RANKS)) / RANKS
    kept = sum(results[wire.value]["error"].double() for results in found) / RANKS
    total = found[0][wire.value]["total"]
    torch.testing.assert_close(total + kept, exact, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.value)
def test_what_is_kept_does_not_grow_forever(found: Any, wire: WireFormat) -> None:
    for results in found:
        kept = results[wire.value]["kept"]
        assert max(kept[ROUNDS // 2 :]) < 1.5 * max(kept[: ROUNDS // 2])


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.value)
def test_who_is_left_alone_adds_what_it_has_kept(found: Any, wire: WireFormat) -> None:
    for results in found:
        assert torch.equal(results[wire.value]["alone"], results[wire.value]["error"])
        assert results[wire.value]["left"] == 0


def test_few_bits_take_a_sixteenth_of_fp32(found: Any) -> None:
    ring = 2 * (RANKS - 1) / RANKS * 4 * NUMEL
    for results in found:
        assert results["int4"]["bytes"] < ring / 7
        assert results["ternary"]["bytes"] < ring / 16
