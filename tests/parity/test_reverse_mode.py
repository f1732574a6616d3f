"""Reverse-mode transforms of ``torch.func`` through sharded modules give what they should."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacrev, vjp, vmap

from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    check_backward,
    group_of,
    loss_of,
    run_backward,
    seeded,
    sharded_modules,
    sharded_net,
)
from tests.worlds import Ranks, on_threads


def _vjp(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out, pull = vjp(net, x)
    found: torch.Tensor = pull(torch.ones_like(out))[0]  # outside of the transform
    return found


def _of(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: loss_of(net, x)


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "grad": lambda net, x: grad(_of(net))(x),
    "vjp": _vjp,
    "jacrev": lambda net, x: jacrev(lambda x: net(x).sum(0))(x),
    "vmap of grad": lambda net, x: vmap(grad(_of(net)))(x),
    "grad of vmap": lambda net, x: grad(lambda x: vmap(_of(net))(x).sum())(x),
    "hessian": lambda net, x: hessian(_of(net))(x),
}

TWICE: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "grad of grad": lambda net, x: grad(lambda x: grad(_of(net))(x).square().sum())(x),
    "backward of grad": lambda net, x: grad(_of(net))(x).square().sum().backward(),
}


def _first_order(rank: int, world_size: int, reshards: bool | int) -> None:
    # Torch compiles what it needs for tangents with torch.jit.
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script")
    x = batches(world_size)
    net, whole = sharded_net(of_blocks={"reshard_after_forward": reshards}), seeded(Net)
    net.set_requires_gradient_sync(False)
    loss_of(net, x[rank]).backward()  # its gradients stay, unreduced
    average_backward(whole, x)
    for name, way in WAYS.items():
        expected = way(seeded(Net), x[rank])
        for _ in range(2):
            found = way(net, x[rank])
            torch.testing.assert_close(found, expected, msg=lambda text, n=name: f"{n}: {text}")
        for module in sharded_modules(net):
            assert group_of(module).state.value == "sharded", name
    net.set_requires_gradient_sync(True)
    check_backward(net, whole, x, rank)


@pytest.mark.parametrize(
    ("transport", "reshards", "world_size"),
    [("auto", True, 1), ("shm", True, 2), ("c10d", True, 2), ("c10d", False, 2), ("auto", 2, 4)],
)
def test_gradients_with_respect_to_inputs(
    ranks: Ranks, transport: str, reshards: bool | int, world_size: int
) -> None:
    ranks(_first_order, world_size, reshards, env={"SHARDWISE_TRANSPORT": transport})


@pytest.mark.parametrize("kept", [False, True], ids=["resharded", "kept"])
@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_gradients_of_gradients_are_refused(
    rank: int, world_size: int, name: str, kept: bool
) -> None:
    x = batches(world_size)
    net, whole = sharded_net(), seeded(Net)
    net.set_reshard_after_backward(not kept)
    with pytest.raises(NotImplementedError, match="reverse-mode transform of the result of anoth"):
        TWICE[name](net, x[rank])
    assert all(param.grad is None for param in net.parameters()), "nothing is left unreduced"
    for module in sharded_modules(net):
        module.reshard()
    run_backward(net, whole, x, rank)
    for module in sharded_modules(net):
        module.reshard()
    assert_same_gradients(net, whole)


@on_threads(2)
def test_a_gradient_inside_a_training_step(rank: int, world_size: int) -> None:
    """A loss that the gradient is a constant in, as forces may be."""
    x = batches(world_size)
    net, whole = sharded_net(), seeded(Net)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        force = grad(_of(model))(x).detach()
        return loss_of(model, x + force)

    loss(net, x[rank]).backward()  # type: ignore[no-untyped-call]
    for batch in x:
        (loss(whole, batch) / world_size).backward()  # type: ignore[no-untyped-call]
    assert_same_gradients(net, whole)
