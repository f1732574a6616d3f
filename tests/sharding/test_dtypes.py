"""Parameters of many dtypes in one group, and what is too large or too small for one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from tests.sharding.nets import WIDTH, Net, batches, loss_of, sharded_net, train_alike, twins
from tests.worlds import on_processes, on_threads


class EveryKind(nn.Module):
    """Parameters of one group: of many dtypes, with none or one element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)
        self.wide = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.none = nn.Parameter(torch.empty(4, 0, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.phase = nn.Parameter(torch.tensor(1 + 1j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.linear(x) * self.narrow) @ self.wide.T.float()
        x = (x * self.waves * self.phase).abs() * self.scalar
        return x + self.empty.sum() + self.none.sum()


@pytest.mark.parametrize("transport", ["c10d", "collectives"])
@pytest.mark.parametrize("world_size", [1, 2])
@on_processes()
def test_many_dtypes_no_elements_and_scalars_in_one_group(
    rank: int, world_size: int, transport: str
) -> None:
    net, whole = twins(EveryKind, transport=transport)
    dtypes = [param.dtype for param in whole.parameters()]
    train_alike(net, whole, rank, world_size)
    assert [param.dtype for param in net.parameters()] == dtypes
    assert net.empty.to_local().numel() == 0
    assert whole.empty.grad is None or net.empty.grad is None
    train_alike(net, whole, rank, world_size, momentum=0.9)


class Product(nn.Module):
    """Its weight's gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@on_threads(2)
def test_gradients_accumulate_in_reduce_dtype_without_rounding(rank: int, world_size: int) -> None:
    net = fully_shard(
        Product(),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True),
    )
    for sync, value in ((False, 1.0), (False, 2.0**-9), (True, 2.0**-10)):
        net.set_requires_gradient_sync(sync)
        net(torch.full((4,), value)).backward()
    expected = 1.0 + 2.0**-9 + 2.0**-10  # bfloat16 has eight bits: it would stay at one
    assert torch.equal(net.weight.grad.full_tensor(), torch.full((4,), expected))


class _Overflowing(Net):
    """Overflows in one layer where it is told to."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


@on_threads(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank: int, world_size: int) -> None:
    net = sharded_net(_Overflowing)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    scales = []
    for step in range(4):
        before = [param.full_tensor().clone() for param in net.parameters()]
        net.factor = float("inf") if step == 1 and rank == 1 else 1.0
        scaler.scale(loss_of(net, batches(world_size, step)[rank])).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(net.parameters(), 1e6)
        assert bool(torch.isfinite(norm)) == (step != 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = [param.full_tensor() for param in net.parameters()]
        same = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
        assert all(same) if step == 1 else not any(same), f"step {step}"
    assert scales == [16.0, 8.0, 8.0, 16.0]


class _OneOverflows(nn.Module):
    """The second row of the weight belongs to the second rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@on_threads(2)
def test_an_overflow_in_one_shard_skips_the_step_on_all(rank: int, world_size: int) -> None:
    net = fully_shard(_OneOverflows())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = torch.tensor([[1.0], [float("inf")]]).expand(2, 3)
    scaler.scale(net(x)).backward()
    finite = bool(torch.isfinite(net.weight.grad.to_local()).all())
    assert finite == (rank == 0), "only one rank can see it"
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(net.weight.full_tensor(), torch.ones(2, 3))
    assert scaler.get_scale() == 2.0
