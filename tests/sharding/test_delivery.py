"""How sums over ranks become averages without leaving the range of the dtype; what can wait."""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.sharding.delivery import Delivery, Grad, GroupGrads, Scaling, When
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import DataMesh
from shardwise.sharding.policy import GroupOptions, Precision
from shardwise.transport.base import NO_LABEL, LocalTransport, Reduce, Transport


def test_the_transport_averages_where_nothing_can_overflow() -> None:
    assert Scaling.of(torch.float32, 8, None) == Scaling(1.0, Reduce.AVG, 1.0)
    assert Scaling.of(torch.bfloat16, 8, None) == Scaling(1.0, Reduce.AVG, 1.0)


def test_a_factor_of_the_user_divides_the_sum() -> None:
    assert Scaling.of(torch.float32, 8, 3.0) == Scaling(1.0, Reduce.SUM, 3.0)


def test_a_divide_factor_is_read_again_for_every_reduction() -> None:
    # Programs divide by the number of tokens in a batch, which they may keep in a tensor.
    factor = torch.tensor(16.0)
    assert Scaling.of(torch.float16, 2, factor).after == 4.0  # type: ignore[arg-type]
    freed = weakref.ref(factor)
    factor.fill_(64.0)
    assert Scaling.of(torch.float16, 2, factor).after == 8.0  # type: ignore[arg-type]
    del factor
    assert freed() is None


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


class _Network(LocalTransport):
    """Replicas at the other end of a network, which takes what it is given."""

    overlaps_compute = True


class _Param(SimpleNamespace):
    """What a delivery knows of a parameter."""

    __hash__ = object.__hash__


def _under_way(replicate: Transport, home: str) -> Delivery:
    """The delivery of one gradient whose shard lives on ``home``, on its way over replicas."""
    mesh = SimpleNamespace(
        scatter=LocalTransport(),
        replicate=replicate,
        world_size=2,
        device=torch.device("cpu"),
        is_alone=False,
    )
    param = _Param(
        dtype=torch.float32,
        layout=Layout(torch.Size([3]), 0, 1),
        local=torch.empty(3, device=home),
        form=SimpleNamespace(is_tied=False, parameter=nn.Parameter(torch.empty(3))),
    )
    grads = [Grad(cast(GroupParam, param), torch.ones(3), is_owned=False, is_missing=False)]
    waiting = GroupGrads([], Precision(MixedPrecisionPolicy()))
    way = waiting.deliver(grads, cast(DataMesh, mesh), GroupOptions(), NO_LABEL)
    delivery = Delivery(way, None)
    assert delivery.when is When.NEXT, "the reduce-scatter holds full gradients"
    delivery.advance()
    assert not delivery.has_landed
    return delivery


def test_an_all_reduce_is_left_to_what_goes_on_by_itself() -> None:
    assert _under_way(_Network(), "cpu").when is When.LEFT
    assert _under_way(LocalTransport(), "cpu").when is When.NEXT


def test_a_gradient_that_is_to_leave_the_device_is_not_left_on_it() -> None:
    assert _under_way(_Network(), "meta").when is When.NEXT
