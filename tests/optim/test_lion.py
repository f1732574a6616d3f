"""Lion on any mesh computes what its paper says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import checkpoint
from shardwise._torch import dtensor
from shardwise.optim import Lion, pieces
from tests.harness import run_ranks
from tests.optim.nets import (
    ACCUMULATIONS,
    Mesh,
    Net,
    Set,
    part_of,
    set_gradients,
    train_on_microbatches,
)

Threads = Callable[..., list[Any]]

STEPS = 2
LR, BETAS, DECAY = 0.03, (0.8, 0.95), 0.2


def _make(net: nn.Module) -> Lion:
    return Lion(net.named_parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)


class Reference:
    """Algorithm 2 of the paper, on full tensors."""

    def __init__(self) -> None:
        self.net = Net()
        self._averages = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}

    @torch.no_grad()
    def step(self, number: int, has: Callable[[str], bool] = lambda name: True) -> None:
        set_gradients(self.net, number, has)
        for name, param in self.net.named_parameters():
            if param.grad is None:
                continue
            average = self._averages[name]
            update = (BETAS[0] * average + (1 - BETAS[0]) * param.grad).sign()
            param.copy_(param - LR * (update + DECAY * param))
            self._averages[name] = BETAS[1] * average + (1 - BETAS[1]) * param.grad

    def assert_same(self, net: nn.Module, what: str, tolerance: float = 1e-6) -> None:
        for name, param in net.named_parameters():
            wanted = self.net.get_parameter(name).detach()
            found, expected = dtensor.plain(param.detach()), dtensor.plain(part_of(wanted, param))
            torch.testing.assert_close(
                found.float(), expected, rtol=tolerance, atol=tolerance, msg=f"{what}: {name}"
            )


def _trains_as_one_process(rank: int, world_size: int, mesh: Mesh) -> None:
    net = mesh.build()
    lion, reference = _make(net), Reference()
    for step in range(1, STEPS + 1):

        def has(name: str, step: int = step) -> bool:
            return step != 2 or name not in ("up.weight", "norm.bias")

        set_gradients(net, step, has)
        lion.step()
        reference.step(step, has)
        reference.assert_same(net, f"{mesh}, step {step}")
    average = lion.state[net.up.weight]["exp_avg"]
    assert average.placements == net.up.weight.placements  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "mesh",
    [Mesh({"dp": 1}), Mesh({"dp": 3}), Mesh({"dp": 2, "tp": 2})],
    ids=lambda mesh: "-".join(f"{n}{s}" for n, s in mesh.sizes.items()),
)
def test_update_is_that_of_the_paper(threads: Threads, mesh: Mesh) -> None:
    threads(_trains_as_one_process, mesh.size, mesh)


@pytest.mark.parametrize("tell", ACCUMULATIONS)
def test_gradients_of_several_backwards_are_added_up(threads: Threads, tell: Set) -> None:
    threads(train_on_microbatches, 3, _make, _make, tell)


@pytest.mark.parametrize("at_once", [1, 10, 100])
def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    found = []
    for size in (at_once, 1 << 20):
        monkeypatch.setattr(pieces, "AT_ONCE", size)
        net = Net()
        lion = _make(net)
        for step in range(1, STEPS + 1):
            set_gradients(net, step)
            lion.step()
        found.append(net)
    for param, other in zip(*(net.parameters() for net in found), strict=True):
        assert torch.equal(param, other)


def test_a_parameter_in_bfloat16_is_rounded_once() -> None:
    """Decay alone is too small to move it, and so would be lost if it were rounded by itself."""
    before = torch.full((8,), 1.0, dtype=torch.bfloat16)
    param = nn.Parameter(before.clone())
    lion = Lion([param], lr=2**-8, weight_decay=0.5)
    param.grad = torch.ones(8, dtype=torch.bfloat16)
    lion.step()
    expected = (before.float() - 2**-8 * (1 + 0.5 * before.float())).bfloat16()
    assert torch.equal(param.detach(), expected)
    assert lion.state[param]["exp_avg"].dtype == torch.bfloat16


def _saves(rank: int, world_size: int, folder: Path) -> None:
    net = Mesh({"dp": world_size}).build()
    lion = _make(net)
    set_gradients(net, 1)
    lion.step()
    checkpoint.save(folder, net, lion)


def _loads(rank: int, world_size: int, folder: Path) -> None:
    net, reference = Mesh({"dp": world_size}).build(), Reference()
    lion = _make(net)
    checkpoint.load(folder, net, lion)
    set_gradients(net, 2)
    lion.step()
    for step in (1, 2):
        reference.step(step)
    reference.assert_same(net, "after a checkpoint")


@pytest.mark.long
def test_training_goes_on_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    run_ranks(_saves, 2, tmp_path / "saved")
    run_ranks(_loads, 3, tmp_path / "saved")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr: found -1.0, expected 0 or more"),
        ({"betas": (0.9, 1.5)}, "betas: found (0.9, 1.5), expected two from 0 to 1"),
        ({"weight_decay": float("nan")}, "weight_decay: found nan, expected 0 or more"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Lion([nn.Parameter(torch.ones(2))], **settings)
