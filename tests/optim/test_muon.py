"""Muon on any mesh computes what torch's Muon and AdamW compute on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise._torch import dtensor
from tests.optim.nets import Mesh, Net, make_muon, part_of, set_gradients

Threads = Callable[..., list[Any]]

STEPS = 3
HIDDEN = ("up.weight", "down.weight", "square.weight")


class Reference:
    """Torch's own optimizers on full tensors: each matrix of a stack is a parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        self.net = Net().to(dtype)
        self.experts = [nn.Parameter(each.clone()) for each in self.net.experts.detach()]
        hidden = [param for name, param in self.net.named_parameters() if name in HIDDEN]
        rest = {n: p for n, p in self.net.named_parameters() if n not in (*HIDDEN, "experts")}
        decayed = [param for param in rest.values() if param.ndim > 1]
        vectors = [param for param in rest.values() if param.ndim == 1]
        self.muon = torch.optim.Muon([*hidden, *self.experts], lr=0.1, **settings)
        decay = settings.get("weight_decay", 0.1)
        self.adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=0.02,
            betas=(0.9, 0.95),
        )

    def step(self, number: int, has: Callable[[str], bool] = lambda name: True) -> None:
        set_gradients(self.net, number, has)
        grad = self.net.experts.grad
        for i, expert in enumerate(self.experts):
            expert.grad = None if grad is None else grad[i]
        self.muon.step()
        self.adamw.step()

    def values(self) -> dict[str, torch.Tensor]:
        found = {name: param.detach() for name, param in self.net.named_parameters()}
        return {**found, "experts": torch.stack([each.detach() for each in self.experts])}


def _assert_same(net: nn.Module, wanted: dict[str, torch.Tensor], what: str) -> None:
    for name, param in net.named_parameters():
        found, expected = dtensor.plain(param.detach()), dtensor.plain(part_of(wanted[name], param))
        # The end of a tensor is computed without vectors, and every rank's shard has another end.
        worst = (found - expected).abs().max().item() if found.numel() else 0.0
        assert worst <= 3e-7, f"{what}: {name} differs by {worst}"


def _trains_as_one_process(rank: int, world_size: int, mesh: Mesh, settings: Any) -> None:
    net = mesh.build()
    muon, reference = make_muon(net, **settings), Reference(**settings)
    for step in range(1, STEPS + 1):
        set_gradients(net, step)
        muon.step()
        reference.step(step)
        _assert_same(net, reference.values(), f"{mesh}, step {step}")


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh({"dp": 1}),
        Mesh({"dp": 2}),
        Mesh({"dp": 3}),
        Mesh({"dp": 8}),
        Mesh({"dp": 4}, dim=1),
        Mesh({"replicate": 2, "shard": 2}),
        Mesh({"replicate": 3, "shard": 1}),
        Mesh({"dp": 2, "tp": 2}),
        Mesh({"dp": 3, "tp": 2}),
        Mesh({"replicate": 2, "shard": 2, "tp": 2}),
    ],
    ids=lambda mesh: "-".join(f"{n}{s}" for n, s in mesh.sizes.items()) + f"-{mesh.dim}",
)
def test_update_is_that_of_one_process(threads: Threads, mesh: Mesh) -> None:
    world_size = 1
    for size in mesh.sizes.values():
        world_size *= size
    threads(_trains_as_one_process, world_size, mesh, {})
