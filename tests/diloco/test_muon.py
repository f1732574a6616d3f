"""Muon trains the replicas of DiLoCo, sharded, saved and resumed like any inner optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwise import checkpoint
from shardwise.diloco import OuterSGD
from tests.diloco.reference import muon_of, plain
from tests.diloco.replicas import Replica, assert_values, equal_everywhere, two_replicas
from tests.threads import run_threads

STEPS, EVERY = 8, 3


def _train(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    mesh = two_replicas()
    group = mesh.get_group("shard")
    path = path / f"replica-{mesh.get_coordinate()[0]}"
    replica = Replica(mesh, inner_of=muon_of, every=EVERY)
    replica.train(1, 5)
    checkpoint.save(path, replica.model, replica.diloco, group=group)
    replica.train(6, STEPS)
    other = Replica(mesh, inner_of=muon_of, every=EVERY)
    checkpoint.load(path, other.model, other.diloco, group=group)
    other.train(6, STEPS)
    return {
        "outer": replica.outer_values(),
        "inner": replica.inner_values(),
        "same": equal_everywhere(replica.outer_bits(), mesh),
        "resumed": {"outer": other.outer_values(), "inner": other.inner_values()},
    }


def test_it_is_what_one_process_computes_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Two replicas of two shards each, saved inside of a round."""
    expected = plain(STEPS, EVERY, OuterSGD(), inner_of=muon_of)
    for rank, found in enumerate(run_threads(_train, 4, tmp_path)):
        # Orthogonalization is in bf16, and magnifies how gradients were rounded.
        outer, inner = found["outer"], found["inner"]
        assert_values(outer, expected.outer, f"rank {rank}, outer", tolerance=5e-3)
        assert_values(inner, expected.replicas[rank // 2], f"rank {rank}, inner", tolerance=5e-3)
        assert found["same"], "all replicas have the same outer state to the bit"
        for part, values in found["resumed"].items():
            for fqn, value in values.items():
                assert torch.equal(value, found[part][fqn]), f"{part} {fqn} on rank {rank}"
