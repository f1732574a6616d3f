"""Sixty optimizers on shards: each computes what it computes on one process, or is refused.

Parameters have uneven rows. Three ranks shard with Shardwise, and two, which also load what three
have saved, with torch's own FSDP2.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import shardwise
from shardwise import checkpoint
from shardwise.checkpoint import CheckpointError
from shardwise.optim import local, whole
from tests.ecosystem.llama import full
from tests.optim.nets import Net, set_gradients
from tests.worlds import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs

#: Those that work element by element, by the module that has them.
LOCAL = {
    "torch.optim": "SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD",
    "pytorch_optimizer": "AdaBelief ADOPT MADGRAD Tiger FTRL Adan AdEMAMix GaLore",
    "torch_optimizer": "Yogi DiffGrad QHAdam",
    "schedulefree": "AdamWScheduleFree SGDScheduleFree RAdamScheduleFree",
    "lion_pytorch": "Lion",
    "bitsandbytes.optim": "AdamW",
}
#: Those that need whole parameters.
WHOLE = {
    "torch.optim": "Adafactor Muon",
    "pytorch_optimizer": (
        "SOAP Shampoo Lamb LARS CAME StableAdamW NovoGrad AdamP SM3 Adalite MARS Ranger SPlus Amos "
        "Nero"
    ),
    "torch_optimizer": "A2GradExp",
    "bitsandbytes.optim": "AdamW8bit Lion8bit LAMB LARS AdEMAMix8bit",
}
#: Those whose updates of parameters depend on each other: one rank updates all.
TOGETHER = {
    "pytorch_optimizer": "Prodigy Kron DAdaptAdam DAdaptSGD",
    "prodigyopt": "Prodigy",
}
#: Those that keep what checkpoints do not hold: dicts by numbers, and objects.
UNSAVED = {"pytorch_optimizer": "AggMo ScalableShampoo", "heavyball": "SOAP"}
#: What is refused, and why.
REFUSED = {
    "torch.optim LBFGS": "its step needs a closure",
    "pytorch_optimizer AdaHessian": "does not require grad",
}
SETTINGS: dict[str, dict[str, Any]] = {"bitsandbytes.optim LARS": {"lr": 0.01, "momentum": 0.9}}


def _names(table: dict[str, str]) -> list[str]:
    return [f"{module} {name}" for module, names in table.items() for name in names.split()]


def _make(way: Any, name: str, net: nn.Module) -> Any:
    module, kind = name.split()
    if module == "heavyball":
        importlib.import_module("heavyball.utils").compile_mode = None  # type: ignore[attr-defined]
    found = getattr(importlib.import_module(module), kind)
    params: list[Any] = list(net.parameters())
    if name == "torch.optim Muon":
        params = [param for param in params if param.ndim == 2]
    elif name != "prodigyopt Prodigy":  # which wants one learning rate
        params = [{"params": params[:4]}, {"params": params[4:], "lr": 0.003}]
    settings = SETTINGS.get(name, {})
    made = found(params, **settings) if way is None else way(found, params, **settings)
    getattr(made, "train", lambda: None)()
    return made


def _sharded(shard: Any) -> Net:
    net = Net()
    shard(net.up)
    shard(net)
    return net


def _train(net: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        torch.manual_seed(step)  # of those that draw numbers
        set_gradients(net, step)
        optimizer.step()


def _assert_same(net: nn.Module, wanted: nn.Module, what: str) -> None:
    for name, param in wanted.named_parameters():
        off = (full(net.get_parameter(name)) - param.detach()).abs().max().item()
        assert off <= 1e-6, f"{what}: {name} is off by {off:.1e}"


def _trains(rank: int, world_size: int, way: Any, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    net, wanted = _sharded(shardwise.fully_shard if world_size > 2 else TORCHS), Net()
    optimizer, its = _make(way, name, net), _make(None, name, wanted)
    if name not in _names(UNSAVED):
        assert (name in _names(TOGETHER)) == optimizer._is_coupled
    _train(net, optimizer, range(3))
    _train(wanted, its, range(3))
    _assert_same(net, wanted, f"{name} on {world_size} ranks")
    if name in _names(UNSAVED):
        with pytest.raises(CheckpointError, match="expected a tensor or a plain value"):
            checkpoint.save(folder / "saved", net, optimizer)
        return
    if world_size == 3:
        checkpoint.save(folder / "saved", net, optimizer)
        return
    net = _sharded(TORCHS)
    optimizer = _make(way, name, net)
    checkpoint.load(folder / "saved", net, optimizer)
    for each, steps in ((net, optimizer), (wanted, its)):
        _train(each, steps, range(3, 5))
    _assert_same(net, wanted, f"{name} from a checkpoint")


TORCHS = torch.distributed.fsdp.fully_shard


@pytest.mark.parametrize("name", _names(LOCAL))
def test_element_by_element(name: str, ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip(name.split(".")[0].split()[0])
    ranks(_trains, 3, local, name, tmp_path)
    ranks(_trains, 2, local, name, tmp_path)


@pytest.mark.parametrize("name", [*_names(WHOLE), *_names(TOGETHER), *_names(UNSAVED)])
def test_whole_parameters(name: str, ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip(name.split(".")[0].split()[0])
    with pytest.raises(ValueError, match=r"shardwise\.optim\.local"):
        _make(local, name, Net())
    ranks(_trains, 3, whole, name, tmp_path)
    ranks(_trains, 2, whole, name, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    pytest.importorskip(name.split(".")[0].split()[0])
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
        _make(whole, name, Net())
