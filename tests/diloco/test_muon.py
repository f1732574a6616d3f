"""Muon trains the replicas of DiLoCo, sharded, saved and resumed like any inner optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from shardwise.diloco import OuterSGD, WireFormat
from tests.diloco.reference import muon_of, plain
from tests.diloco.replicas import Replica, assert_values, equal_everywhere, two_replicas
from tests.threads import run_threads

STEPS, EVERY = 8, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"every": EVERY},
    "ternary": {"every": EVERY, "wire": WireFormat.TERNARY},
}


def _train(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    mesh = two_replicas()
    group = mesh.get_group("shard")
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        path = folder / name / f"replica-{mesh.get_coordinate()[0]}"
        replica = Replica(mesh, inner_of=muon_of, **settings)
        replica.train(1, 5)
        checkpoint.save(path, replica.model, replica.diloco, group=group)
        replica.train(6, STEPS)
        other = Replica(mesh, inner_of=muon_of, **settings)
        checkpoint.load(path, other.model, other.diloco, group=group)
        other.train(6, STEPS)
        found[name] = {
            "outer": replica.outer_values(),
            "inner": replica.inner_values(),
            "same": equal_everywhere(replica.outer_bits(), mesh),
            "resumed": {"outer": other.outer_values(), "inner": other.inner_values()},
        }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two replicas of two shards each."""
    return run_threads(_train, 4, tmp_path_factory.mktemp("muon"))


def test_it_is_what_one_process_computes_replica_by_replica(found: Any) -> None:
    expected = plain(STEPS, EVERY, OuterSGD(), inner_of=muon_of)
    for rank, results in enumerate(found):
        # Orthogonalization is in bf16, and magnifies how gradients were rounded.
        outer, inner = results["fp32"]["outer"], results["fp32"]["inner"]
        assert_values(outer, expected.outer, f"rank {rank}, outer", tolerance=5e-3)
        assert_values(inner, expected.replicas[rank // 2], f"rank {rank}, inner", tolerance=5e-3)


@pytest.mark.parametrize("name", SETTINGS)
def test_all_replicas_have_the_same_outer_state_to_the_bit(found: Any, name: str) -> None:
    assert all(results[name]["same"] for results in found)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_saved_inside_a_round_goes_on_bit_for_bit(found: Any, name: str) -> None:
    for rank, results in enumerate(found):
        for part, values in results[name]["resumed"].items():
            for fqn, value in values.items():
                assert torch.equal(value, results[name][part][fqn]), f"{part} {fqn} on rank {rank}"
