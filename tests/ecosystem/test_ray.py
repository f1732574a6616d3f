"""Ray Train's ``TorchTrainer``: ``examples/ray_train.py`` on two workers, one killed."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import checkpoint

pytest.importorskip("ray.train", reason="needs Ray Train: install .[ecosystem] or .[ray]")

Ranks = Callable[..., list[Any]]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
STEPS, EVERY = 30, 10

# The example's training function, but its second worker is killed, once, behind step 20.
DRIVER = """
import os, runpy, signal, sys
from pathlib import Path

import ray

path, out, folder, steps, every = sys.argv[1:]
example = runpy.run_path(path)
train = example["train"]


def dies_once(config):
    train({**config, "steps": 20})
    died = Path(config["out"], "died")
    if os.environ["RANK"] == "1" and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    train(config)


example["on_ray"].__globals__["train"] = dies_once
ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
example["on_ray"]({"out": out, "steps": int(steps), "every": int(every)}, 2)
"""


def _on_ray(out: Path) -> str:
    """Run the driver; return what workers and driver have printed."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    # Ray has Unix sockets here, whose paths have to be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        arguments = [str(EXAMPLE), str(out), folder, str(STEPS), str(EVERY)]
        ended = subprocess.run(
            [sys.executable, "-c", DRIVER, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
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


def test_a_training_on_ray_survives_a_worker_and_ends_as_it_does_elsewhere(
    ranks: Ranks, tmp_path: Path
) -> None:
    output = _on_ray(tmp_path / "ray")
    assert (tmp_path / "ray" / "died").exists()
    assert "2 ranks, starting after step 0" in output
    assert "2 ranks, starting after step 20" in output
    ranks(_undisturbed, 2, tmp_path / "here")
    found, step = _loaded(tmp_path / "ray")
    expected, _ = _loaded(tmp_path / "here")
    assert step == STEPS
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
