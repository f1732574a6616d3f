"""Gradients that autograd does not give to sharded parameters, because forward has full ones.

``backward(inputs=parameters)`` finds no path to them and does nothing, in silence. The next step of
the optimizer says so.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import fully_shard
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    assert_same_values,
    average_backward,
    batches,
    loss_of,
    twins,
)
from tests.worlds import on_threads

_SAYS = r"gain on rank \d: an optimizer steps, and none of the 12 sharded parameters"


class _Checkpointed(nn.Sequential):
    """The forward of what is inside runs again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self[0], x, use_reentrant=True)


@on_threads(2)
def test_the_step_after_a_backward_that_named_sharded_parameters_says_so(
    rank: int, world_size: int
) -> None:
    x = batches(world_size)[rank]
    net, whole = twins(Net)
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)

    loss_of(net, x).backward(inputs=params)
    with pytest.warns(UserWarning, match=_SAYS):
        optimizer.step()
    assert_same_values(net, whole)

    loss_of(net, x).backward(inputs=params[:2])
    with pytest.warns(UserWarning, match="freeze what is to get no gradient"):
        optimizer.step()

    loss = loss_of(net, x)
    with pytest.raises(RuntimeError, match="have been used in the graph"):
        torch.autograd.grad(loss, params)
    found = torch.autograd.grad(loss, params, allow_unused=True)
    assert found == (None,) * len(params)
    with pytest.warns(UserWarning, match="torch.autograd.grad"):
        optimizer.step()


@on_threads(2)
def test_what_it_says_to_do_gives_the_gradients_of_one_process(rank: int, world_size: int) -> None:
    x = batches(world_size)
    net, whole = twins(Net)
    for model in (net, whole):
        model.blocks[0].requires_grad_(False)
    loss_of(net, x[rank]).backward()
    average_backward(whole, x)
    assert_same_gradients(net, whole)
    assert net.blocks[0].up.weight.grad is None


@on_threads(2)
def test_other_steps_without_gradients_say_nothing(rank: int, world_size: int) -> None:
    x = batches(world_size)[rank]
    net, _ = twins(Net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x)
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # before the first forward
        with torch.no_grad():
            loss_of(net, x)
        optimizer.step()
        loss_of(net, x)  # it has no backward
        optimizer.step(closure)
        optimizer.zero_grad()
        optimizer.step()
        closure()
        optimizer.step()
        optimizer.zero_grad()
        again = fully_shard(_Checkpointed(fully_shard(nn.Linear(2, 2))))
        again(torch.ones(1, 2, requires_grad=True)).sum().backward()
        again.zero_grad()
        torch.optim.SGD(again[0].parameters()).step()
        plain = nn.Linear(2, 2)
        loss_of(net, x)
        torch.optim.SGD(plain.parameters()).step()
