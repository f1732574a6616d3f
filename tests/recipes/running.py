"""Training any recipe inside a world of the harness."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.app.recipes.core.begin import check_folder
from shardwise.app.recipes.core.checkpointing import SaveError
from shardwise.app.recipes.core.loop import DivergedError
from shardwise.app.recipes.core.recipe import Inputs, RecipeConfig
from shardwise.app.recipes.core.training import begin_and_train, build_run, place_for
from shardwise.app.recipes.text import batches
from shardwise.elastic.errors import Stopped
from shardwise.elastic.rank import StopSignals
from shardwise.elastic.world import World
from shardwise.insight.schema.option import OptionError
from tests.recipes.small import RECIPES


def train(rank: int, world_size: int, *configs: RecipeConfig) -> list[str]:
    """What every rank does: train as each configuration says; say how each ended."""
    return [train_one(rank, world_size, config) for config in configs]


def train_one(rank: int, world_size: int, config: RecipeConfig) -> str:
    """Train as a configuration says; say how it ended."""
    world = World(rank, world_size, rank, world_size)
    signals = StopSignals()
    signals.install()
    batches.VALIDATION_SEQUENCES = 8  # to judge a model by 64 takes longer than to train it
    inputs = config.check(world)
    if rank == 0:
        check_folder(inputs)
    try:
        train_here(inputs, world, signals)
    except (Stopped, DivergedError, SaveError) as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


def refusal(config: RecipeConfig) -> str:
    """Say why a run does not go on as a configuration says."""
    with pytest.raises(OptionError) as caught:
        check_folder(config.check(World(0, 1, 0, 1)))
    return str(caught.value)


def as_after(step: int, before: RecipeConfig, config: RecipeConfig) -> None:
    """Make the folder of a run as that of another was when it had saved a step."""
    shutil.copytree(before.files.root, config.files.root)
    for later in config.files.checkpoints.glob("step-*"):
        if int(later.name.removeprefix("step-")) > step:
            shutil.rmtree(later)


def warning_in(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the one warning among what trainings have printed."""
    [found] = [w for w in capfd.readouterr().out.splitlines() if w.startswith("warning")]
    return found


def train_here(
    inputs: Inputs,
    world: World,
    signals: StopSignals | None = None,
    device: torch.device | None = None,
) -> None:
    """Train on this rank of the harness, by default on its CPU."""
    place = place_for(inputs.train, world, device or torch.device("cpu"))
    assemble = RECIPES[inputs.recipe].assemble()
    begin_and_train(build_run(inputs, assemble, place, ""), None, signals or StopSignals())


def run_from_guide(number: int, replace: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Run a program of docs/vision.md that has none of our code.

    Args:
        number: which one.
        replace: texts to put in the place of others: paths.

    Returns:
        What it printed, and its names.
    """
    guide = (Path(__file__).parents[2] / "docs" / "vision.md").read_text()
    code = re.findall(r"```py\n(.*?)```", guide, re.DOTALL)[number]
    assert "shardwise" not in code
    for old, new in replace.items():
        assert old in code
        code = code.replace(old, new)
    shown, names = io.StringIO(), dict[str, Any]()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, "vision.md", "exec"), names)
    return shown.getvalue(), names
