"""What people's models do, each against an unsharded twin."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import fully_shard
from shardwise.sharding.states import GroupState
from tests.sharding.nets import (
    WIDTH,
    Block,
    Net,
    Stack,
    assert_same_gradients,
    average_backward,
    batches,
    group_of,
    loss_of,
    run_backward,
    seeded,
    train_alike,
    twins,
)
from tests.worlds import on_processes, on_threads, on_transport

# -- what goes in and comes out ----------------------------------------------------------------


@dataclass
class Pair:
    left: torch.Tensor
    more: dict[str, Any]


class Nested(nn.Module):
    """Takes and returns tensors in dictionaries, lists and dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: dict[str, Any], *, pair: Pair) -> dict[str, Any]:
        x = inputs["list"][0] + pair.left * self.scale
        left = self.block(x)
        return {"pair": Pair(left, {"right": [x * self.scale, None]}), "name": "nested"}


class NestedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Nested(), Nested()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.first, self.second):
            output = module({"list": [x, 3]}, pair=Pair(x, {}))
            assert output["name"] == "nested"
            assert isinstance(output["pair"], Pair)
            x = output["pair"].left + output["pair"].more["right"][0]
        return x


@on_threads(2)
def test_nested_inputs_and_outputs(rank: int, world_size: int) -> None:
    net, whole = seeded(NestedNet), seeded(NestedNet)
    fully_shard(net.first)
    fully_shard(net.second)
    fully_shard(net)
    train_alike(net, whole, rank, world_size)


@on_threads(2)
def test_a_container_with_a_forward_of_its_own(rank: int, world_size: int) -> None:
    net, whole = fully_shard(seeded(Stack)), seeded(Stack)
    assert len(net) == 2
    train_alike(net, whole, rank, world_size)


# -- which parameters train --------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen layer, and two thin ones that train beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.Sequential(LowRank(), LowRank())
        self.head = nn.Linear(WIDTH, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x)))


@pytest.mark.parametrize("whole_groups", [False, True], ids=["part of a group", "whole groups"])
@on_threads(2)
def test_adapters_and_freezing_while_training(
    rank: int, world_size: int, whole_groups: bool
) -> None:
    net, whole = seeded(Adapted), seeded(Adapted)
    for layer in net.layers:
        if whole_groups:  # some groups have nothing to train at all
            fully_shard(layer.base)
        fully_shard(layer)
    for layer in (net.embed, net.head):
        fully_shard(layer)
    fully_shard(net)
    train_alike(net, whole, rank, world_size)
    for model in (net, whole):
        model.layers[1].base.requires_grad_(True)
        model.layers[0].down.requires_grad_(False)
    train_alike(net, whole, rank, world_size)
    for model in (net, whole):
        model.requires_grad_(False)
        model.embed.requires_grad_(True)
    train_alike(net, whole, rank, world_size)
    assert all(group_of(layer).state is GroupState.SHARDED for layer in net.layers)


class Skipping(nn.Module):
    """Runs only the blocks that it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        for i in which:
            x = self.blocks[i](x)
        return x


@on_threads(2)
def test_steps_that_run_other_modules_in_other_orders(rank: int, world_size: int) -> None:
    net, whole = twins(Skipping)
    for which in [(0, 1, 2), (0, 2), (2, 1, 0), (1,), (0, 1, 2)]:
        train_alike(net, whole, rank, world_size, which, steps=2)
        for block in net.blocks:
            assert group_of(block).state is GroupState.SHARDED


# -- how often they run ------------------------------------------------------------------------


class Twice(nn.Module):
    """Enters one block three times: one after the other, and side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.other = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.block(self.block(x)))
        return x + self.block(2 * x)


@on_threads(2)
def test_one_module_entered_several_times(rank: int, world_size: int) -> None:
    for free in (True, False):
        net, whole = twins(Twice, reshard_after_forward=free)
        train_alike(net, whole, rank, world_size)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@on_threads(2)
def test_forwards_and_an_evaluation_before_one_backward(
    rank: int, world_size: int, guard: Any
) -> None:
    net, whole = twins(Net)
    for step in range(2):
        x, other = batches(world_size, step), batches(world_size, step + 1)
        losses = [loss_of(net, part[rank]) for part in (x, other)]
        with guard():
            net(x[rank])
        sum(losses).backward()
        average_backward(whole, x)
        average_backward(whole, other)
        assert_same_gradients(net, whole)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@on_threads(2)
def test_what_stayed_whole_over_a_step_is_gathered_anew(
    rank: int, world_size: int, guard: Any, options: Any
) -> None:
    net, whole = twins(Net, reshard_after_forward=None)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, **options) for m in (net, whole)]
    for step in range(2):
        x = batches(world_size, step)
        run_backward(net, whole, x, rank)
        with guard():
            torch.testing.assert_close(net(x[rank]), whole(x[rank]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with guard():
            torch.testing.assert_close(net(x[rank]), whole(x[rank]), msg="stale values")


# -- views and compiled blocks -----------------------------------------------------------------


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(-1, 2, 4)


class _Writing(nn.Module):
    """Writes in place to the views that its blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Viewing(), Viewing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        out += 1.0
        out = self.second(out.flatten(1)[:, :WIDTH])
        out[:, 0].mul_(2.0)
        return out


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_transport(2)
def test_views_that_are_returned_may_be_written_to(
    rank: int, world_size: int, transport: str
) -> None:
    net, whole = seeded(_Writing), seeded(_Writing)
    for each in (net.first, net.second, net):
        fully_shard(each, reshard_after_forward=True, transport=transport)
    train_alike(net, whole, rank, world_size)


@pytest.mark.parametrize("in_place", [True, False], ids=["module.compile", "torch.compile"])
@on_processes(2)
def test_compiled_blocks_train_alike_with_hooks_outside_of_graphs(
    rank: int, world_size: int, in_place: bool
) -> None:
    # Dynamo itself looks at the gradients of a graph's inputs.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    net, whole = seeded(Net), seeded(Net)
    frames: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    for i, block in enumerate(net.blocks):
        if in_place:
            block.compile(backend=backend)
        fully_shard(block)
        if not in_place:
            net.blocks[i] = torch.compile(block, backend=backend)
    fully_shard(net)
    managed = [module for module in net.modules() if not hasattr(module, "_orig_mod")]
    assert all(module._is_fsdp_managed_module for module in managed)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (net, whole)]
    for step in range(2):
        x = batches(world_size, step)
        run_backward(net, whole, x, rank)
        grads = [param.grad.full_tensor() for param in net.parameters()]
        for found, param in zip(grads, whole.parameters(), strict=True):
            torch.testing.assert_close(found, param.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert frames, "something was compiled"
    for graph in frames:
        assert "all_gather" not in graph.code
        assert "shardwise" not in graph.code
    targets = {node.target for graph in frames for node in graph.graph.nodes}
    assert any("linear" in str(target) for target in targets), targets
