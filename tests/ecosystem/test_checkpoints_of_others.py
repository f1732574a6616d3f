"""Checkpoints that other software writes on two ranks: weights and optimizer states come over."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from shardwise import checkpoint
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.tools.convert import convert
from tests.harness import Processes
from tests.worlds import on_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs


class Net(nn.Module):
    """Uneven rows, a buffer, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(7, 5)
        self.n = nn.BatchNorm1d(5)
        self.b = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 3, bias=False))
        self.b[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.n(self.a(x)))
        return y


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of named parameters, as torchtitan's optimizers take them."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [each for each in named if not each[0].endswith("bias")]},
        {"params": [each for each in named if each[0].endswith("bias")], "weight_decay": 0.0},
    ]


def _trained(shard: Callable[[nn.Module], nn.Module]) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(Net())
    optimizer = torch.optim.AdamW(_groups(model), lr=0.1)
    torch.manual_seed(1)
    model(torch.randn(4, 7)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def _fsdp2(model: nn.Module) -> nn.Module:
    torch_fully_shard(model.get_submodule("b"))
    torch_fully_shard(model)
    return model


def _fsdp1(model: nn.Module) -> nn.Module:
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    options = StateDictOptions(full_state_dict=True)
    found: dict[str, torch.Tensor] = get_model_state_dict(model, options=options)
    return found


def _assert_comes_over(
    path: Path, full: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The weights load as they are; converted, the optimizer's states come along."""
    model = Net()
    nn.init.zeros_(model.a.weight)
    checkpoint.load_weights(path, model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, full[name]), name

    ours = path.parent / f"{path.name}-ours"
    if dist.get_rank() == 0:
        convert(path, ours, Format.SHARDWISE)
    dist.barrier()
    again = Net()
    optimizer = torch.optim.AdamW(_groups(again), lr=0.5)
    extra = checkpoint.load(ours, again, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    for name, param in again.named_parameters():
        assert torch.equal(param, full[name]), name
        if param.requires_grad:
            assert torch.equal(optimizer.state[param]["exp_avg"], state[name]), name
    return extra


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        name: optimizer.state[param]["exp_avg"].full_tensor()
        for name, param in model.named_parameters()
        if param in optimizer.state
    }


class _Saves:
    """Something with a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class _Unknown:
    """Of a class that no reader of ours knows."""


@on_processes(2)
def test_torchtitan(rank: int, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan: install .[ecosystem]")
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
    from torchtitan.components.checkpointer import CheckpointManager, ModelWrapper
    from torchtitan.components.optimizer.optimizer import get_flat_optim_state_dict

    model, optimizer = _trained(_fsdp2)
    full, moments = _full(model), _moments(model, optimizer)
    losses = io.BytesIO(b"losses")
    states = {
        "model": ModelWrapper([model]),
        "optimizer": _Saves(get_flat_optim_state_dict(optimizer)),
        "lr_scheduler": _Saves({"last_epoch": 1}),
        "train_state": _Saves({"step": torch.tensor(1), "global_avg_losses": losses}),
        "dataloader": _Saves({f"dp_rank_{rank}": pickle.dumps(rank)}),
    }
    manager: Any = object.__new__(CheckpointManager)  # without a job of its own
    manager.states = states
    dcp.save(manager._flattened_model_states_sd(), checkpoint_id=tmp_path / "all")

    extra = _assert_comes_over(tmp_path / "all", full, moments)
    assert extra["train_state"] == {"step": torch.tensor(1), "global_avg_losses": b"losses"}
    assert extra["lr_scheduler"] == {"last_epoch": 1}
    assert extra["dataloader"]["dp_rank_1"] == pickle.dumps(1)

    states["train_state"] = _Saves({"code": _Unknown()})
    dcp.save(manager._flattened_model_states_sd(), checkpoint_id=tmp_path / "code")
    checkpoint.load_weights(tmp_path / "code", Net())
    with pytest.raises(CheckpointError, match="_Unknown"):
        convert(tmp_path / "code", tmp_path / f"no-{rank}", Format.SHARDWISE)
    convert(tmp_path / "code", tmp_path / f"hf-{rank}", Format.HF)


@on_processes(2)
def test_lightning_fabric(rank: int, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric", reason="needs lightning-fabric: install .[ecosystem]")
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import FSDPStrategy, ModelParallelStrategy

    strategy = ModelParallelStrategy(
        lambda model, mesh: _fsdp2(model), data_parallel_size=2, tensor_parallel_size=1
    )
    fabric: Any = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model, optimizer = _trained(fabric.setup_module)
    full, moments = _full(model.module), _moments(model.module, optimizer)
    names = {"net": model, "opt": fabric.setup_optimizers(optimizer), "iteration": 7}
    fabric.save(tmp_path / "fsdp2", names)
    extra = _assert_comes_over(tmp_path / "fsdp2", full, moments)
    assert extra == {"meta": {"iteration": 7}}

    # Its strategy for FSDP1 wants GPUs, but not to save.
    model, optimizer = _trained(_fsdp1)
    saving: Any = SimpleNamespace(
        broadcast=lambda path: path, _state_dict_type="sharded", global_rank=rank
    )
    state = {"model": model, "optimizer": optimizer, "iteration": 8}
    FSDPStrategy.save_checkpoint(saving, tmp_path / "fsdp1", state)
    extra = _assert_comes_over(tmp_path / "fsdp1", full, moments)
    assert extra == {"meta": {"iteration": 8}}


@on_processes(2)
def test_lightning_fabric_in_one_file(rank: int, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric", reason="needs lightning-fabric: install .[ecosystem]")
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        lambda model, mesh: _fsdp2(model),
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=False,
    )
    fabric: Any = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model, optimizer = _trained(fabric.setup_module)
    full, moments = _full(model.module), _moments(model.module, optimizer)
    names = {"net": model, "opt": fabric.setup_optimizers(optimizer), "iteration": 7}
    fabric.save(tmp_path / "whole.ckpt", names)
    dist.barrier()
    assert _assert_comes_over(tmp_path / "whole.ckpt", full, moments) == {"iteration": 7}


@on_processes(2)
def test_torchtitan_saves_by_itself(rank: int, world_size: int, tmp_path: Path) -> None:
    """Its ``CheckpointManager`` with its optimizers, of two groups that have equal settings."""
    pytest.importorskip("torchtitan", reason="needs torchtitan: install .[ecosystem]")
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    model = _fsdp2(Net())
    groups = [
        ParamGroupConfig(pattern=each, optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})
        for each in ("bias$", ".*")
    ]
    config: Any = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=9)
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True, interval=1, last_save_model_only=True, export_dtype="bfloat16"
        ),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": _Saves({"step": torch.tensor(2)})},
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    torch.manual_seed(rank)
    batches = torch.randn(3, 4, 7)
    dist.all_reduce(batches)  # the same on all ranks
    for step, batch in enumerate(batches, start=1):
        model(batch).square().mean().backward()
        optimizers.step()
        optimizers.zero_grad()
        schedulers.step()
        manager.save(step, last_step=step == 3)
        if step == 2:
            full = {k: v.clone() for k, v in _full(model).items()}
    dist.barrier()

    saved = Path(manager.folder)
    again = Net()
    checkpoint.load_weights(saved / "step-3", again)
    for name, value in _full(model).items():
        assert torch.equal(again.state_dict()[name], value.bfloat16().to(value.dtype)), name
    if rank == 0:
        convert(saved / "step-2", tmp_path / "ours", Format.SHARDWISE)
    dist.barrier()
    named = [(name, param) for name, param in again.named_parameters() if param.requires_grad]
    ends = [[each for each in named if each[0].endswith("bias") is bias] for bias in (True, False)]
    optimizer = torch.optim.AdamW([{"params": each} for each in ends], lr=0.5)
    extra = checkpoint.load(tmp_path / "ours", again, optimizer)
    assert extra["train_state"] == {"step": torch.tensor(2)}
    for name, value in full.items():
        assert torch.equal(again.state_dict()[name], value), name
    again(batches[2]).square().mean().backward()
    optimizer.step()
    for name, value in _full(model).items():
        torch.testing.assert_close(again.state_dict()[name], value)


def _cpus_as_gpus() -> None:
    """Let Accelerate, which takes FSDP for GPUs alone, take it for CPUs."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    def prepare(state: Any, *given: Any, **options: Any) -> Any:
        return "gloo", DistributedType.MULTI_GPU

    def set_device(state: Any) -> None:
        state.device = torch.device("cpu")

    PartialState._prepare_backend = prepare
    PartialState.set_device = set_device


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@on_processes(2, processes=Processes.NEW)
def test_accelerate_saves_its_state(rank: int, world_size: int, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: install .[ecosystem]")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    _cpus_as_gpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False
    )
    accelerator: Any = Accelerator(fsdp_plugin=plugin)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(_groups(net), lr=0.1))
    torch.manual_seed(1)
    accelerator.backward(model(torch.randn(4, 7)).square().mean())
    optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    dist.barrier()
    extra = _assert_comes_over(tmp_path / "state", _full(model), _moments(model, optimizer))
    assert extra == {}


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@on_processes(2, processes=Processes.NEW)
def test_trainer_saves_as_it_trains(rank: int, world_size: int, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: install .[ecosystem]")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    _cpus_as_gpus()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 37,
        "hidden_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = LlamaConfig(
        num_hidden_layers=1, intermediate_size=20, tie_word_embeddings=True, **sizes
    )
    rows = torch.randint(3, 37, (8, 6))
    trainer: Any = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "state_dict_type": kind,
                "cpu_ram_efficient_loading": False,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            },
            max_steps=2,
            per_device_train_batch_size=2,
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train()
    full = _full(trainer.model_wrapped)
    moments = _moments(trainer.model_wrapped, trainer.optimizer)
    dist.barrier()
    saved = tmp_path / "checkpoint-2"
    again = LlamaForCausalLM(config)
    checkpoint.load_weights(saved, again)
    if rank == 0:
        convert(saved, tmp_path / "ours", Format.SHARDWISE)
    dist.barrier()
    named = list(again.named_parameters())
    ends = [[each for each in named if ("norm" in each[0]) is norm] for norm in (False, True)]
    optimizer = torch.optim.AdamW(
        [{"params": ends[0], "weight_decay": 0.5}, {"params": ends[1], "weight_decay": 0.0}]
    )
    checkpoint.load(tmp_path / "ours", again, optimizer)
    for name, param in named:
        assert torch.equal(param, full[name]), name
        assert torch.equal(optimizer.state[param]["exp_avg"], moments[name]), name


@on_processes(2)
def test_accelerate_and_trainer(rank: int, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: install .[ecosystem]")
    from accelerate import PartialState
    from accelerate.utils import fsdp_utils

    PartialState(cpu=True)
    accelerator: Any = SimpleNamespace(num_processes=2, process_index=rank)
    for version, shard in ((2, _fsdp2), (1, _fsdp1)):
        model, optimizer = _trained(shard)
        if version == 2:
            full, moments = _full(model), _moments(model, optimizer)
        whole = StateDictType.FULL_STATE_DICT
        for kind in (StateDictType.SHARDED_STATE_DICT, whole)[:version]:
            # None: what torch takes by default.
            plugin: Any = SimpleNamespace(
                fsdp_version=version,
                state_dict_type=kind,
                state_dict_config=SimpleNamespace() if version == 2 else None,
                optim_state_dict_config=None,
            )
            folder = tmp_path / f"{version}-{kind.name}"
            fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(folder))
            fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
            dist.barrier()
            assert _assert_comes_over(folder, full, moments) == {}

    per_rank = str(tmp_path / "per-rank")
    plugin = SimpleNamespace(
        fsdp_version=1,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=None,
        optim_state_dict_config=None,
    )
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, per_rank, use_dcp=False)
    dist.barrier()
    with pytest.raises(CheckpointError, match="files of Accelerate, one for each rank"):
        checkpoint.load_weights(per_rank, Net())
    with pytest.raises(CheckpointError, match="local or sharded state dict of torch's FSDP1"):
        checkpoint.load_weights(f"{per_rank}/pytorch_model_fsdp_0_rank{rank}.bin", Net())
