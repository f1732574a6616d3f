"""A model whose values only rank 0 has, handed out by torch's ``set_model_state_dict``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

import shardwise
from tests.sharding.nets import WIDTH, Block, batches, loss_of, seeded
from tests.worlds import Ranks


class Net(nn.Module):
    """The root runs before its blocks, and is sharded after them. No scalars: torch has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class TiedNet(Net):
    """The last layer is the first. torch ties within one call of ``fully_shard`` only."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(super().forward(x))


def _built(
    rank: int, fully_shard: Callable[[nn.Module], object], where: str, model: type[Net]
) -> nn.Module:
    """The model: whole on rank 0, on the meta device where ``where`` says so."""
    on_meta = where == "every rank" or rank > 0
    with torch.device("meta" if on_meta else "cpu"):
        net = seeded(model)
    if where == "blocks of other ranks" and on_meta:
        net.first.to_empty(device="cpu")
        net.norm.to_empty(device="cpu")
        if isinstance(net, TiedNet):
            net.last.weight = net.first.weight  # to_empty() has untied them
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return net


def _trained(
    rank: int, world_size: int, net: nn.Module, model: type[Net], options: StateDictOptions
) -> Any:
    """The losses of some steps, and the whole parameters, gradients and buffers after them."""
    whole = seeded(model).state_dict() if rank == 0 else {}
    with warnings.catch_warnings():  # torch's, where all of a rank's values are on the meta device
        warnings.filterwarnings("ignore", message=".*_get_pg_default_device")
        warnings.filterwarnings("ignore", message="Multiple backends are registered")
        set_model_state_dict(net, whole, options=options)
    reference = seeded(model)
    for name, value in get_model_state_dict(net, options=StateDictOptions()).items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, reference.state_dict()[name]), name
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(2):
        loss = loss_of(net, batches(world_size, step)[rank])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        if step == 0:
            optimizer.zero_grad()
    grads = {n: p.grad.full_tensor() for n, p in net.named_parameters() if p.grad is not None}
    values = {n: p.full_tensor().detach() for n, p in net.named_parameters()}
    return losses, grads, values, dict(net.named_buffers())


def _equals_torchs(rank: int, world_size: int, model: type[Net]) -> None:
    """Offload with every second place, with those that the other model does without."""
    for i, where in enumerate(("other ranks", "blocks of other ranks", "every rank")):
        offload = i % 2 == (model is TiedNet)
        given = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload
        )
        torchs = _built(rank, torch.distributed.fsdp.fully_shard, where, model)
        expected = _trained(rank, world_size, torchs, model, given)
        ours = _built(rank, shardwise.fully_shard, where, model)
        found = _trained(rank, world_size, ours, model, given)
        torch.testing.assert_close(
            found, expected, msg=lambda text, w=where, c=offload: f"{w}, {c}: {text}"
        )


@pytest.mark.parametrize("model", [Net, TiedNet])
@pytest.mark.parametrize(
    "transport", ["shm", "c10d", pytest.param("collectives", marks=pytest.mark.long)]
)
def test_values_of_rank_0_reach_ranks_that_have_none_as_in_torch(
    ranks: Ranks, transport: str, model: type[Net]
) -> None:
    ranks(_equals_torchs, 2, model, env={"SHARDWISE_TRANSPORT": transport})
