"""Checkpoints of models on a PrivateUse1 device: to the host and back."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shardwise import checkpoint
from shardwise.checkpoint.ranks.saving import copies
from tests.corpus.gathering import own_part
from tests.corpus.models import MODELS, make_batch
from tests.corpus.oracle import Case, make_sharded
from tests.devices.device import NAME
from tests.devices.world import run_on_device

MODEL = "buffered"


def _sharded(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = make_sharded(Case(MODEL), 2, device_type=kind)
    return net, torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    MODELS[MODEL].loss(net, *make_batch(MODEL, rank, step, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all local values, on the host."""
    named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, param in net.named_parameters():
        named |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return {name: own_part(tensor).detach().cpu().clone() for name, tensor in named.items()}


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), (name, found[name], value)


def _saves(rank: int, world_size: int, folder: Path) -> None:
    net, optimizer = _sharded(NAME)
    _step(net, optimizer, 0, rank)
    saved = _state(net, optimizer)
    checkpoint.save(folder / "saved", net, optimizer)
    handle = checkpoint.async_save(folder / "copied", net, optimizer, {"mask": torch.ones(3)})
    _step(net, optimizer, 1, rank)  # what was copied is not written to any more
    handle.result()
    ahead = _state(net, optimizer)
    for name, kind in (("saved", NAME), ("copied", NAME), ("copied", "cpu")):
        again, other = _sharded(kind)
        checkpoint.load(folder / name, again, other)
        _assert_same(_state(again, other), saved)
        if kind == NAME:
            _step(again, other, 1, rank)
            _assert_same(_state(again, other), ahead)  # as if it had not stopped


def test_a_save_and_a_save_in_the_background_load_on_the_device_and_on_cpus(
    tmp_path: Path,
) -> None:
    run_on_device(_saves, 2, tmp_path)


def _weights(rank: int, world_size: int, folder: Path) -> None:
    net, _ = _sharded(NAME)
    expected = [own_part(each).detach().cpu().clone() for each in net.parameters()]
    checkpoint.save_hf(folder, net)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    checkpoint.load_weights(folder, net)
    for param, value in zip(net.parameters(), expected, strict=True):
        assert torch.equal(own_part(param).detach().cpu(), value)
    full = net.state_dict()
    assert {each.device.type for each in full.values()} == {NAME}
    assert {each.device.type for each in copies(full).values()} == {"cpu"}


def test_weights_go_to_files_for_others_and_come_back(tmp_path: Path) -> None:
    run_on_device(_weights, 2, tmp_path / "hf")
