"""What the files beside are of: a small model, trained for two steps alike on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Uneven rows, a tie, a buffer in bf16, and, if asked for, a scalar.

    Args:
        scalar: whether there is a parameter without dimensions.
    """

    def __init__(self, *, scalar: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(11, 6)
        self.mlp = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6, bias=False))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("mask", torch.arange(1.0, 4.0, dtype=torch.bfloat16) / 3)
        self.scale = nn.Parameter(torch.tensor(1.5) if scalar else torch.tensor([1.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from itself."""
        hidden = self.emb(tokens)
        logits = self.head(hidden + self.mlp(hidden) * self.scale)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay; the bias and the scale do not, and learn faster."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {
            "params": [p for n, p in named if not n.endswith("weight")],
            "weight_decay": 0.0,
            "lr": 0.02,
        },
    ]


def batches() -> list[torch.Tensor]:
    """Two batches of tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 11, (2, 4), generator=generator) for _ in range(2)]


def trained(*, scalar: bool = True) -> tuple[Net, torch.optim.Optimizer]:
    """The model after both steps, on one process."""
    model = Net(scalar=scalar)
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    for tokens in batches():
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer
