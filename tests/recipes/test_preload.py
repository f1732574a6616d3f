"""What a fork server imports for ranks leaves it fit to be forked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.app.recipes.core.job import TrainingJob
from shardwise.app.recipes.core.recipe import RecipeConfig
from shardwise.app.recipes.rank import command_of
from shardwise.app.recipes.vision.config import MnistConfig, VitConfig
from shardwise.elastic.fork_server import ForkServer
from shardwise.elastic.world import PARENT_PID
from tests.programs import shell_environment
from tests.recipes.small import small_config

RECIPES: dict[str, Callable[[Path], RecipeConfig]] = {
    "lm": lambda folder: small_config(folder, replicate_every=2),
    "mnist": lambda folder: MnistConfig(),
    "vit": lambda folder: VitConfig(),
}


@pytest.mark.long  # it imports torch and transformers
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_of_every_recipe_can_be_forked(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in shell_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # with which BLAS starts a thread
    server = ForkServer(command_of(TrainingJob(RECIPES[recipe](tmp_path)), [], tmp_path))
    rank = {"RANK": "0", PARENT_PID: str(os.getpid())}
    devnull = os.open(os.devnull, os.O_WRONLY)
    with server.running(1):
        pid = server.fork({**os.environ, **rank}, [devnull, devnull], lambda: False)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(devnull)
