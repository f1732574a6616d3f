"""One small checkpoint of a process without a process group, and what is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise import checkpoint
from shardwise.checkpoint.disk.entries import MANIFEST

SHARD = "shard-00000-of-00001.safetensors"


class Runs:
    """What a pickle makes when it is read: a file, where it may not."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.evidence,)


class Small(nn.Module):
    """Two layers, a buffer, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.note = "new"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def make(seed: int = 0, steps: int = 1) -> tuple[Small, torch.optim.Optimizer]:
    """A model and an optimizer that have taken some steps."""
    torch.manual_seed(seed)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step on random numbers."""
    optimizer.zero_grad()
    model(torch.randn(4, 7)).square().mean().backward()
    optimizer.step()


def save_small(folder: Path, **options: Any) -> tuple[Small, torch.optim.Optimizer]:
    """Save a model whose parameters are larger than a block of checksums would be."""
    model, optimizer = make()
    model.note = "saved"
    checkpoint.save(folder, model, optimizer, {"step": 1, "noise": torch.ones(3)}, **options)
    return model, optimizer


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models hold the same tensors."""
    mine, others = one.state_dict(), other.state_dict()
    tensors = [name for name, value in mine.items() if isinstance(value, torch.Tensor)]
    return all(torch.equal(mine[name], others[name]) for name in tensors)


def read_json(folder: Path) -> Any:
    """The manifest, as JSON."""
    return json.loads((folder / MANIFEST).read_text())


def write_json(folder: Path, content: Any) -> None:
    """Replace the manifest, without the checksum of what it was."""
    if isinstance(content, dict):
        content.pop("of_all_above", None)
    (folder / MANIFEST).write_text(json.dumps(content))
