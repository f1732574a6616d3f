"""The files in ``examples/configs`` start trainings, here of small models and for two steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.cli import train as cli_train
from shardwise.app.cli.run import LaunchConfig
from shardwise.app.recipes.core.job import TrainingJob
from tests.cli.shell import call
from tests.recipes.running import train
from tests.recipes.small import losses, write_model, write_text
from tests.worlds import Ranks

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
SMALL = (
    "--steps 2 --batch-size 1 --accumulate 1 --seq-length 32 --device cpu --sample-tokens 0 "
    "--shuffle-buffer 0 --warmup 1"
)


def test_each_file_starts_a_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, published: Path, ranks: Ranks
) -> None:
    scratch = f"--model {write_model(tmp_path)} --data {write_text(tmp_path)}"
    weights, chats = f"--from {published}/model", f"--chat {published}/chats.jsonl"
    own = {
        "pretrain": f"{scratch} --tokenizer {published}/model --model {published}/model",
        "fine-tune": f"{weights} --data {published}/texts.jsonl",
        "chat": f"{weights} {chats}",
        "lora": f"{weights} {chats}",
        "four-bits": f"{weights} {chats}",
        "two-hosts": f"{scratch} --node-rank 1 --replicas 1",
    }
    assert {path.stem for path in CONFIGS.iterdir()} == set(own)
    jobs: dict[str, tuple[Any, LaunchConfig]] = {}
    monkeypatch.chdir(tmp_path)
    for name, options in own.items():

        def started(job: TrainingJob, launch: LaunchConfig, name: str = name) -> None:
            jobs[name] = (job.config, launch)

        monkeypatch.setattr(cli_train, "run", started)
        line = f"--config {CONFIGS}/{name}.yaml {SMALL} {options} --out {tmp_path}/{name}"
        assert call("train", "lm", *line.split()) == 0
    nodes = jobs["two-hosts"][1].nodes()
    assert nodes is not None
    assert (nodes.count, nodes.rank, nodes.where) == (2, 1, "host-a:29400")
    if importlib.util.find_spec("bitsandbytes") is None:
        del jobs["four-bits"]
    configs = [config for config, _ in jobs.values()]
    assert ranks(train, 1, *configs) == [["finished"] * len(configs)]
    assert [len(losses(config)) for config in configs] == [2] * len(configs)
