"""A recipe on a PrivateUse1 device: what ``shardwise train --device TYPE`` does on each rank."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardwise.app.recipes.core.training import train
from shardwise.app.recipes.text.config import LmConfig
from shardwise.elastic.rank import StopSignals
from shardwise.elastic.world import World
from shardwise.insight.schema.training import AUTO, Existing
from tests.devices.device import NAME, figures, register
from tests.devices.process_group import register_backend
from tests.harness import run_ranks
from tests.recipes.small import RECIPES, losses, small_config


def _config(folder: Path, device: str, existing: Existing, **changes: object) -> LmConfig:
    return small_config(
        folder,
        f"run-{device}",
        steps=4,
        checkpoint_every=2,
        device=device,
        existing=existing,
        **changes,
    )


def _train(rank: int, world_size: int, folder: Path, device: str, existing: Existing) -> int:
    register()
    register_backend()
    world = World(rank, world_size, rank, world_size)
    inputs = _config(folder, device, existing, async_checkpoint=True).check(world)
    train(inputs, RECIPES["lm"].assemble(), world, StopSignals())
    return figures.peak


def test_a_run_that_resumes_is_the_run_that_did_not_stop(tmp_path: Path) -> None:
    """Random states of the device decide about dropout."""
    peaks = run_ranks(_train, 2, tmp_path, AUTO, Existing.REFUSE, backend=None)
    assert min(peaks) > 2**16, "auto takes the accelerator"
    config = _config(tmp_path, AUTO, Existing.REFUSE)
    whole = losses(config)
    assert [step for step, _, _ in whole] == [1, 2, 3, 4]
    out = config.train.output.out
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    for device in (NAME, "cpu"):
        shutil.copytree(out, tmp_path / f"run-{device}")
        run_ranks(_train, 2, tmp_path, device, Existing.RESUME, backend=None)
        resumed = losses(_config(tmp_path, device, Existing.RESUME))
        if device == NAME:
            assert resumed == whole
        else:  # CPUs draw other numbers for dropout
            assert resumed[:2] == whole[:2]
            assert resumed[3][1] == pytest.approx(whole[3][1], rel=0.1)
