"""Lightning Fabric's strategies for FSDP2, which calls ``fully_shard``, and for FSDP1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from tests.frontends.training import optimizer_of, trained_twin
from tests.sharding.nets import WIDTH, Block, assert_same_values, batches, loss_of, seeded
from tests.worlds import on_processes

pytest.importorskip("lightning_fabric", reason="needs lightning-fabric: install .[ecosystem]")

# What others warn of when they are imported is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


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


@on_processes(2, backend=None)
def test_fabric_trains_saves_and_loads(rank: int, world_size: int, tmp_path: Path) -> None:
    fabric = _launch()
    model, optimizer = _set_up(fabric, seed=0)
    assert isinstance(model.module, shardwise.FSDPModule)
    assert shardwise.fully_shard.state(model.module[0]).groups
    for step in range(STEPS):
        _train(fabric, model, optimizer, rank, step)
    assert_same_values(model.module, trained_twin(world_size, STEPS, _make)[0])

    saving = {"shards": fabric, "whole": _launch(whole_files=True)}
    for name, each in saving.items():
        each.save(tmp_path / name, {"model": model, "optimizer": optimizer, "step": STEPS})
    _train(fabric, model, optimizer, rank, STEPS)
    for name, each in saving.items():
        other, its_optimizer = _set_up(each, seed=1)
        state = {"model": other, "optimizer": its_optimizer, "step": 0}
        each.load(tmp_path / name, state)
        assert state["step"] == STEPS, name
        _train(each, other, its_optimizer, rank, STEPS)
        assert_same_values(other.module, trained_twin(world_size, STEPS + 1, _make)[0])

    with fabric.init_module(empty_init=True):
        late = _make()
    late = fabric.setup_module(late)
    assert all(not param.is_meta for param in late.parameters())
    loss_of(late, batches(world_size)[rank]).backward()


@on_processes(2, backend=None)
def test_fabric_trains_saves_and_loads_with_the_strategy_for_fsdp1(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import FSDPStrategy

    class OnCPUs(FSDPStrategy):
        """Fabric refuses the strategy itself on CPUs, whoever shards."""

    def launch(form: str) -> Any:
        strategy = OnCPUs(
            auto_wrap_policy={Block},
            activation_checkpointing_policy={Block},
            state_dict_type=form,
        )
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        return fabric

    with shardwise.patch_torch():
        fabric = launch("sharded")
        model, optimizer = _set_up(fabric, seed=0)
        wrapper = model._forward_module
        assert isinstance(wrapper, shardwise.FullyShardedDataParallel)
        assert len(wrapper.fsdp_modules(wrapper)) == 3
        for step in range(STEPS):
            _train(fabric, model, optimizer, rank, step)
        assert_same_values(wrapper, trained_twin(world_size, STEPS, _make)[0])
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        assert norm == 0, "nothing is left to clip"

        state = {"model": model, "optimizer": optimizer, "step": STEPS}
        fabric.save(tmp_path / "shards", state)
        launch("full").save(tmp_path / "whole", state)
        _train(fabric, model, optimizer, rank, STEPS)
        longer, _ = trained_twin(world_size, STEPS + 1, _make)
        other, its_optimizer = _set_up(fabric, seed=1)
        state = {"model": other, "optimizer": its_optimizer, "step": 0}
        fabric.load(tmp_path / "shards", state)
        assert state["step"] == STEPS
        _train(fabric, other, its_optimizer, rank, STEPS)
        assert_same_values(other._forward_module, longer)

        # One file of weights, as litgpt loads it. Of a whole state, Fabric 2.6 cannot read what it
        # has saved into DTensors.
        whole = torch.load(tmp_path / "whole")
        assert whole["step"] == STEPS and whole["optimizer"]["state"]
        if rank == 0:
            torch.save(whole["model"], tmp_path / "weights")
        fabric.barrier()
        late, _ = _set_up(fabric, seed=1)
        fabric.load_raw(tmp_path / "weights", late)
        assert_same_values(late._forward_module, trained_twin(world_size, STEPS, _make)[0])

        with fabric.init_module(empty_init=True):
            late = _make()
        late = fabric.setup_module(late)
        assert all(not param.is_meta for param in late.parameters())
        fabric.backward(loss_of(late, batches(world_size)[rank]))
