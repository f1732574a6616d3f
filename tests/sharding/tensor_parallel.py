"""A small language model, and a plan of tensor parallelism that uses every kind of torch's."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.sharding.nets import shard_blocks

#: What two ranks of tensor parallelism, and two or three that shard, do not divide.
VOCABULARY = 13
WIDTH = 8
LENGTH = 4


class TokenBlock(nn.Module):
    """A residual block after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class TokenNet(nn.Module):
    """Tokens ``(batch, LENGTH)`` to logits ``(batch, LENGTH, VOCABULARY)``."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(TokenBlock() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tensor_parallel(net: TokenNet, mesh: DeviceMesh) -> TokenNet:
    """Cut ``net`` over ``mesh``: activations along the sequence between the layers."""
    plan: dict[str, object] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(net, mesh, plan)
    return net


def sharded(net: TokenNet, mesh: DeviceMesh, **kwargs: object) -> TokenNet:
    """``net`` with every block, and the rest, sharded over ``mesh``."""
    shard_blocks(net, kwargs, mesh=mesh)
    return net


def tokens_of(ranks: int, step: int = 0) -> torch.Tensor:
    """The tokens of all data parallel ranks, ``(ranks, 2, LENGTH + 1)``."""
    generator = torch.Generator().manual_seed(200 + step)
    return torch.randint(VOCABULARY, (ranks, 2, LENGTH + 1), generator=generator)


def next_token_loss(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss of predicting each token from those before it."""
    logits = net(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def fill_with_rows(module: nn.Module) -> dict[str, torch.Tensor]:
    """Number the elements of every parameter from 0; returns copies by name."""
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.arange(float(param.numel())).view(param.shape))
    return {name: param.detach().clone() for name, param in module.named_parameters()}
