"""Muon among processes: its messages, and ranks that fail in the middle."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise import PeerLostError
from shardwise.optim import matrices
from tests.corpus.gathering import in_full
from tests.harness import run_ranks
from tests.optim.nets import Mesh, Net, make_muon, set_gradients
from tests.worlds import on_processes


def _train(net: Net, steps: range) -> dict[str, torch.Tensor]:
    """Train a net, and return its parameters as a whole."""
    muon = make_muon(net)
    for step in steps:
        set_gradients(net, step)
        muon.step()
    return {name: in_full(param).detach().clone() for name, param in net.named_parameters()}


def _fails_in_the_middle(rank: int, world_size: int) -> str:
    """Rank 1 runs out of memory while it orthogonalizes; it stays alive."""
    net = Mesh({"dp": world_size}).build()
    muon = make_muon(net)
    set_gradients(net, 1)

    def fail(*args: object) -> torch.Tensor:
        raise MemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(matrices, "orthogonalize", fail)
        with pytest.raises(MemoryError if rank == 1 else PeerLostError) as caught:
            muon.step()
    return str(caught.value)


def test_nobody_waits_for_a_rank_that_fails_in_the_middle() -> None:
    first, second, third = run_ranks(_fails_in_the_middle, 3, pg_timeout=60)
    assert second == "no memory"
    for message in (first, third):
        assert "lost rank" in message
        assert "during the all-to-all of Muon" in message


@on_processes(4)
def test_the_update_is_that_of_one_process(rank: int, world_size: int) -> None:
    results = []
    for mesh in (Mesh({"dp": 4}), Mesh({"replicate": 2, "shard": 2}), Mesh({"dp": 2, "tp": 2})):
        results.append(_train(mesh.build(), range(1, 3)))
        dist.barrier()
    expected = _train(Net(), range(1, 3))
    for found in results:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
