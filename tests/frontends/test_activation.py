"""Which results a selectively checkpointed module keeps, and that none of them is another one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from shardwise import checkpoint_module
from shardwise.frontends.blocks import (
    _policy,
    checkpoint_blocks,
    keep_every_second_product,
    keep_products,
)
from shardwise.frontends.strategies import Checkpointing


class Attention(nn.Module):
    """Attention with dropout, and dropout behind it, whose random numbers come later."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 8)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 5, 2, 12).transpose(1, 2).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        mixed = F.gelu(mixed.transpose(1, 2).reshape(2, 5, 8))
        return F.dropout(self.out(mixed), 0.5)


class Count(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls[operator.__name__.partition(".")[0]] += 1
        return operator(*args, **(kwargs or {}))


def run(dropout: float, **options: Any) -> tuple[list[torch.Tensor], Counter[str]]:
    """Gradients of a module, and which operators ran in backward."""
    torch.manual_seed(0)
    module = Attention(dropout)
    if options:
        checkpoint_module(module, **options)
    x = torch.randn(2, 5, 8, requires_grad=True)
    loss = module(x).square().sum()
    with Count() as count:
        loss.backward()
    return [x.grad, *(p.grad for p in module.parameters())], count.calls  # type: ignore[list-item]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_those_without_checkpointing(dropout: float) -> None:
    expected, _ = run(dropout)
    for kept in (None, keep_products, keep_every_second_product):
        options = {"context_fn": kept}
        found, _ = run(dropout, **options)
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine, other), options


def test_products_and_attention_are_not_computed_again_and_the_rest_is() -> None:
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    _, plain = run(0.0)
    (_, full), (_, selective), (_, operator) = (
        run(0.0, context_fn=each) for each in (None, keep_products, keep_every_second_product)
    )
    assert full["addmm"] == 2
    assert operator["addmm"] == 1
    assert plain["addmm"] == selective["addmm"] == 0
    assert full[attention] == 1
    assert plain[attention] == selective[attention] == operator[attention] == 0
    assert plain["gelu"] == 0
    assert full["gelu"] == selective["gelu"] == operator["gelu"] == 1


def _noting(forward: Any, number: int, ran: list[int]) -> Any:
    def noted(x: torch.Tensor) -> Any:
        ran.append(number)
        return forward(x)

    return noted


@pytest.mark.parametrize(
    ("mode", "every", "again"),
    [
        (Checkpointing.NONE, 1, []),
        (Checkpointing.FULL, 1, [3, 2, 1, 0]),
        (Checkpointing.FULL, 2, [3, 1]),
        (Checkpointing.FULL, 3, [2]),
        (Checkpointing.FULL, 5, []),
    ],
)
def test_every_nth_block_is_recomputed(mode: Checkpointing, every: int, again: list[int]) -> None:
    blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    ran: list[int] = []
    for i, block in enumerate(blocks):
        block.forward = _noting(block.forward, i, ran)  # type: ignore[method-assign]
    checkpoint_blocks(blocks, mode, every)
    loss = blocks(torch.ones(1, 2)).sum()
    ran.clear()
    loss.backward()
    assert ran == again


def test_attention_that_draws_random_numbers_draws_them_again() -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.zeros(1)
    kept = [
        _policy(None, operator, q, q, q, *rest, **named)
        for rest, named in (((), {}), ((0.0,), {}), ((0.1,), {}), ((), {"dropout_p": 0.1}))
    ]
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert kept == [keep, keep, again, again]
