"""Lightning Fabric's ``ModelParallelStrategy``, whose ``parallelize_fn`` calls ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from tests.frontends.training import optimizer_of, trained_twin
from tests.sharding.nets import WIDTH, Block, assert_same_values, batches, loss_of, seeded

pytest.importorskip("lightning_fabric", reason="needs lightning-fabric: install .[ecosystem]")

# What others warn of when they are imported is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

Ranks = Callable[..., list[Any]]

STEPS = 2


def _make() -> nn.Module:
    # No scalars: where torch broadcasts whole optimizer state, it leaves theirs plain tensors.
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 5))


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model[:2]:
        shardwise.fully_shard(block, mesh=mesh["data_parallel"])
    return shardwise.fully_shard(model, mesh=mesh["data_parallel"])


def _launch(whole_files: bool = False) -> Any:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        _parallelize,
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=not whole_files,
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    return fabric


def _set_up(fabric: Any, seed: int) -> tuple[Any, Any]:
    model = fabric.setup_module(seeded(_make, seed))
    return model, fabric.setup_optimizers(optimizer_of(model))


def _train(fabric: Any, model: Any, optimizer: Any, rank: int, step: int) -> None:
    """A step in two halves, of which only the second reduces gradients."""
    rows = batches(2, step)[rank]
    for i, row in enumerate(rows):
        with fabric.no_backward_sync(model, enabled=i < len(rows) - 1):
            fabric.backward(loss_of(model, row) / len(rows))
    optimizer.step()
    optimizer.zero_grad()


def _fabric(rank: int, world_size: int, folder: Path) -> None:
    fabric = _launch()
    model, optimizer = _set_up(fabric, seed=0)
    assert isinstance(model.module, shardwise.FSDPModule)
    assert shardwise.fully_shard.state(model.module[0]).groups
    for step in range(STEPS):
        _train(fabric, model, optimizer, rank, step)
    assert_same_values(model.module, trained_twin(world_size, STEPS, _make)[0])

    saving = {"shards": fabric, "whole": _launch(whole_files=True)}
    for name, each in saving.items():
        each.save(folder / name, {"model": model, "optimizer": optimizer, "step": STEPS})
    _train(fabric, model, optimizer, rank, STEPS)
    for name, each in saving.items():
        other, its_optimizer = _set_up(each, seed=1)
        state = {"model": other, "optimizer": its_optimizer, "step": 0}
        each.load(folder / name, state)
        assert state["step"] == STEPS, name
        _train(each, other, its_optimizer, rank, STEPS)
        assert_same_values(other.module, trained_twin(world_size, STEPS + 1, _make)[0])

    with fabric.init_module(empty_init=True):
        late = _make()
    late = fabric.setup_module(late)
    assert all(not param.is_meta for param in late.parameters())
    loss_of(late, batches(world_size)[rank]).backward()


def test_fabric_trains_saves_and_loads(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_fabric, 2, tmp_path, backend=None)
