"""Lion takes a tensor in pieces, and rounds it once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.optim import Lion
from tests.optim.nets import (
    Net,
    set_gradients,
)
from tests.optim.references import make_lion

STEPS = 2


@pytest.mark.parametrize("at_once", [1, 10, 100])
def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    found = []
    for size in (at_once, 1 << 20):
        monkeypatch.setattr("shardwise.optim.lion.AT_ONCE", size)
        net = Net()
        lion = make_lion(net)
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
