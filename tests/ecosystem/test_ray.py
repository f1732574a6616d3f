"""Ray Train's ``TorchTrainer``: both examples on two workers, one of which is killed.

One cluster runs them one after the other, since it takes seconds to start.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise import checkpoint
from tests.recipes.running import train
from tests.recipes.small import losses, small_config
from tests.worlds import Ranks

pytest.importorskip("ray.train", reason="needs Ray Train: install .[ecosystem] or .[ray]")


EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "ray_train.py"
STEPS, EVERY = 30, 10
LM = (
    "lm --model {0}/config.json --data {0}/words.txt --seq-length 16 --batch-size 2 --lr 0.01 "
    "--warmup 2 --steps 20 --checkpoint-every 5 --eval-every 0 --device cpu --sample-tokens 0 "
    "--out {0}/run"
)

# The functions of the examples, but their second worker is killed, once: behind step 20 of the
# training function, and before step 13 of the recipe.
DRIVER = """
import os, runpy, signal, sys
from pathlib import Path

import ray

path, recipe_path, out, folder, steps, every, arguments = sys.argv[1:]
example, recipe = runpy.run_path(path), runpy.run_path(recipe_path)
train, worker = example["train"], recipe["worker"]


def dies_once(config):
    train({**config, "steps": 20})
    died = Path(config["out"], "died")
    if os.environ["RANK"] == "1" and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    train(config)


def worker_dies_once(config):
    from shardwise.app.recipes.core.loop import Loop

    step, died = Loop._step, Path(arguments.split()[-1] + "-died")

    def dies(self, position):
        if position.step == 12 and os.environ["RANK"] == "1" and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, position)

    Loop._step = dies
    worker(config)


example["on_ray"].__globals__["train"] = dies_once
recipe["on_ray"].__globals__["worker"] = worker_dies_once
ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
example["on_ray"]({"out": out, "steps": int(steps), "every": int(every)}, 2)
recipe["on_ray"](arguments.split(), 2)
"""


def _on_ray(out: Path) -> str:
    """Run both examples; return what workers and driver have printed."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    # Ray has Unix sockets here, whose paths have to be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        examples = [str(EXAMPLE), str(EXAMPLES / "ray_recipe.py")]
        own = [str(out), folder, str(STEPS), str(EVERY)]
        arguments = [*examples, *own, LM.format(out.parent)]
        ended = subprocess.run(
            [sys.executable, "-c", DRIVER, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=400,  # it starts four groups of workers
            check=False,
        )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    return output


def _undisturbed(rank: int, world_size: int, out: Path) -> None:
    runpy.run_path(str(EXAMPLE))["train"]({"out": str(out), "steps": STEPS, "every": EVERY})


def _loaded(out: Path) -> tuple[dict[str, torch.Tensor], int]:
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
    model = nn.Sequential(*blocks)
    newest = checkpoint.latest(out)
    assert newest is not None
    step = checkpoint.load(newest, model)["step"]
    return model.state_dict(), step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the results of both are."""
    folder = tmp_path_factory.mktemp("ray")
    small_config(folder)  # writes model and text
    return folder


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    """What Ray has printed."""
    return _on_ray(folder / "ray")


def test_a_training_on_ray_survives_a_worker_and_ends_as_it_does_elsewhere(
    ranks: Ranks, folder: Path, output: str
) -> None:
    assert (folder / "ray" / "died").exists()
    assert "2 ranks, starting after step 0" in output
    assert "2 ranks, starting after step 20" in output
    ranks(_undisturbed, 2, folder / "here")
    found, step = _loaded(folder / "ray")
    expected, _ = _loaded(folder / "here")
    assert step == STEPS
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def test_a_recipe_on_ray_continues_by_itself_with_the_same_losses(
    ranks: Ranks, folder: Path, output: str
) -> None:
    assert (folder / "run-died").exists()
    assert "resume     after step 10 of 20" in output
    config = small_config(folder, steps=20)
    assert [session["from_step"] for session in config.files.read()["sessions"]] == [0, 10]
    whole = small_config(folder, "whole", steps=20)
    ranks(train, 2, whole)
    assert losses(config) == losses(whole)
