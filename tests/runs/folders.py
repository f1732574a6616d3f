"""Folders of runs, as trainings leave them, made without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def session(**changes: Any) -> dict[str, Any]:
    """A session of a run.json."""
    about = {
        "from_step": 0,
        "steps_asked_for": 200,
        "world_size": 2,
        "hosts": 1,
        "device": "cpu",
        "mesh": {"dp_shard": 2},
        "transport": "shm",
        "command": "shardwise train lm",
        "versions": {"torch": "2.13"},
        "host": {"name": "one"},
        "status": "finished",
        "started": "2026-01-01T10:00:00+00:00",
        "ended": "2026-01-01T10:05:00+00:00",
    }
    return {**about, **changes}


def record(*sessions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The run.json of a run."""
    about = {
        "recipe": "lm",
        "config": {"model": "llama-tiny", "train": {"steps": 200, "optimizer": {"lr": 0.002}}},
        "model": {"name": "llama-tiny", "parameters": 920_704},
        "data": {"summary": "a book"},
        "sessions": list(sessions) or [session()],
    }
    return {**about, **changes}


def line(step: int) -> dict[str, Any]:
    """A step of a metrics.jsonl."""
    loss = 2 + 4 * math.exp(-step / 40) + 0.1 * math.sin(step * 12.9)
    return {
        "step": step,
        "loss": loss,
        "grad_norm": 1 + abs(math.sin(step)),
        "lr": 0.001,
        "memory_mib": 400.0 + step % 3,
        "eta_s": 200.0 - step,
        "tokens_per_s": 9000.0 + step,
    }


def metrics(steps: int, every: int = 50) -> str:
    """A metrics.jsonl with evaluations."""
    lines = []
    for step in range(1, steps + 1):
        lines.append(line(step))
        if step % every == 0:
            lines.append({"step": step, "validation_loss": 2 + 4 * math.exp(-step / 45)})
    return "".join(json.dumps(each) + "\n" for each in lines)


def make(root: Path, steps: int = 200, **about: Any) -> Path:
    """Make the folder of a run; ``about`` replaces parts of its run.json."""
    root.mkdir(parents=True)
    (root / "run.json").write_text(json.dumps(record(**about)))
    (root / "config.yaml").write_text("model: llama-tiny\nsteps: 200\n")
    (root / "metrics.jsonl").write_text(metrics(steps))
    (root / "sample.txt").write_text("Once upon a time\n")
    return root
