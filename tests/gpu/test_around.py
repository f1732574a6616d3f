"""What stands around the runtime, on a device: checkpoints, the wrapper, DiLoCo, a recipe."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import FullyShardedDataParallel, checkpoint
from tests.corpus.oracle import (
    Case,
    assert_same_history,
    make_optimizer,
    make_sharded,
    reference_training,
    train_sharded,
)
from tests.gpu.devices import TYPE, Devices, assert_same, device, mesh, sharded, whole
from tests.sharding.nets import Net, assert_same_values, batches, loss_of, seeded


def _made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = sharded(seeded(Net, seed))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Take steps whose batches do not depend on the number of ranks."""
    for step in range(first, last):
        x = batches(4, step).flatten(0, 1).to(device())
        loss_of(net, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def _snapshot(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.full_tensor().clone() for name, param in net.named_parameters()}


def _saves(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    net, optimizer = _made()
    _train(net, optimizer, 0, 3)
    checkpoint.save(folder / "sync", net, optimizer)
    at_save = _snapshot(net)
    handle = checkpoint.async_save(folder / "async", net, optimizer)
    _train(net, optimizer, 3, 6)  # writes to the parameters that are being saved
    handle.result()
    return {"saved": _cpu(at_save), "after": _cpu(_snapshot(net))}


def _cpu(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in values.items()}


def _loads(rank: int, world_size: int, folder: Path, expected: dict[str, Any]) -> None:
    for name in ("sync", "async"):
        net, optimizer = _made(seed=1)
        checkpoint.load(folder / name, net, optimizer)
        for found, value in zip(net.parameters(), expected["saved"].values(), strict=True):
            assert found.to_local().device.type == TYPE
            assert torch.equal(found.full_tensor().cpu(), value), name
        _train(net, optimizer, 3, 6)
        for where, param in net.named_parameters():
            assert_same(param, expected["after"][where].to(device()), f"{name}, {where}")


def test_checkpoints_hold_what_was_on_the_device(devices: Devices, tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    expected = devices.run(_saves, 2, tmp_path)[0]
    for world_size in (1, 2):
        devices.run(_loads, world_size, tmp_path, expected)


def _wrapped(rank: int, world_size: int) -> None:
    case = Case("net", optimizer="sgd", door="wrapper", max_norm=1.0)
    net = make_sharded(case, world_size, device_type=TYPE)
    found = train_sharded(net, make_optimizer(case.optimizer, net.parameters()), case, rank)
    expected = reference_training(case, world_size, TYPE)
    assert_same_history(found, expected, rtol=1e-4, atol=1e-5)
    with FullyShardedDataParallel.summon_full_params(net):
        for name, param in net.named_parameters():
            assert param.device.type == TYPE
            torch.testing.assert_close(param.cpu(), expected.parameters[-1][name])


def test_the_wrapper_trains_alike(devices: Devices) -> None:
    devices.run(_wrapped, 2)


def _replicated(rank: int, world_size: int) -> None:
    """Averaging every second step is what two unsharded models do that are averaged by hand."""
    from shardwise.diloco import DiLoCo, OuterSGD

    over = mesh(2, 1)
    net = sharded(mesh=over["shard"])
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    outer = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
    diloco = DiLoCo(net, inner, group=over["replicate"], every=2, outer=outer)
    pair = [whole(), whole()]
    theirs = [torch.optim.SGD(m.parameters(), lr=0.05) for m in pair]
    for step in range(4):
        x = batches(world_size, step).to(device())
        loss_of(net, x[rank]).backward()
        diloco.step()
        diloco.zero_grad()
        for model, optimizer, batch in zip(pair, theirs, x, strict=True):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 2:
            with torch.no_grad():
                for one, other in zip(*(m.parameters() for m in pair), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    assert_same_values(net, pair[rank])


def test_diloco_averages_replicas(devices: Devices) -> None:
    pytest.importorskip("xxhash")
    devices.run(_replicated, 2)


def test_a_recipe_resumes_with_the_random_numbers_of_the_device(
    devices: Devices, tmp_path: Path
) -> None:
    """Dropout draws from the generator of the device, whose state is saved."""
    for name in ("transformers", "xxhash", "rich"):
        pytest.importorskip(name)
    from shardwise.insight.schema.training import Existing
    from tests.recipes.small import losses, small_config

    train: Callable[..., Any] = _train_recipe
    settings = {"steps": 4, "checkpoint_every": 2}
    run = small_config(tmp_path, "run", **settings)
    assert devices.run(train, 2, run) == [TYPE, TYPE]
    resumed = small_config(tmp_path, "resumed", existing=Existing.RESUME, **settings)
    shutil.copytree(run.train.output.out, resumed.train.output.out)
    shutil.rmtree(resumed.files.checkpoints / "step-00000004")
    devices.run(train, 2, resumed)
    assert [each["from_step"] for each in resumed.files.read()["sessions"]] == [0, 2]
    for mine, expected in zip(losses(resumed), losses(run), strict=True):
        assert mine == pytest.approx(expected, rel=1e-5)


def _train_recipe(rank: int, world_size: int, config: Any) -> str:
    from shardwise.elastic.world import World
    from tests.recipes.running import train_here

    world = World(rank, world_size, rank, world_size)
    train_here(config.check(world), world, device=device())
    return device().type
