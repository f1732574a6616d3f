"""Muon among processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.corpus.gathering import in_full
from tests.optim.nets import Mesh, Net, make_muon, set_gradients
from tests.worlds import on_processes


def _train(net: Net, steps: range) -> dict[str, torch.Tensor]:
    """Train a net, and return its parameters as a whole."""
    muon = make_muon(net)
    for step in steps:
        set_gradients(net, step)
        muon.step()
    return {name: in_full(param).detach().clone() for name, param in net.named_parameters()}


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
