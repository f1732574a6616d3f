"""Small models, and the comparison of their gradients with an unsharded twin's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import FSDPModule, fully_shard
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.state import state_of
from tests.corpus.gathering import gather, part_of
from tests.corpus.models import WIDTH, Block, Net
from tests.harness import run_ranks
from tests.threads import run_threads


def run_over(
    transport: str, fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any
) -> list[Any]:
    """Call ``fn(rank, world_size, transport, *args, **kwargs)`` on every rank of a new world.

    Where parameters are gathered into memory that ranks share, ranks are processes. Elsewhere each
    has memory of its own, and they are threads.
    """
    run = run_ranks if transport == "shm" else run_threads
    return run(fn, world_size, transport, *args, **kwargs)


def in_turn(rank: int, world_size: int, transport: str, *functions: Callable[..., Any]) -> None:
    """Call several functions of :func:`run_over` in one world."""
    for function in functions:
        function(rank, world_size, transport)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """``make()`` after seeding: the same values on every call and rank."""
    torch.manual_seed(seed)
    return make()


def shard_blocks(
    net: nn.Module, of_blocks: dict[str, Any] | None = None, **kwargs: Any
) -> nn.Module:
    """Make groups of the blocks of ``net``, and of what is left of it.

    Args:
        net: its blocks are ``net.blocks``, else every :class:`Block` in it.
        of_blocks: arguments of ``fully_shard`` for the blocks only.
        kwargs: and those for all.
    """
    blocks = [module for module in net.modules() if isinstance(module, Block)]
    for block in getattr(net, "blocks", blocks):
        fully_shard(block, **kwargs, **(of_blocks or {}))
    return fully_shard(net, **kwargs)


def sharded_net(make: Callable[[], nn.Module] = Net, **kwargs: Any) -> nn.Module:
    """A seeded model whose blocks and root are groups; ``kwargs`` are :func:`shard_blocks`'."""
    return shard_blocks(seeded(make), **kwargs)


def twins(make: Callable[[], nn.Module], **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """The same model twice: sharded as by :func:`sharded_net`, and whole."""
    return sharded_net(make, **kwargs), seeded(make)


def sharded_modules(net: nn.Module) -> list[FSDPModule]:
    """Every module in ``net`` that is a group, or several, of its own."""
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


def group_of(module: nn.Module) -> ParamGroup:
    """The group of a module that ``fully_shard`` was applied to."""
    state = state_of(module)
    assert state is not None
    return state.groups[0]


def hybrid_mesh(world_size: int) -> DeviceMesh:
    """Two replicas, each sharded over half of the ranks."""
    shape = (2, world_size // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def batches(world_size: int, step: int = 0, rows: int = 2) -> torch.Tensor:
    """The inputs of all ranks, ``(world_size, rows, WIDTH)``."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(world_size, rows, WIDTH, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that every parameter takes part in."""
    loss: torch.Tensor = model(x).square().mean()
    return loss


def average_backward(model: nn.Module, x: torch.Tensor) -> None:
    """Data parallelism by definition: the mean of the gradients of all ranks' batches."""
    for batch in x:
        (loss_of(model, batch) / len(x)).backward()


def run_backward(sharded: nn.Module, whole: nn.Module, x: torch.Tensor, rank: int) -> None:
    """A backward of this rank's batch, and its twin's of the batches of all ranks."""
    loss_of(sharded, x[rank]).backward()
    average_backward(whole, x)


def check_backward(sharded: nn.Module, whole: nn.Module, x: torch.Tensor, rank: int) -> None:
    """:func:`run_backward`, after which the gradients are the same."""
    run_backward(sharded, whole, x, rank)
    assert_same_gradients(sharded, whole)


def assert_same_gradients(sharded: nn.Module, whole: nn.Module, **tolerance: float) -> None:
    """Compare every gradient of a sharded model with its twin's, by name."""
    found, expected = (
        {name: param.grad for name, param in model.named_parameters()} for model in (sharded, whole)
    )
    _assert_same(found, expected, **tolerance)


def assert_same_values(sharded: nn.Module, whole: nn.Module) -> None:
    """Compare every parameter of a sharded model with its twin's, by name."""
    _assert_same(dict(sharded.named_parameters()), dict(whole.named_parameters()))


def _assert_same(
    sharded: Mapping[str, torch.Tensor | None],
    whole: Mapping[str, torch.Tensor | None],
    **tolerance: float,
) -> None:
    """Compare tensors; all ranks of the world call it."""
    assert list(sharded) == list(whole)
    found = gather({name: part_of(tensor) for name, tensor in sharded.items()})
    for name, expected in whole.items():
        if expected is None or found[name] is None:
            assert found[name] is expected, f"{name}: found {found[name]}, expected {expected}"
            continue
        torch.testing.assert_close(
            found[name].to(expected.device),
            expected,
            msg=lambda text, name=name: f"{name}: {text}",
            **tolerance,
        )


def assert_accumulates(
    net: nn.Module, rank: int, world_size: int, between: Callable[[], object]
) -> None:
    """Two backwards of a :class:`Net`, with something in between, give the sum of their gradients.

    Args:
        net: the sharded net.
        rank: this one.
        world_size: the number of ranks.
        between: called between the backwards.
    """
    whole, x = seeded(Net), batches(world_size)
    loss_of(net, x[rank]).backward()
    between()
    loss_of(net, x[rank]).backward()
    for _ in range(2):
        average_backward(whole, x)
    assert_same_gradients(net, whole)


def step_all(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let optimizers step, and drop their gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train_alike(
    net: nn.Module,
    whole: nn.Module,
    rank: int,
    world_size: int,
    *args: Any,
    steps: int = 3,
    make: Any = torch.optim.SGD,
    **kwargs: Any,
) -> None:
    """Take some steps with both; gradients and values stay equal."""
    optimizers = [make(m.parameters(), lr=0.05, **kwargs) for m in (net, whole)]
    for step in range(steps):
        x = batches(world_size, step)
        net(x[rank], *args).square().mean().backward()
        for batch in x:
            (whole(batch, *args).square().mean() / world_size).backward()
        assert_same_gradients(net, whole)
        step_all(optimizers)
    assert_same_values(net, whole)
