"""Torch's tensor parallelism first, then sharding: rows in order, and training as one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise import clip_grad_norm_, fully_shard
from tests.sharding.nets import assert_same_gradients, assert_same_values, seeded, step_all
from tests.sharding.tensor_parallel import (
    TokenNet,
    fill_with_rows,
    next_token_loss,
    sharded,
    tensor_parallel,
    tokens_of,
)
from tests.worlds import on_threads

PLANS: dict[str, Callable[[int], tuple[nn.Module, Any]]] = {
    "colwise": lambda rows: (nn.Linear(3, rows), ColwiseParallel()),
    "rowwise": lambda rows: (nn.Linear(rows, 5), RowwiseParallel()),
    "sequence": lambda rows: (nn.LayerNorm(rows), SequenceParallel()),
    "embedding by rows": lambda rows: (
        nn.Embedding(rows, 3),
        RowwiseParallel(input_layouts=Replicate()),
    ),
    "embedding by columns": lambda rows: (nn.Embedding(3, rows), ColwiseParallel()),
}


def _check_rows(mesh: DeviceMesh, data: DeviceMesh, rows: int) -> None:
    """What was numbered before it was cut comes back in order, whole and as TP left it."""
    for name, make in PLANS.items():
        module, plan = make(rows)
        wanted = fill_with_rows(module)
        parallelize_module(module, mesh["tp"], plan)
        left = {key: param.to_local().clone() for key, param in module.named_parameters()}
        fully_shard(module, mesh=data)
        for key, param in module.named_parameters():
            what = f"{name}, {rows} rows, {key}, {param.placements} on {mesh}"
            assert isinstance(param, DTensor), what
            assert torch.equal(param.full_tensor(), wanted[key]), what
            _check_place(param, wanted[key], what)
        module.unshard()
        for key, param in module.named_parameters():
            assert torch.equal(param.to_local(), left[key]), f"{name}, {rows} rows, {key}"


def _check_place(param: DTensor, wanted: torch.Tensor, what: str) -> None:
    """What this rank holds is what the ``DTensor`` tells checkpoints that it holds."""
    [chunk] = param.__create_chunk_list__()
    for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        wanted = wanted.narrow(dim, min(start, wanted.shape[dim]), length)
    assert torch.equal(param.to_local(), wanted), what


def _train(mesh: DeviceMesh, data: DeviceMesh, **kwargs: Any) -> None:
    net, whole = seeded(TokenNet), seeded(TokenNet)
    sharded(tensor_parallel(net, mesh["tp"]), data, **kwargs)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (net, whole)]
    mine = data._flatten().get_local_rank() if data.ndim > 1 else data.get_local_rank()
    for step in range(2):
        tokens = tokens_of(data.size(), step)
        found = next_token_loss(net, tokens[mine])
        found.backward()
        for part in tokens:
            loss = next_token_loss(whole, part)
            (loss / len(tokens)).backward()
            if part is tokens[mine]:
                torch.testing.assert_close(found, loss)
        assert_same_gradients(net, whole)
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        torch.testing.assert_close(clip_grad_norm_(net.parameters(), 0.1), norm)
        step_all(optimizers)
    assert_same_values(net, whole)


@on_threads(4)
def test_two_dimensions(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for rows in (8, 7, 1):
        _check_rows(mesh, mesh["dp"], rows)
    for reshard in (True, False):
        _train(mesh, mesh["dp"], reshard_after_forward=reshard)


@pytest.mark.long
@on_threads(8)
def test_eight_ranks(rank: int, world_size: int) -> None:
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    for rows in (8, 7):
        _check_rows(mesh, mesh["replicate", "shard"], rows)
    _train(mesh, mesh["replicate", "shard"])
    wide = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    for rows in (16, 9):
        _check_rows(wide, wide["dp"], rows)
    uneven = nn.Linear(3, 9)
    parallelize_module(uneven, wide["tp"], ColwiseParallel())
    with pytest.raises(ValueError, match=r"Shard\(dim=0\) for weight on rank .* cut it unevenly"):
        fully_shard(uneven, mesh=wide["dp"], shard_placement_fn=lambda param: Shard(0))
