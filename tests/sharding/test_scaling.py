"""How sums over ranks become averages without leaving the range of the dtype."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.sharding.reduce import Scaling
from shardwise.transport.base import Reduce


def test_the_transport_averages_where_nothing_can_overflow() -> None:
    assert Scaling.of(torch.float32, 8, None) == Scaling(1.0, Reduce.AVG, 1.0)
    assert Scaling.of(torch.bfloat16, 8, None) == Scaling(1.0, Reduce.AVG, 1.0)


def test_a_factor_of_the_user_divides_the_sum() -> None:
    assert Scaling.of(torch.float32, 8, 3.0) == Scaling(1.0, Reduce.SUM, 3.0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64, 1000])
def test_half_precision_divides_on_both_sides(world_size: int) -> None:
    scaling = Scaling.of(torch.float16, world_size, None)

    assert scaling.op is Reduce.SUM
    assert scaling.before * scaling.after == pytest.approx(world_size)
    # Within a factor of two of the square root on each side, and exact in binary before the sum.
    assert world_size**0.5 <= scaling.before < 2 * max(world_size, 1) ** 0.5
    assert math.log2(scaling.before).is_integer()


def test_a_sum_past_the_largest_half_survives() -> None:
    world_size = 64
    assert world_size * 4000.0 > torch.finfo(torch.float16).max
    scaling = Scaling.of(torch.float16, world_size, None)
    grad = torch.full((1,), 4000.0, dtype=torch.float16)

    total = sum((grad / scaling.before for _ in range(world_size)), torch.zeros(1).half())

    assert torch.isfinite(total).all()
    assert (total / scaling.after).item() == pytest.approx(4000.0, rel=1e-2)
